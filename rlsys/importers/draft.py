"""A config in the making: what a foreign script gives, and what became of each of its settings.

Each setting ends in exactly one of five lists: `mapped` (a field of ours), `defaults` (rlsys does so anyway),
`speed` (no counterpart; it changes speed, memory or logging), `refused` (no counterpart; it changes the method) and
`missing` (the script leaves its value open). A field that depends on a refused or missing setting is not written.
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

MOST = 10**7
"""Largest whole number that a translation computes with."""
_LONGEST_VALUE = 10_000
"""Characters of a value that is read as YAML; a longer one, or one of more than 200 brackets, is a text."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
Reasons = Sequence[tuple[str, tuple[Any, ...] | None, str]]
"""Patterns of names; the values for which the reason holds, None for all; the reason."""


class OtherRun(UserError):
    """The script starts another kind of run than RL; nothing is written. Exit code 3."""

    exit_code = 3


@dataclass(frozen=True)
class Unresolved:
    """A value that the script alone does not tell."""

    text: str
    """As the script has it; empty where it has nothing."""
    why: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Settings:
    """What a script says."""

    values: dict[str, Any]
    """By their name: a text, a list of texts, Unresolved, or True for an option without a value."""
    problems: list[str] = field(default_factory=list)
    """What the reader could not follow, each a line."""
    notes: list[str] = field(default_factory=list)


def parsed(text: Any) -> Any:
    """A value as YAML reads it; `1e-6` is a number here, as it is for Hydra and argparse."""
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
    """One of their settings, and what became of it."""

    theirs: str
    value: str
    ours: str

    def __str__(self) -> str:
        if not self.theirs:
            return self.ours
        return f"{self.theirs}{f' = {self.value}' if self.value else ''}: {self.ours}"


