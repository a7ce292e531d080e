"""Config draft: the result of translating another framework's launch script.

Each setting of the script ends in exactly one list: `mapped` (translated to a field), `defaults` (rlsys does
the same by default), `speed` (no counterpart; affects speed, memory or logging), `rejected` (no counterpart;
affects the method) and `missing` (the script does not determine the value). A field that depends on a
rejected or missing setting is not written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from rlsys.core.errors import UserError
from rlsys.core.yaml_text import parse_yaml

MAX_INTEGER = 10**7
"""Maximum absolute value of an integer setting."""
_LONGEST_VALUE = 10_000
"""Maximum characters of a value that is parsed as YAML; a longer one, or one with over 200 brackets, is a string."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
Reasons = Sequence[tuple[str, tuple[Any, ...] | None, str]]
"""(pattern of setting names, values that the reason applies to or None for all, reason)."""


@dataclass(frozen=True)
class Unresolved:
    """Value that the script alone does not determine."""

    text: str
    """Text in the script; empty if it has none."""
    reason: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Settings:
    """Settings of a script."""

    values: dict[str, Any]
    """Name -> a string, a list of strings, Unresolved, or True for an option without a value."""
    problems: list[str] = field(default_factory=list)
    """Constructs that the reader does not support, one line each."""
    notes: list[str] = field(default_factory=list)


def parse_value(text: Any) -> Any:
    """Parse a value as YAML; `1e-6` is a number here, as it is for Hydra and argparse."""
    if not isinstance(text, str) or len(text) > _LONGEST_VALUE or text.count("[") + text.count("{") > 200:
        return text
    if re.fullmatch(r"[-+]?[\d.]{1,40}[eE][-+]?\d{1,5}", text) and _NUMBER.fullmatch(text):
        return float(text)
    try:
        return parse_yaml(text, "a value")
    except UserError:
        return text


@dataclass(frozen=True)
class Row:
    """One setting of the script, and the result of its translation."""

    setting: str
    value: str
    result: str

    def __str__(self) -> str:
        if not self.setting:
            return self.result
        return f"{self.setting}{f' = {self.value}' if self.value else ''}: {self.result}"


