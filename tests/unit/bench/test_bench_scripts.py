"""bench/step_path.py on a tree of a few lines, bench/rehearse.py and bench/new_models.py without their rehearsals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "bench"
TREE = {
    "rlsys/__init__.py": "",
    "rlsys/rollout/__init__.py": "",
    "rlsys/rollout/client.py": "def take(step):\n    return step\n",
    "rlsys/rollout/service.py": "from rlsys.rollout import runner\n\nrunner.run()\n",
    "rlsys/rollout/runner.py": (
        "from rlsys import loss\n\n\ndef run():\n    _conclude()\n    _fill()\n\n\n"
        "def _conclude():\n    loss.ratio()\n    _settle()\n\n\n"
        "def _settle():\n    pass\n\n\ndef _fill():\n    pass\n"
    ),
    "rlsys/step.py": (
        "from rlsys import loss\n\n\ndef run():\n    pack()\n    for _ in range(3):\n        loss.clip()\n"
        "    update()\n\n\ndef pack():\n    pass\n\n\ndef update():\n    pass\n"
    ),
    "rlsys/loss.py": "def clip():\n    return sum(x for x in ratio())\n\n\ndef ratio():\n    return [1]\n",
    "rlsys/weights.py": "def push():\n    after()\n\n\ndef after():\n    pass\n",
    "rlsys/train.py": (
        "import sys\nfrom rlsys import step, weights\nfrom rlsys.rollout import client\n\n\n"
        "def before():\n    pass\n\n\nbefore()\nclient.take(1)\nstep.run()\nweights.push()\nsys.exit(CODE)\n"
    ),
}  # fmt: skip


def tree(folder: Path, code: int = 0) -> Path:
    """A tree whose `rlsys train` is one group and one step of plain functions, and ends with `code`."""
    for name, text in TREE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("CODE", str(code)))
    command = folder / ".venv" / "bin" / "rlsys"
    command.parent.mkdir(parents=True)
    modules = ("rlsys.rollout.service", "rlsys.train")
    command.write_text(
        "#!/bin/sh\n" + "".join(f"{sys.executable} -m {m} --config nowhere\n" for m in modules)
    )
    command.chmod(0o755)
    return folder


def step_path(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "step_path.py"), *args]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_walk_of_a_step_and_one_of_a_group(tmp_path: Path) -> None:
    """Each function counts when it is entered for the first time; what is imported then does not."""
    process = step_path("--tree", str(tree(tmp_path)), "--verbose")
    *visits, counts = process.stdout.splitlines()
    assert visits == [
        "-- step",  # begins after the take, and ends at the push
        "rlsys/step.py: run, pack",
        "rlsys/loss.py: clip, ratio",
        "rlsys/step.py: update",
        "-- group",  # ends with the decision
        "rlsys/rollout/runner.py: _conclude",
        "rlsys/loss.py: ratio",
        "rlsys/rollout/runner.py: _settle",
    ]
    assert json.loads(counts) == {
        "step": {"functions": 5, "files": 2, "changes": 2, "returns": 1},
        "group": {"functions": 3, "files": 2, "changes": 2, "returns": 1},
    }


def test_a_run_that_does_not_end_well_has_no_walk(tmp_path: Path) -> None:
    process = step_path("--tree", str(tree(tmp_path, code=3)))
    assert process.returncode == 1
    assert "rlsys train ended with exit code" in process.stderr
    assert process.stdout == ""


@pytest.fixture
def rehearse(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, found as when it is run: its folder is on the path."""
    monkeypatch.syspath_prepend(str(BENCH))
    import rehearse

    return rehearse


def results(
    rehearse: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *args: str,
    gb: float = 1.0,
) -> tuple[int, dict[str, Any]]:
    """Its exit code and what it prints, when each rank takes so much memory."""

    def run_rank(path: Path, overrides: list[str], request: Any) -> Any:
        phase = SimpleNamespace(operations=request.rank + 1)
        worst = SimpleNamespace(total=2e9)
        return SimpleNamespace(
            stage="only stage", world=8, resident=gb * 1e9, worst=worst, phases=[phase, phase]
        )

    monkeypatch.setattr(rehearse, "run_rank", run_rank)
    monkeypatch.setattr(sys, "argv", ["rehearse.py", "--json", *args])
    code = rehearse.main()
    return code, json.loads(capsys.readouterr().out)


def test_every_shipped_experiment_is_rehearsed(
    rehearse: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = results(rehearse, monkeypatch, capsys)
    shipped = {p.stem for p in (ROOT / "configs/experiments").glob("*.yaml")} - {"base"}
    assert report["results"].keys() == {*shipped, "deepseek-v3_2048gpu"}
    assert (code, report["within"]) == (0, True)
    assert [rank["rank"] for rank in report["results"]["qwen2.5-7b_8gpu_colocated"]] == [0]
    assert len(report["results"]["deepseek-v3_2048gpu"]) == 3, "the first, a middle and the last stage"


def test_quick_is_one_rank_and_only_takes_a_part(
    rehearse: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = results(rehearse, monkeypatch, capsys, "--quick")
    assert {name: len(ranks) for name, ranks in report["results"].items()} == {rehearse.SMALLEST: 1}
    _, report = results(rehearse, monkeypatch, capsys, "--only", "glm")
    assert {name.partition("_")[0] for name in report["results"]} == {"glm-4.5-air"}
    with pytest.raises(SystemExit):
        results(rehearse, monkeypatch, capsys, "--only", "nothing")
    assert (
        "--only nothing: in no name; expected a part of: deepseek-v3_256gpu_colocated"
        in capsys.readouterr().err
    )


def test_a_rank_that_takes_too_much_memory_is_the_exit_code(
    rehearse: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = results(rehearse, monkeypatch, capsys, "--quick", gb=4.1)
    assert (code, report["within"]) == (1, False)


@pytest.mark.gate
def test_configs_of_new_models_are_sized_or_refused(tmp_path: Path) -> None:
    mamba_config = tmp_path / "other.json"
    mamba_config.write_text('{"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"}')
    models, out = ROOT / "configs/models", tmp_path / "out.json"
    configs = [models / "Qwen3-30B-A3B/config.json", models / "DeepSeek-V3/config.json", mamba_config]
    command = [
        sys.executable,
        str(BENCH / "new_models.py"),
        *map(str, configs),
        "--gpus",
        "8",
        "--out",
        str(out),
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "3 models and numbers of GPUs: 1 fit, 2 refused"
    cells = json.loads(out.read_text())
    assert cells["Qwen3-30B-A3B 8"]["stated_gb"] == pytest.approx(41, rel=0.15)
    assert cells["DeepSeek-V3 8"]["refusal"] == (
        "DeepSeek-V3: full training does not fit 8 GPUs of 80 GB (h100); 128 GPUs (16 nodes) are enough"
    )
    assert cells["other 8"]["refusal"].startswith("config.json: architecture 'Mamba2ForCausalLM' is unknown")
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stdout == process.stdout