@dataclass
class Draft:
    """Owns the settings that nobody has looked at yet."""

    settings: dict[str, Any]
    """Theirs, by name; a flag without a value is True."""
    names: Mapping[str, str]
    """Theirs -> our field, with what there is to say of it (VERL, SLIME)."""
    config: dict[str, Any] = field(default_factory=dict)
    mapped: list[Row] = field(default_factory=list)
    defaults: list[Row] = field(default_factory=list)
    speed: list[Row] = field(default_factory=list)
    refused: list[Row] = field(default_factory=list)
    missing: list[Row] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    """What a person must look at in the config: values that fit theirs only in part."""
    used: set[str] = field(default_factory=set)
    _left_out: dict[str, list[str]] = field(default_factory=dict)
    """Fields that are not written, by the setting that decides them."""

    @property
    def complete(self) -> bool:
        return not self.missing and not self.refused

    # What the script says

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The value; `otherwise` also for one that is not known, whose fields `put` then leaves out."""
        self.used.add(name)
        value = self.settings.get(name)
        value = otherwise if isinstance(value, Unresolved) else parsed(value)
        return otherwise if value is None or value == "" else value

    def given(self, name: str) -> bool:
        return self.get(name) is not None

    def present(self, name: str) -> bool:
        """Whether the script has it, known or not."""
        return name in self.settings and self.settings[name] not in (None, "")

    def open(self, name: str) -> bool:
        """Whether the script has it and leaves its value open."""
        return isinstance(self.settings.get(name), Unresolved)

    def number(self, name: str, otherwise: float) -> float:
        """Raises UserError for a text that is no number."""
        value = self.get(name)
        if name in self.settings and value is None and not self.open(name) and otherwise > 0:
            self.unknown(name, "it is empty or null")
        if value is True:  # an option without a value, unless a YAML file says so
            self.settings[name] = Unresolved("", "it needs a value and has none")
            value = None
        if value is None:
            return otherwise
        raw = str(self.settings[name])
        if isinstance(value, bool | list | dict) or len(raw) > 100 or not _NUMBER.fullmatch(raw.strip()):
            raise UserError(f"{name} = {_short(raw)}: expected a number")
        number = float(raw)
        if not math.isfinite(number):
            raise UserError(f"{name} = {_short(raw)}: expected a finite number")
        return number

    def whole(self, name: str, otherwise: int) -> int:
        """Raises UserError for what is no whole number of a sensible size."""
        number = self.number(name, otherwise)
        if number != int(number) or abs(number) > MOST:
            raise UserError(
                f"{name} = {_short(str(self.settings[name]))}: expected a whole number up to {MOST:,}"
            )
        return int(number)

    def text(self, name: str, otherwise: str = "") -> str:
        value = self.get(name)
        if value is True and self.settings[name] is True:
            self.settings[name] = Unresolved("", "it needs a value and has none")
            value = None
        return otherwise if value is None else str(self.settings[name])

    def flag(self, name: str) -> bool:
        """Raises UserError for what is neither true nor false."""
        value = self.get(name, False)
        if value not in (True, False, 0, 1):
            raise UserError(f"{name} = {_short(str(self.settings[name]))}: expected true or false")
        return bool(value)

    def require(self, name: str, why: str = "the script does not give it") -> None:
        """A setting without which theirs does not start either."""
        if not self.present(name):
            self.settings[name] = Unresolved("", why)

    def unknown(self, name: str, why: str) -> None:
        """The script gives a value that does not decide ours."""
        self.settings[name] = Unresolved(str(self.settings.get(name, "")), why)

    # What becomes of it

    def put(self, place: str, value: Any, *names: str) -> None:
        """Write a field.

        Args:
            place: our field, `section.field`.
            value: its value.
            names: the settings that decide it. The field is left out where one is refused or open.
        """
        self.used.update(names)
        refused = {row.theirs for row in self.refused}
        open_names = [n for n in names if self.open(n)]
        for name in open_names:
            places = self._left_out.setdefault(name, [])
            if place not in places:
                places.append(place)
        if open_names or refused.intersection(names):
            self._drop(place)
            return
        *sections, last = place.split(".")
        at = self.config
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
        ours = f"{place} = {_short(value)}"
        rows = [Row(n, str(self.settings[n]), ours) for n in names if n in self.settings]
        self.mapped += rows
        if not rows:
            self.defaults.append(Row("", "", f"{ours} ({names[0]} is not in the script)" if names else ours))

    def _drop(self, place: str) -> None:
        *sections, last = place.split(".")
        at: Any = self.config
        for section in sections:
            at = at.get(section, {})
        at.pop(last, None)

    def read(self, place: str, otherwise: Any) -> Any:
        """A field that was written, or `otherwise` where it was left out."""
        at: Any = self.config
        for part in place.split("."):
            at = at.get(part) if isinstance(at, dict) else None
        return otherwise if at is None else at

    def move(self, name: str, kind: type = str) -> None:
        """The same value under our name."""
        if not self.present(name):
            return
        value = (
            self.text(name) if kind is str else self.whole(name, 0) if kind is int else self.number(name, 0.0)
        )
        self.put(self.names[name], value, name)

    def cut(self, top_p: str, top_k: str) -> None:
        """What sampling leaves out; theirs is off with 1 and -1."""
        most, mass = self.whole(top_k, -1), self.number(top_p, 1.0)
        if most == 1:
            self.refuse(top_k, "from one token nothing is drawn, and nothing is learned")
        elif most > 1 or mass != 1.0 or self.open(top_p) or self.open(top_k):
            self.put("rollout.top_k", min(most, 2048) if most > 1 else 1024, top_k, top_p)
            self.put("rollout.top_p", mass, top_p)
            if most < 2:
                self.odd.append("rollout.top_k = 1024: top_p needs a bound on the tokens that engines name")

    def refuse(self, name: str, why: str) -> None:
        """No counterpart, and it changes the method."""
        self.used.add(name)
        if self.present(name) and not any(row.theirs == name for row in self.refused):
            self.refused.append(Row(name, str(self.settings[name]), why))

    def close(self, defaults: Reasons, speed: Iterable[tuple[str, str]], settings: Settings) -> None:
        """Sort what is left, and list what the script leaves open."""
        speed = list(speed)
        for name, value in list(self.settings.items()):
            if name in self.used:
                continue
            row = Row(name, str(value), "")
            for pattern, accepted, why in defaults:
                if not re.search(pattern, name):
                    continue
                if accepted is None or (not isinstance(value, Unresolved) and parsed(value) in accepted):
                    self.defaults.append(Row(name, row.value, why))
                elif isinstance(value, Unresolved):
                    self._left_out.setdefault(name, [])
                else:
                    self.refused.append(Row(name, row.value, f"no counterpart; here: {why}"))
                break
            else:
                reason = next((why for pattern, why in speed if re.search(pattern, name)), None)
                if reason is not None:
                    self.speed.append(Row(name, row.value, reason))
                else:
                    self.refused.append(Row(name, row.value, "no counterpart is known"))
        refused = {row.theirs for row in self.refused}
        for name, value in self.settings.items():
            needed = name in self._left_out or name in self.used
            if isinstance(value, Unresolved) and needed and name not in refused:
                places = self._left_out.get(name, [])
                left_out = f"; left out: {', '.join(places)}" if places else ""
                self.missing.append(Row(name, value.text, f"{value.why}{left_out}"))
        listed = {
            row.theirs
            for rows in (self.mapped, self.defaults, self.speed, self.refused, self.missing)
            for row in rows
        }
        for name, value in self.settings.items():
            if name not in listed and name != "train":
                self.defaults.append(Row(name, str(value), "decides no field with this value"))
        self.missing += [Row("", "", problem) for problem in settings.problems]
        self.mapped = list(self._one_row_each())
        self.odd += settings.notes

    def _one_row_each(self) -> Iterator[Row]:
        """Each translated setting with all fields that it decides, its own field first."""
        fields: dict[str, dict[str, Row]] = {}
        for row in self.mapped:
            fields.setdefault(row.theirs, {})[row.ours.partition(" ")[0]] = row
        for name, rows in fields.items():
            own = re.match(r"[\w.]*", self.names.get(name, ""))
            last = sorted(rows.values(), key=lambda row: own is None or not row.ours.startswith(f"{own[0]} "))
            yield Row(name, last[0].value, "; ".join(row.ours for row in last))


def _short(value: Any) -> str:
    if not isinstance(value, str):
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
        value = text.strip().removesuffix("...").strip()
    return value if len(value) <= 200 else value[:197] + "..."


def as_yaml(draft: Draft, source: str) -> str:
    """The config with its origin, and above it what a person has to look at."""
    order = (
        "run",
        "model",
        "data",
        "eval",
        "rollout",
        "algo",
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
        ("NOT TRANSLATED", draft.refused),
        ("LOOK AT", draft.odd),
    ):
        lines += [f"# {title}: {' '.join(str(row).split())}" for row in rows]
    return "\n".join(lines) + "\n" + yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
