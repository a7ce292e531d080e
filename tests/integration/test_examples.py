"""The examples as their README says, and a wheel outside of any checkout: each trains on the real stack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rlsys.evaluation.tryout import PROMPTS, SAMPLES
from rlsys.obs.metrics import read_metrics
from tests.helpers.python_path import python_path
from tests.helpers.runs import ROOT

pytestmark = pytest.mark.integration

SMALL = ("trainer.steps=2", "rollout.groups_per_step=4", "eval.prompts=4", "eval.interval=2")


@pytest.mark.parametrize(
    "name",
    [
        "own_agent",
        "own_data",
        "own_environment",
        "own_loss",
        "own_planner",
        "own_reward",
        "replayed",
        "second_try",
    ],
)
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "rlsys.cli.main",
        "train",
        f"examples/{name}.yaml",
        *SMALL,
        f"run.dir={tmp_path}/run",
    ]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    steps = read_metrics(tmp_path / "run").steps
    assert [s["step"] for s in steps] == [1, 2]
    assert all(s["lost"] == 0 and s["reward_failed"] == 0 for s in steps)


def test_a_new_project_can_be_tried_tested_and_trained(tmp_path: Path) -> None:
    def rlsys(*words: str) -> str:
        command = [sys.executable, "-m", "rlsys.cli.main", *words]
        env = os.environ | {"PYTHONPATH": python_path(ROOT)}
        process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr[-3000:]
        return process.stdout

    rlsys("new", "mine")
    entries = json.loads(rlsys("try", "mine/config.yaml", "--json"))
    assert [len(entry["samples"]) for entry in entries] == [SAMPLES] * PROMPTS
    rewards = {sample["reward"] for entry in entries for sample in entry["samples"]}
    assert rewards == {0, 1}, "the model guesses some and works some out"
    assert all("<answer>" in sample["text"] for entry in entries for sample in entry["samples"])
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "mine"]
    subprocess.run(tests, cwd=tmp_path, env=os.environ | {"PYTHONPATH": python_path(ROOT)}, check=True)
    rlsys("train", "mine/config.yaml", *SMALL)
    assert read_metrics(tmp_path / "runs" / "mine").last_step == 2


def test_a_wheel_trains_a_shipped_config_by_its_name(tmp_path: Path) -> None:
    """The wheel is made from an sdist, which has to hold all of it. In a venv of its own, which borrows what rlsys
    needs from this one, and in a folder that is no checkout.
    """
    pip, venv = [sys.executable, "-m", "pip"], tmp_path / "venv"
    pack = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", pack, str(tmp_path)], check=True, cwd=ROOT, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    build = [*pip, "wheel", str(sdist), "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    subprocess.run(build, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    where = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
    Path(where, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if (engine := Path(sys.prefix, "engine")).is_dir():  # torchvision, which only SGLang imports
        (venv / "engine").symlink_to(engine)
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--ignore-installed", "-q", str(wheel)],
        check=True,
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [str(venv / "bin" / "rlsys"), "train", "quickstart", *SMALL]
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    assert str(ROOT) not in (tmp_path / "runs" / "quickstart" / "config.yaml").read_text()
    assert read_metrics(tmp_path / "runs" / "quickstart").last_step == 2
