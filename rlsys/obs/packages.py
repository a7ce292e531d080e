"""Installed packages against the versions that rlsys asks for: what tests ran, by rlsys' own metadata."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement

EXTRAS = ("cpu", "gpu")
SGLANG_PINS = ("torch", "transformers")
"""SGLang's kernels and its prefix tree are compiled for one torch."""


@dataclass(frozen=True)
class Mismatch:
    """`version` None: not installed."""

    name: str
    version: str | None
    expected: str

    def __str__(self) -> str:
        found = f"{self.version} is installed" if self.version else "is not installed"
        return f"{self.name} {found}, expected {self.expected}"


def mismatches() -> dict[str, Mismatch]:
    """By name, the packages whose version is outside the range that rlsys asks for, and those that are missing.

    An environment is set up for a host of one kind: it is compared with the extra that it fits best.
    """
    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires("rlsys") or ()]
    except importlib.metadata.PackageNotFoundError:
        return {"rlsys": Mismatch("rlsys", None, "a package: versions are compared with what it asks for")}
    sglang = next((r for r in wanted if r.name == "sglang"), None)
    kinds = []
    for extra in EXTRAS:
        asked = [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": extra})]
        if extra == "cpu" and sglang is not None:
            asked.append(sglang)  # installed there without what its metadata asks for
        elif extra == "gpu":
            asked += _pins_of_sglang()
        kinds.append(dict(_unmet(asked)))
    return min(kinds, key=len)


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unmet(requirements: list[Requirement]) -> Iterator[tuple[str, Mismatch]]:
    for r in requirements:
        version = installed(r.name)
        if version is None or not r.specifier.contains(version, prereleases=True):
            yield r.name, Mismatch(r.name, version, str(r.specifier) or "any version")


def other_than_sglang_pins(name: str) -> Mismatch | None:
    """How the installed package differs from what the installed SGLang pins; None where it does not, or where SGLang
    pins none."""
    pins = [r for r in _pins_of_sglang() if r.name == name]
    return dict(_unmet(pins)).get(name)


def _pins_of_sglang() -> list[Requirement]:
    try:
        lines = importlib.metadata.requires("sglang") or ()
    except importlib.metadata.PackageNotFoundError:
        return []
    pins = [Requirement(line) for line in lines]
    return [r for r in pins if r.name in SGLANG_PINS and r.marker is None]