@dataclass
class Draft:
    """Config draft and the settings that are not translated yet."""

    settings: dict[str, Any]
    """Setting name -> value; True for an option without a value."""
    names: Mapping[str, str]
    """Setting name -> our field, with notes (VERL, SLIME)."""
    config: dict[str, Any] = field(default_factory=dict)
    mapped: list[Row] = field(default_factory=list)
    defaults: list[Row] = field(default_factory=list)
    speed: list[Row] = field(default_factory=list)
    rejected: list[Row] = field(default_factory=list)
    missing: list[Row] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Values that need a manual check, since they match the setting only in part."""
    is_fine_tuning: bool = False
    """Whether the config is one for `rlsys sft`."""
    has_evaluation: bool = True
    consumed: set[str] = field(default_factory=set)
    _omitted_fields: dict[str, list[str]] = field(default_factory=dict)
    """Setting -> fields that are omitted because of it."""

    @property
    def is_complete(self) -> bool:
        return not self.missing and not self.rejected

    # Settings of the script

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting's value, or `default` if it is unset or unresolved; `set_field` then omits its fields."""
        self.consumed.add(name)
        value = self.settings.get(name)
        value = default if isinstance(value, Unresolved) else parse_value(value)
        return default if value is None or value == "" else value

    def has_value(self, name: str) -> bool:
        return self.get(name) is not None

    def is_present(self, name: str) -> bool:
        """Whether the script has the setting, with a resolved value or not."""
        return name in self.settings and self.settings[name] not in (None, "")

    def is_unresolved(self, name: str) -> bool:
        """Whether the script has the setting without a resolved value."""
        return isinstance(self.settings.get(name), Unresolved)

    def number(self, name: str, default: float) -> float:
        """Return a setting as a number.

        Raises:
            UserError: the value is not a finite number.
        """
        value = self.get(name)
        if name in self.settings and value is None and not self.is_unresolved(name) and default > 0:
            self.mark_unresolved(name, "it is empty or null")
        if value is True:  # an option without a value, unless a YAML file says so
            self.settings[name] = Unresolved("", "it needs a value and has none")
            value = None
        if value is None:
            return default
        raw = str(self.settings[name])
        if isinstance(value, bool | list | dict) or len(raw) > 100 or not _NUMBER.fullmatch(raw.strip()):
            raise UserError(f"{name} = {_short(raw)}: expected a number")
        number = float(raw)
        if not math.isfinite(number):
            raise UserError(f"{name} = {_short(raw)}: expected a finite number")
        return number

    def integer(self, name: str, default: int) -> int:
        """Return a setting as an integer.

        Raises:
            UserError: the value is not an integer, or larger than MAX_INTEGER.
        """
        number = self.number(name, default)
        if number != int(number) or abs(number) > MAX_INTEGER:
            raise UserError(
                f"{name} = {_short(str(self.settings[name]))}: expected a whole number up to {MAX_INTEGER:,}"
            )
        return int(number)

    def text(self, name: str, default: str = "") -> str:
        value = self.get(name)
        if value is True and self.settings[name] is True:
            self.settings[name] = Unresolved("", "it needs a value and has none")
            value = None
        return default if value is None else str(self.settings[name])

    def flag(self, name: str) -> bool:
        """Return a setting as a bool.

        Raises:
            UserError: the value is neither true nor false.
        """
        value = self.get(name, False)
        if value not in (True, False, 0, 1):
            raise UserError(f"{name} = {_short(str(self.settings[name]))}: expected true or false")
        return bool(value)

    def require(self, name: str, reason: str = "the script does not give it") -> None:
        """Mark a setting as unresolved if the script lacks it and the other framework requires it."""
        if not self.is_present(name):
            self.settings[name] = Unresolved("", reason)

    def mark_unresolved(self, name: str, reason: str) -> None:
        """Mark a setting as unresolved: its value does not determine our field."""
        self.settings[name] = Unresolved(str(self.settings.get(name, "")), reason)

    # Fields of the config

    def set_field(self, path: str, value: Any, *names: str) -> None:
        """Write a config field.

        Args:
            path: dotted path of the field, `section.field`.
            value: its value.
            names: the settings that determine it. The field is omitted if one of them is rejected or
                unresolved.
        """
        self.consumed.update(names)
        rejected = {row.setting for row in self.rejected}
        open_names = [n for n in names if self.is_unresolved(n)]
        for name in open_names:
            paths = self._omitted_fields.setdefault(name, [])
            if path not in paths:
                paths.append(path)
        if open_names or rejected.intersection(names):
            self._remove_field(path)
            return
        *sections, key = path.split(".")
        mapping = self.config
        for section in sections:
            mapping = mapping.setdefault(section, {})
        mapping[key] = value
        result = f"{path} = {_short(value)}"
        rows = [Row(n, str(self.settings[n]), result) for n in names if n in self.settings]
        self.mapped += rows
        if not rows:
            self.defaults.append(
                Row("", "", f"{result} ({names[0]} is not in the script)" if names else result)
            )

    def _remove_field(self, path: str) -> None:
        *sections, key = path.split(".")
        mapping: Any = self.config
        for section in sections:
            mapping = mapping.get(section, {})
        mapping.pop(key, None)

    def get_field(self, path: str, default: Any) -> Any:
        """Return a config field, or `default` if it was omitted."""
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    def copy_setting(self, name: str, kind: type[str] | type[int] | type[float] = str) -> None:
        """Copy the value of a setting to the field of `names`."""
        if not self.is_present(name):
            return
        value: str | int | float
        if kind is int:
            value = self.integer(name, 0)
        elif kind is float:
            value = self.number(name, 0.0)
        else:
            value = self.text(name)
        self.set_field(self.names[name], value, name)

    def set_truncation(self, top_p: str, top_k: str) -> None:
        """Write rollout.top_k and rollout.top_p; 1 and -1 disable them in the other frameworks."""
        limit, mass = self.integer(top_k, -1), self.number(top_p, 1.0)
        if limit == 1:
            self.reject(top_k, "from one token nothing is drawn, and nothing is learned")
        elif limit > 1 or mass != 1.0 or self.is_unresolved(top_p) or self.is_unresolved(top_k):
            self.set_field("rollout.top_k", min(limit, 2048) if limit > 1 else 1024, top_k, top_p)
            self.set_field("rollout.top_p", mass, top_p)
            if not 1 < limit <= 2048:
                bound = self.get_field("rollout.top_k", 1024)
                self.warnings.append(f"rollout.top_k = {bound}: engines name a bounded number of tokens")

    def reject(self, name: str, reason: str) -> None:
        """Record a setting without a counterpart that affects the method."""
        self.consumed.add(name)
        if self.is_present(name) and not any(row.setting == name for row in self.rejected):
            self.rejected.append(Row(name, str(self.settings[name]), reason))

    def finish(self, defaults: Reasons, speed: Iterable[tuple[str, str]], settings: Settings) -> None:
        """Classify the remaining settings, and list the unresolved ones."""
        speed = list(speed)
        for name, value in list(self.settings.items()):
            if name in self.consumed:
                continue
            row = Row(name, str(value), "")
            for pattern, accepted, reason in defaults:
                if not re.search(pattern, name):
                    continue
                if accepted is None or (not isinstance(value, Unresolved) and parse_value(value) in accepted):
                    self.defaults.append(Row(name, row.value, reason))
                elif isinstance(value, Unresolved):
                    self._omitted_fields.setdefault(name, [])
                else:
                    self.rejected.append(Row(name, row.value, f"no counterpart; here: {reason}"))
                break
            else:
                speed_reason = next((reason for pattern, reason in speed if re.search(pattern, name)), None)
                if speed_reason is not None:
                    self.speed.append(Row(name, row.value, speed_reason))
                else:
                    self.rejected.append(Row(name, row.value, "no counterpart is known"))
        rejected = {row.setting for row in self.rejected}
        for name, value in self.settings.items():
            is_required = name in self._omitted_fields or name in self.consumed
            if isinstance(value, Unresolved) and is_required and name not in rejected:
                paths = self._omitted_fields.get(name, [])
                omitted = f"; left out: {', '.join(paths)}" if paths else ""
                self.missing.append(Row(name, value.text, f"{value.reason}{omitted}"))
        reported = {
            row.setting
            for rows in (self.mapped, self.defaults, self.speed, self.rejected, self.missing)
            for row in rows
        }
        for name, value in self.settings.items():
            if name not in reported and name != "train":
                self.defaults.append(Row(name, str(value), "decides no field with this value"))
        self.missing += [Row("", "", problem) for problem in settings.problems]
        self.mapped = list(self._merge_rows())
        self.warnings += settings.notes

    def _merge_rows(self) -> Iterator[Row]:
        """Each translated setting with all fields that it decides, its own field first."""
        fields: dict[str, dict[str, Row]] = {}
        for row in self.mapped:
            fields.setdefault(row.setting, {})[row.result.partition(" ")[0]] = row
        for name, rows in fields.items():
            own_field = re.match(r"[\w.]*", self.names.get(name, ""))
            last = sorted(
                rows.values(),
                key=lambda row: own_field is None or not row.result.startswith(f"{own_field[0]} "),
            )
            yield Row(name, last[0].value, "; ".join(row.result for row in last))


def _short(value: Any) -> str:
    if not isinstance(value, str):
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
        value = text.strip().removesuffix("...").strip()
    return value if len(value) <= 200 else value[:197] + "..."


def to_yaml(draft: Draft, source: str) -> str:
    """Format the config with its origin, below comments on what needs a manual check."""
    order = (
        "run",
        "model",
        "data",
        "eval",
        "rollout",
        "algo",
        "sft",
        "trainer",
        "parallel",
        "engine",
        "weights",
        "launch",
    )
    config = {name: draft.config[name] for name in order if draft.config.get(name)}
    lines = [f"# Translated from {source} by rlsys import."]
    for title, rows in (
        ("MISSING", draft.missing),
        ("MISSING", draft.rejected),
        ("LOOK AT", draft.warnings),
    ):
        lines += [f"# {title}: {' '.join(str(row).split())}" for row in rows]
    return "\n".join(lines) + "\n" + yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
