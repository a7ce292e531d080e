"""Comparison of installed packages with the supported versions in the metadata of rlsys."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement

EXTRAS = ("cpu", "gpu")
SGLANG_PINS = ("torch", "transformers")
"""Packages that must have the versions that SGLang pins, because its kernels are compiled for one torch."""


@dataclass(frozen=True)
class Mismatch:
    """A package that is missing, or has an unsupported version.

    Attributes:
        name: name of the package.
        version: installed version; None: not installed.
        expected: supported versions.
    """

    name: str
    version: str | None
    expected: str

    def __str__(self) -> str:
        state = f"{self.version} is installed" if self.version else "is not installed"
        return f"{self.name} {state}, expected {self.expected}"


def mismatches() -> dict[str, Mismatch]:
    """Return the packages that are missing or have an unsupported version, by name.

    The installed packages are compared with the requirements of each of EXTRAS; the result is that of the extra with
    the fewest mismatches.
    """
    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires("rlsys") or ()]
    except importlib.metadata.PackageNotFoundError:
        return {"rlsys": Mismatch("rlsys", None, "a package, whose metadata has the supported versions")}
    sglang = next((r for r in requirements if r.name == "sglang"), None)
    kinds = []
    for extra in EXTRAS:
        extra_requirements = [
            r for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})
        ]
        if extra == "cpu" and sglang is not None:
            extra_requirements.append(sglang)  # it is installed without dependencies, so no extra has it
        elif extra == "gpu":
            extra_requirements += _pins_of_sglang()
        kinds.append(dict(_unmet(extra_requirements)))
    return min(kinds, key=len)


def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unmet(requirements: list[Requirement]) -> Iterator[tuple[str, Mismatch]]:
    for r in requirements:
        version = installed_version(r.name)
        if version is None or not r.specifier.contains(version, prereleases=True):
            yield r.name, Mismatch(r.name, version, str(r.specifier) or "any version")


def sglang_pin_mismatch(name: str) -> Mismatch | None:
    """Return the mismatch of a package with the pin of the installed SGLang; None if it matches or has no pin."""
    pins = [r for r in _pins_of_sglang() if r.name == name]
    return dict(_unmet(pins)).get(name)


def _pins_of_sglang() -> list[Requirement]:
    try:
        lines = importlib.metadata.requires("sglang") or ()
    except importlib.metadata.PackageNotFoundError:
        return []
    pins = [Requirement(line) for line in lines]
    return [r for r in pins if r.name in SGLANG_PINS and r.marker is None]
