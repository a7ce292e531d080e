"""`rlsys doctor` compares the installed packages with what rlsys asks for."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from rlsys.obs.doctor import Finding, examine

PYPROJECT = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
SGLANG_WANTS = ["torch==2.14.1", "transformers==5.19.0", "flashinfer_python==0.6"]


def requirements(name: str) -> list[str]:
    """As an installed rlsys lists them, and SGLang."""
    if name == "sglang":
        return SGLANG_WANTS
    extras = PYPROJECT["optional-dependencies"].items()
    return [*PYPROJECT["dependencies"], *(f'{r}; extra == "{e}"' for e, rs in extras for r in rs)]


def findings(patch: pytest.MonkeyPatch, **installed: str) -> dict[str, Finding]:
    """Of a machine with these versions, and of all other packages with those of this environment."""
    version = importlib.metadata.version
    patch.setattr(importlib.metadata, "requires", requirements)
    patch.setattr(importlib.metadata, "version", lambda n: installed.get(n.replace("-", "_")) or version(n))
    return {finding.name: finding for finding in examine()}


def test_the_current_environment_has_the_required_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings_by_name = findings(monkeypatch)
    assert [f for f in findings_by_name.values() if "expected" in f.note] == []


@pytest.mark.parametrize(
    ("package", "installed", "expected"),
    [
        ("torch", "2.11.0", "2.13.0"),
        ("megatron-core", "0.19.2", "0.16.1"),
        ("sglang", "0.5.9", "0.5.23"),
        ("transformers", "5.2.0", "5.19.0"),
        ("pydantic", "1.10.0", "2."),
    ],
)
def test_doctor_reports_an_unsupported_version(
    package: str, installed: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings_by_name = findings(monkeypatch, **{package.replace("-", "_"): installed})
    assert package in findings_by_name, f"doctor does not name {package}"
    assert (findings_by_name[package].value, findings_by_name[package].ok) == (installed, False)
    assert expected in findings_by_name[package].note


def test_a_gpu_environment_is_compared_with_the_torch_pin_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a login node, too, which has no GPU."""
    assert findings(monkeypatch, torch="2.14.1")["torch"].ok
