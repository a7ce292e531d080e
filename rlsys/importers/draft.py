"""Config draft: the result of translating another framework's launch script.

Each setting of the script ends in exactly one list:

    mapped      translated to a field
    defaults    rlsys does the same by default
    speed       no counterpart, affects only speed, memory or logging
    rejected    no counterpart, affects the method
    missing     the script does not determine the value

A field that depends on a rejected or missing setting is not written.
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
_MAX_YAML_CHARACTERS = 10_000
"""Maximum number of characters of a value that is parsed as YAML."""
_MAX_YAML_BRACKETS = 200
"""Maximum number of opening brackets of a value that is parsed as YAML."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
Reasons = Sequence[tuple[str, tuple[Any, ...] | None, str]]
"""(pattern of names of settings, values to which the reason applies or None for all, reason)."""


@dataclass(frozen=True)
class Unresolved:
    """Value that the script does not determine.

    Attributes:
        text: text in the script; empty if there is none.
        reason: why the value is unknown.
    """

    text: str
    reason: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Settings:
    """Settings of a script.

    Attributes:
        values: name -> a string, a list of strings, Unresolved, or True for an option without a value; from a YAML
            file any value.
        problems: parts of the script that the reader does not support, one line each.
        notes: lines for the user.
    """

    values: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def parse_value(text: Any) -> Any:
    """Parse a string as YAML, but `1e-6` as a number, as Hydra and argparse do.

    Returns:
        The value; `text` if it is no string, no YAML, or too large.
    """
    if not isinstance(text, str) or len(text) > _MAX_YAML_CHARACTERS:
        return text
    if text.count("[") + text.count("{") > _MAX_YAML_BRACKETS:
        return text
    if re.fullmatch(r"[-+]?[\d.]{1,40}[eE][-+]?\d{1,5}", text) and _NUMBER.fullmatch(text):
        return float(text)
    try:
        return parse_yaml(text, "a value")
    except UserError:
        return text


@dataclass(frozen=True)
class Row:
    """A setting of the script, and the result of its translation.

    Attributes:
        setting: name of the setting; empty for a line about the script or the config.
        value: text of its value.
        result: field and value, or a reason.
    """

    setting: str
    value: str
    result: str

    def __str__(self) -> str:
        if not self.setting:
            return self.result
        return f"{self.setting}{f' = {self.value}' if self.value else ''}: {self.result}"


