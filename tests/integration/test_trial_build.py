"""An environment whose trainer cannot be built is reported by one line, before anything starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.integration, pytest.mark.gate]

SPECS = "megatron/core/models/gpt/gpt_layer_specs.py"
BUILT = "return get_moe_module_spec_for_backend("
"""Of a layer with experts in megatron-core 0.16.1; later versions return a `functools.partial` there."""


@pytest.fixture(scope="module")
def newer_megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with megatron-core as its version 0.19.2 describes a dense layer."""
    folder = tmp_path_factory.mktemp("newer")
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    installed = Path(spec.origin).parent
    shutil.copytree(
        installed,
        folder / "megatron/core",
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    text = (installed / SPECS.removeprefix("megatron/core/")).read_text()
    assert BUILT in text
    (folder / SPECS).unlink()
    (folder / SPECS).write_text(
        text.replace(BUILT, "return __import__('functools').partial(get_moe_module_spec_for_backend,")
    )
    described = folder / "megatron_core-0.19.2.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.19.2\n")
    return folder


def rlsys(*words: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlsys.cli.main", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def test_explain_reports_a_trainer_that_cannot_be_built(newer_megatron: Path) -> None:
    process = rlsys("explain", "configs/quickstart.yaml", path=newer_megatron)
    assert process.returncode == 2, process.stdout
    assert "Traceback" not in process.stderr
    (line,) = [
        text for text in process.stderr.splitlines() if text.startswith("rlsys: ")
    ]  # torch may warn of CUDA
    assert "megatron-core 0.19.2" in line and "0.16.1" in line and "AttributeError" in line


def test_doctor_reports_a_trainer_that_cannot_be_built(newer_megatron: Path) -> None:
    process = rlsys("doctor", path=newer_megatron)
    output = " ".join(process.stdout.split())
    assert (process.returncode, "AttributeError" in output) == (1, True), output


def test_doctor_builds_the_trainer_of_this_environment(tmp_path: Path) -> None:
    process = rlsys("doctor", path=tmp_path)
    (line,) = [line for line in process.stdout.splitlines() if line.split()[:1] == ["trainer"]] or [
        process.stdout
    ]
    assert "can be built" in line
