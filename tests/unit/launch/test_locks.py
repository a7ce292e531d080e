"""The lock files hold every requirement of pyproject.toml within its range; set-up keeps to them when asked."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from launch import bootstrap

PROJECT = tomllib.loads((bootstrap.ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"cpu": ("cpu", "dev"), "gpu": ("gpu",)}
PYTHONS = [f"{major}.{minor}" for major, minor in bootstrap.PYTHONS]


def locked(kind: str, python: str) -> dict[str, str]:
    """Package -> version, on Linux with that Python."""
    host = {
        "python_version": python,
        "python_full_version": f"{python}.7",
        "sys_platform": "linux",
        "os_name": "posix",
    }
    host |= {
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    versions: dict[str, str] = {}
    for line in bootstrap.LOCKS[kind].read_text().splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(host):
            (pin,) = requirement.specifier
            name = canonicalize_name(requirement.name)
            assert (pin.operator, name in versions, requirement.url) == ("==", False, None), line
            versions[name] = pin.version
    return versions


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("kind", EXTRAS)
def test_every_requirement_is_locked_within_its_range(kind: str, python: str) -> None:
    requirements = [
        *PROJECT["dependencies"],
        *(line for e in EXTRAS[kind] for line in PROJECT["optional-dependencies"][e]),
    ]
    versions = locked(kind, python)
    for requirement in map(Requirement, requirements):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not locked: make locks"
        assert requirement.specifier.contains(version), f"{requirement.name} {version}: make locks"


@pytest.mark.parametrize("extra", [None, "cpu", "dev", "ray"])
def test_no_version_range_is_wider_than_the_tested_versions(extra: str | None) -> None:
    """The locks are what ran: a range begins there, and ends before the next minor version.

    SGLang for CUDA pins some lower ones; the quickstart ran with them on a CPU.
    """
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    for requirement in map(Requirement, lines):
        name, kinds = canonicalize_name(requirement.name), ("cpu", "gpu") if extra is None else ("cpu",)
        ran = [Version(locked(kind, python)[name]) for python in PYTHONS for kind in kinds]
        low, high = min(ran), max(ran)
        beyond = [
            f"{high.major}.{high.minor + 1}",
            f"{high.major + 1}.0",
            f"{low.major - 1}.99" if low.major else None,
        ]
        beyond += [f"{low.major}.{low.minor - 1}.99"] if low.minor else []
        open_to = [v for v in beyond if v is not None and requirement.specifier.contains(v)]
        assert not open_to, f"{requirement}: {open_to} would be installed, and nobody ran it"


def test_the_pythons_of_the_package_are_those_of_set_up() -> None:
    pythons = SpecifierSet(PROJECT["requires-python"])
    allowed = [minor for minor in range(9, 20) if pythons.contains(f"3.{minor}.1")]
    assert allowed == [minor for _, minor in bootstrap.PYTHONS]


def test_the_locks_agree_with_the_pins_of_an_unlocked_installation() -> None:
    pinned = dict(package.split("==") for package in (bootstrap.TORCH, bootstrap.SGLANG))
    assert locked("cpu", "3.11")["torch"] == pinned["torch"]
    assert locked("gpu", "3.11")["sglang"] == pinned["sglang"]
    assert locked("gpu", "3.12")["torch"] == "2.14.1", "SGLang's own pin; docs/gpu.md names it"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("kind", EXTRAS)
def test_every_lock_pins_the_required_megatron_core_version(kind: str, python: str) -> None:
    """The trainer builds megatron-core's layers by their classes; other versions have other ones."""
    (floor,) = {
        requirement.specifier
        for requirement in map(Requirement, PROJECT["optional-dependencies"][kind])
        if requirement.name == "megatron-core"
    }
    assert (str(floor), locked(kind, python)["megatron-core"]) == ("==0.16.1", "0.16.1")


@pytest.mark.parametrize("kind", EXTRAS)
def test_a_lock_names_no_index_and_no_file(kind: str) -> None:
    text = bootstrap.LOCKS[kind].read_text()
    assert not [word for word in ("://", "--", "@", "sha256") if word in text]


def test_set_up_uses_the_lock_when_rlsys_locked_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip_calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(bootstrap, "pip", lambda label, *args: pip_calls.append(args))
    monkeypatch.setattr(bootstrap, "create_venv", lambda *_: None)
    monkeypatch.setattr(bootstrap, "check_disk", lambda *_: None)
    monkeypatch.setattr(bootstrap, "compile_patched_modules", lambda: None)
    monkeypatch.setattr(bootstrap, "install_torchvision", lambda: None)
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(bootstrap, "PYTHON", tmp_path)
    monkeypatch.setenv(bootstrap.DEVICE, "cuda")
    monkeypatch.delenv(bootstrap.LOCKED, raising=False)
    bootstrap.set_up(dev=False)
    monkeypatch.setenv(bootstrap.LOCKED, "1")
    bootstrap.set_up(dev=False)
    bootstrap.set_up(dev=False)  # nothing has changed: nothing is done
    monkeypatch.setenv(bootstrap.DEVICE, "cpu")
    bootstrap.set_up(dev=False)
    target = ("-e", ".[gpu]")
    assert pip_calls[:2] == [target, (*target, "-c", str(bootstrap.LOCKS["gpu"]))]
    assert pip_calls[3] == ("-e", ".[cpu]", "-c", str(bootstrap.LOCKS["cpu"]))
    monkeypatch.setenv(bootstrap.LOCKED, "yes")
    with pytest.raises(bootstrap.SetupError, match=r"RLSYS_LOCKED = yes: expected 1, or an unset variable"):
        bootstrap.set_up(dev=False)