@dataclass
class Draft:
    """Config draft, and the result of each setting.

    Attributes:
        settings: name of a setting -> its value; True for an option without a value.
        names: name of a setting -> field of rlsys, with differences (VERL, SLIME).
        config: section -> its fields.
        mapped: see the module; so are defaults, speed, rejected and missing.
        warnings: lines about values that match a setting only in part, so that the user must check them.
        is_fine_tuning: whether the config is for `rlsys sft`.
        has_evaluation: whether the script evaluates.
        consumed: names of the settings that were read. `finish` classifies all others.
    """

    settings: dict[str, Any]
    names: Mapping[str, str]
    config: dict[str, Any] = field(default_factory=dict)
    mapped: list[Row] = field(default_factory=list)
    defaults: list[Row] = field(default_factory=list)
    speed: list[Row] = field(default_factory=list)
    rejected: list[Row] = field(default_factory=list)
    missing: list[Row] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_fine_tuning: bool = False
    has_evaluation: bool = True
    consumed: set[str] = field(default_factory=set)
    _omitted_fields: dict[str, list[str]] = field(default_factory=dict)
    """Name of a setting -> fields that are omitted because of it."""

    @property
    def is_complete(self) -> bool:
        """Whether no setting is missing or rejected."""
        return not self.missing and not self.rejected

    # Settings of the script

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting; `default` if it is not set, empty or unresolved."""
        self.consumed.add(name)
        value = self.settings.get(name)
        value = default if isinstance(value, Unresolved) else parse_value(value)
        return default if value is None or value == "" else value

    def has_value(self, name: str) -> bool:
        """Return whether the script has the setting with a resolved value."""
        return self.get(name) is not None

    def is_present(self, name: str) -> bool:
        """Return whether the script has the setting, with a resolved or an unresolved value."""
        return name in self.settings and self.settings[name] not in (None, "")

    def is_unresolved(self, name: str) -> bool:
        """Return whether the script has the setting with an unresolved value."""
        return isinstance(self.settings.get(name), Unresolved)

    def number(self, name: str, default: float) -> float:
        """Return a setting as a number; `default` if it is not set or unresolved.

        Raises:
            UserError: the value is not a finite number.
        """
        value = self.get(name)
        if name in self.settings and value is None and not self.is_unresolved(name) and default > 0:
            self.mark_unresolved(name, "the value is empty; expected a number")
        if value is True:  # an option without a value, or true in a YAML file
            self.settings[name] = Unresolved("", "the option has no value; expected a number")
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
        """Return a setting as an integer; `default` if it is not set or unresolved.

        Raises:
            UserError: the value is not an integer, or its absolute value is larger than MAX_INTEGER.
        """
        number = self.number(name, default)
        if number != int(number) or abs(number) > MAX_INTEGER:
            raise UserError(
                f"{name} = {_short(str(self.settings[name]))}: expected an integer up to {MAX_INTEGER:,}"
            )
        return int(number)

    def text(self, name: str, default: str = "") -> str:
        """Return a setting as a string; `default` if it is not set, empty or unresolved."""
        value = self.get(name)
        if value is True and self.settings[name] is True:
            self.settings[name] = Unresolved("", "the option has no value; expected one")
            value = None
        return default if value is None else str(self.settings[name])

    def flag(self, name: str) -> bool:
        """Return a setting as a bool; False if it is not set or unresolved.

        Raises:
            UserError: the value is neither true nor false.
        """
        value = self.get(name, False)
        if value not in (True, False, 0, 1):
            raise UserError(f"{name} = {_short(str(self.settings[name]))}: expected true or false")
        return bool(value)

    def require(self, name: str, reason: str = "the script does not set it") -> None:
        """Mark a setting that the other framework requires as unresolved, if the script does not have it."""
        if not self.is_present(name):
            self.settings[name] = Unresolved("", reason)

    def mark_unresolved(self, name: str, reason: str) -> None:
        """Mark a setting as unresolved, because its value does not determine a field."""
        self.settings[name] = Unresolved(str(self.settings.get(name, "")), reason)

    # Fields of the config

    def set_field(self, path: str, value: Any, *names: str) -> None:
        """Write a config field, or omit it if one of its settings is rejected or unresolved.

        Args:
            path: dotted path of the field, `section.field`.
            value: value of the field.
            names: the settings that determine the field.
        """
        self.consumed.update(names)
        rejected = {row.setting for row in self.rejected}
        unresolved = [n for n in names if self.is_unresolved(n)]
        for name in unresolved:
            paths = self._omitted_fields.setdefault(name, [])
            if path not in paths:
                paths.append(path)
        if unresolved or rejected.intersection(names):
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
        """Remove a config field if it exists."""
        *sections, key = path.split(".")
        mapping: Any = self.config
        for section in sections:
            mapping = mapping.get(section, {})
        mapping.pop(key, None)

    def get_field(self, path: str, default: Any) -> Any:
        """Return a config field; `default` if it is not written."""
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    def copy_setting(self, name: str, kind: type[str] | type[int] | type[float] = str) -> None:
        """Copy the value of a setting, if the script has it, to its field in `names`.

        Args:
            name: the setting.
            kind: type of the value.
        """
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
        """Write rollout.top_k and rollout.top_p. In the other frameworks, top_k -1 and top_p 1 exclude no token.

        Args:
            top_p: the setting of top_p.
            top_k: the setting of top_k.
        """
        limit, mass = self.integer(top_k, -1), self.number(top_p, 1.0)
        if limit == 1:
            self.reject(top_k, "expected more than 1, because all samples of greedy decoding are equal")
        elif limit > 1 or mass != 1.0 or self.is_unresolved(top_p) or self.is_unresolved(top_k):
            self.set_field("rollout.top_k", min(limit, 2048) if limit > 1 else 1024, top_k, top_p)
            self.set_field("rollout.top_p", mass, top_p)
            if not 1 < limit <= 2048:
                bound = self.get_field("rollout.top_k", 1024)
                self.warnings.append(f"rollout.top_k = {bound}: engines return a bounded number of tokens")

    def reject(self, name: str, reason: str) -> None:
        """Record a setting as rejected, if the script has it.

        Args:
            name: the setting.
            reason: why its value cannot be translated.
        """
        self.consumed.add(name)
        if self.is_present(name) and not any(row.setting == name for row in self.rejected):
            self.rejected.append(Row(name, str(self.settings[name]), reason))

    def finish(self, defaults: Reasons, speed: Iterable[tuple[str, str]], settings: Settings) -> None:
        """Complete the lists: classify the settings that were not read, and list the unresolved ones as missing.

        Args:
            defaults: settings that request what rlsys does by default.
            speed: (pattern of names, reason) of settings that affect only speed, memory or logging.
            settings: settings of the script, with its problems and notes.
        """
        speed = list(speed)
        for name, value in list(self.settings.items()):
            if name not in self.consumed:
                self._classify(name, value, defaults, speed)
        rejected = {row.setting for row in self.rejected}
        for name, value in self.settings.items():
            is_required = name in self._omitted_fields or name in self.consumed
            if isinstance(value, Unresolved) and is_required and name not in rejected:
                paths = self._omitted_fields.get(name, [])
                omitted = f"; omitted: {', '.join(paths)}" if paths else ""
                self.missing.append(Row(name, value.text, f"{value.reason}{omitted}"))
        reported = {
            row.setting
            for rows in (self.mapped, self.defaults, self.speed, self.rejected, self.missing)
            for row in rows
        }
        for name, value in self.settings.items():
            if name not in reported and name != "train":
                self.defaults.append(Row(name, str(value), "no effect with this value"))
        self.missing += [Row("", "", problem) for problem in settings.problems]
        self.mapped = list(self._merge_rows())
        self.warnings += settings.notes

    def _classify(self, name: str, value: Any, defaults: Reasons, speed: Iterable[tuple[str, str]]) -> None:
        """Add a setting that was not read to its list. `defaults` and `speed` are those of `finish`."""
        text = str(value)
        for pattern, accepted, reason in defaults:
            if not re.search(pattern, name):
                continue
            if accepted is None or (not isinstance(value, Unresolved) and parse_value(value) in accepted):
                self.defaults.append(Row(name, text, reason))
            elif isinstance(value, Unresolved):
                self._omitted_fields.setdefault(name, [])
            else:
                self.rejected.append(Row(name, text, f"no counterpart; here: {reason}"))
            return
        speed_reason = next((reason for pattern, reason in speed if re.search(pattern, name)), None)
        if speed_reason is not None:
            self.speed.append(Row(name, text, speed_reason))
        else:
            self.rejected.append(Row(name, text, "no counterpart is known"))

    def _merge_rows(self) -> Iterator[Row]:
        """Yield one row per translated setting, with all fields that it determines; the field of `names` is first."""
        rows_by_setting: dict[str, dict[str, Row]] = {}
        for row in self.mapped:
            rows_by_setting.setdefault(row.setting, {})[row.result.partition(" ")[0]] = row
        for name, rows_by_field in rows_by_setting.items():
            main_field = re.match(r"[\w.]*", self.names.get(name, ""))
            rows = sorted(
                rows_by_field.values(),
                key=lambda row: main_field is None or not row.result.startswith(f"{main_field[0]} "),
            )
            yield Row(name, rows[0].value, "; ".join(row.result for row in rows))


def _short(value: Any) -> str:
    """Return a value as YAML in one line of at most 200 characters; a string without quotes."""
    if not isinstance(value, str):
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
        value = text.strip().removesuffix("...").strip()
    return value if len(value) <= 200 else value[:197] + "..."


def to_yaml(draft: Draft, source: str) -> str:
    """Return the config as YAML, below comments with its origin and everything that the user must check.

    Args:
        draft: the config draft.
        source: name of the script.
    """
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
        ("CHECK", draft.warnings),
    ):
        lines += [f"# {title}: {' '.join(str(row).split())}" for row in rows]
    return "\n".join(lines) + "\n" + yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
