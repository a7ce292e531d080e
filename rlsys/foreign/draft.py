"""A config in the making: what of a foreign script it took, what is not needed here, and what it cannot have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml


def parsed(text: Any) -> Any:
    """A value as YAML reads it; `1e-6` is a number here, as it is for Hydra and argparse."""
    if not isinstance(text, str):
        return text
    try:
        return float(text) if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", text) else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


@dataclass(frozen=True)
class Row:
    """One of their settings, and what became of it."""

    theirs: str
    value: str
    ours: str


@dataclass
class Draft:
    """Owns the settings that nobody has looked at yet."""

    settings: dict[str, Any]
    """Theirs, by name; a flag without a value is True."""
    names: Mapping[str, str]
    """Theirs -> our field, with what there is to say of it (VERL, SLIME)."""
    config: dict[str, Any] = field(default_factory=dict)
    mapped: list[Row] = field(default_factory=list)
    needless: list[Row] = field(default_factory=list)
    refused: list[Row] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    """What a person must look at in the config: values that had to be guessed."""
    used: set[str] = field(default_factory=set)

    def get(self, name: str, otherwise: Any = None) -> Any:
        self.used.add(name)
        value = parsed(self.settings.get(name))
        return otherwise if value is None or value == "" else value

    def given(self, name: str) -> bool:
        return self.get(name) is not None

    def put(self, place: str, value: Any, *names: str) -> None:
        """`names`: the settings that it comes from; those that the script has are told."""
        *sections, last = place.split(".")
        at = self.config
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
        self.used.update(names)
        self.mapped += [
            Row(n, str(self.settings[n]), f"{place} = {_short(value)}") for n in names if n in self.settings
        ]

    def move(self, name: str, kind: type = str) -> None:
        """The same value under our name."""
        if self.given(name):
            self.put(self.names[name], kind(self.get(name)), name)

    def cut(self, top_p: str, top_k: str) -> None:
        """What sampling leaves out; theirs is off with 1 and -1."""
        most, mass = int(self.get(top_k, -1)), float(self.get(top_p, 1.0))
        if most == 1:
            self.refuse(top_k, "from one token nothing is drawn, and nothing is learned")
        elif most > 1 or mass != 1.0:
            self.put("rollout.top_k", min(most, 2048) if most > 1 else 1024, top_k)
            self.put("rollout.top_p", mass, top_p)
            if most < 2:
                self.odd.append("rollout.top_k = 1024: top_p needs a bound on the tokens that engines name")

    def refuse(self, name: str, why: str) -> None:
        self.used.add(name)
        if name in self.settings:
            self.refused.append(Row(name, str(self.settings[name]), why))

    def close(self, reasons: Iterable[tuple[str, str]]) -> None:
        """What is left: not needed for one of these reasons (by pattern), or without a counterpart that we know."""
        compiled = [(re.compile(pattern), why) for pattern, why in reasons]
        for name, value in self.settings.items():
            if name in self.used:
                continue
            why = next((why for pattern, why in compiled if pattern.search(name)), None)
            row = Row(name, str(value), why or "no counterpart is known")
            (self.needless if why else self.refused).append(row)


def _short(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
    return text if len(text) <= 90 else text[:87] + "..."


def as_yaml(draft: Draft, source: str) -> str:
    """The config with its origin, and below it what a person has to look at."""
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
    config = {name: draft.config[name] for name in order if name in draft.config}
    lines = [f"# Translated from {source} by rlsys import."]
    lines += [f"# LOOK AT: {line}" for line in draft.odd]
    lines += [f"# NOT TRANSLATED: {r.theirs} = {r.value}: {r.ours}".replace("\n", " ") for r in draft.refused]
    return "\n".join(lines) + "\n" + yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
