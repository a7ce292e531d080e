"""bench/gpu.py: a part that hangs or crashes costs that part, leaves no process, and keeps its figures."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import gpu
import psutil
import pytest

PLANTED = """
import os, subprocess, sys, time

def good(figures):
    figures(path=os.environ["PYTHONPATH"])

def crash(figures):
    figures(stage=1)
    raise RuntimeError("planted")

def death(figures):
    figures(stage=1)
    os.kill(os.getpid(), 9)

def hang(figures):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    figures(child=child.pid)
    time.sleep(600)

def no_gpu(figures):
    from gpu_figures import NoDevice
    raise NoDevice
"""
NAMES = ("hang", "crash", "death", "no_gpu", "good")


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[gpu.Part]:
    """Planted parts, run by a script with the driver's own `run_here`."""
    (tmp_path / "planted.py").write_text(PLANTED)
    script = tmp_path / "driver.py"
    script.write_text(
        "import sys, gpu\n"
        "from pathlib import Path\n"
        f"gpu.PARTS = [gpu.Part(n, f'planted:{{n}}', 60) for n in {NAMES!r}]\n"
        "gpu.run_here(sys.argv[2], Path(sys.argv[4]))\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return [gpu.Part(name, f"planted:{name}", 60.0) for name in NAMES]


def written(out: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


@pytest.mark.gate
def test_a_hang_or_crash_fails_only_its_own_part(
    parts: list[gpu.Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hang is cut off as soon as it has written its figure."""
    out = tmp_path / "out"
    out.mkdir()

    class Impatient(gpu.subprocess.Popen):  # type: ignore[misc, name-defined]
        def wait(self, timeout: float | None = None) -> int:
            file = out / "hang.json"
            while timeout is not None and "hang" in self.args:
                if file.exists():
                    raise gpu.subprocess.TimeoutExpired(self.args, timeout)
                assert self.poll() is None, (out / "hang.log").read_text()
                time.sleep(0.05)
            return int(super().wait(timeout))

    monkeypatch.setattr(gpu.subprocess, "Popen", Impatient)
    results = gpu.drill(parts, 600.0, out, None)
    assert {name: result["status"] for name, result in results.items()} == {
        "hang": "time limit", "crash": "failed", "death": "failed", "no_gpu": "no CUDA device", "good": "ok",
    }  # fmt: skip
    assert not psutil.pid_exists(results["hang"]["figures"]["child"]), "in a session of its own, and gone"
    assert results["crash"]["figures"]["stage"] == results["death"]["figures"]["stage"] == 1
    assert "RuntimeError: planted" in results["crash"]["log"]
    assert results["death"]["exit_code"] == -9
    assert str(tmp_path) in results["good"]["figures"]["path"].split(":"), "PYTHONPATH is extended"
    assert written(out) == results


def test_without_time_a_part_does_not_start(parts: list[gpu.Part], tmp_path: Path) -> None:
    results = gpu.drill(parts, 0.0, tmp_path, None)
    assert {result["status"] for result in results.values()} == {"no time left"}
    assert written(tmp_path) == results


@pytest.mark.gate
def test_every_part_names_a_function() -> None:
    import importlib

    for part in gpu.PARTS:
        module, _, function = part.function.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), part
    names = [part.name for part in gpu.PARTS]
    assert len(set(names)) == len(names)
    assert names.index("ceilings") == 0
    assert names[-1] == "two_ranks_on_one_gpu", "what may hang comes last"


@pytest.mark.parametrize("cuda", [False, True])
def test_gpu_engine_arguments_are_omitted_on_a_cpu(
    cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rehearsal of a node's command on a CPU, whose engines have no Triton."""
    engine_args: list[str] = []

    def drill(*_: Any) -> dict[str, Any]:
        engine_args.append(os.environ[gpu.ENGINE_ARGS])
        return {}

    monkeypatch.setattr(gpu, "drill", drill)
    monkeypatch.setattr(gpu, "have_cuda", lambda: cuda)
    monkeypatch.setenv(gpu.ENGINE_ARGS, "--log-level info")
    command = ["gpu.py", "--out", str(tmp_path), "--attention-backend", "triton", "--engine-args=--mem 0.5"]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setenv(gpu.MODELS, "")
    gpu.main()
    assert engine_args == [
        "--log-level info --mem 0.5 --attention-backend triton" if cuda else "--log-level info"
    ]
