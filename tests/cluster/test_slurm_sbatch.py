"""The scripts of slurm/ through a real sbatch, with a stand-in for what they run: Slurm takes their options, and a
heterogeneous job and an array come to what they promise."""

from __future__ import annotations

import socket
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.runs import ROOT
from tests.helpers.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.cluster
SCRIPTS = sorted(path.name for path in (ROOT / "slurm").glob("*.sbatch"))
ARRAYS = ("array.sbatch", "engines.sbatch")


SHOW = 'echo "$SLURM_JOB_ID" "$@"'


def outputs(
    slurm: SlurmCluster, script: str, folder: Path, *options: str, rlsys: str = SHOW, ray: str = "true"
) -> list[list[str]]:
    """The words that `rlsys` wrote in each task of the script's job, in the order of their logs' names."""
    for name, body in (("rlsys", rlsys), ("ray", ray)):
        stand_in = folder / ".venv" / "bin" / name
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        stand_in.write_text(f"#!/bin/sh\n{body}\n")
        stand_in.chmod(0o755)
    slurm.run("sbatch", "--chdir", str(folder), *options, str(ROOT / "slurm" / script), "a.yaml")
    slurm.wait(lambda: not slurm.run("squeue", "--noheader").strip(), f"{script} does not end")
    return [log.read_text().split() for log in sorted(folder.glob("slurm-*.log"))]


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s not in ARRAYS])
def test_slurm_takes_a_script(slurm: SlurmCluster, tmp_path: Path, script: str) -> None:
    (words,) = outputs(slurm, script, tmp_path)
    assert words[2] == "a.yaml"
    nodes = {"disaggregated_het.sbatch": 3, "colocated.sbatch": 2, "disaggregated.sbatch": 2, "ray.sbatch": 2}
    if script in nodes:
        assert f"launch.nodes={nodes[script]}" in words


def test_an_array_is_a_job_for_each_seed(slurm: SlurmCluster, tmp_path: Path) -> None:
    task_outputs = outputs(slurm, "array.sbatch", tmp_path, "--array=0-2")
    assert len({words[0] for words in task_outputs}) == 3
    seeds = [next(w for w in words if w.startswith("run.seed=")) for words in task_outputs]
    assert seeds == ["run.seed=0", "run.seed=1", "run.seed=2"]
    assert len({next(w for w in words if w.startswith("run.dir=")) for words in task_outputs}) == 3


def test_each_task_of_an_array_starts_an_engine(slurm: SlurmCluster, tmp_path: Path) -> None:
    task_outputs = outputs(slurm, "engines.sbatch", tmp_path, "--array=1-2", "--export=ALL")
    assert len({words[0] for words in task_outputs}) == 2
    assert [words[1:5] for words in task_outputs] == [["engines", "join", "a.yaml", "--host"]] * 2


JOIN = """
import os, time, ray
ray.init(log_to_driver=False, logging_level="ERROR")
deadline = time.monotonic() + 600
while len(ray.nodes()) < 2 and time.monotonic() < deadline:
    time.sleep(0.2)
print(len(ray.nodes()), os.environ["SLURM_JOB_NUM_NODES"])
"""


@pytest.mark.slow
def test_a_ray_cluster_inside_a_job_has_a_key_of_its_own_and_ends_with_it(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Both nodes are this machine, so each gets what it would share on two: the folder of a Ray."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'rlsys[ray]')")
    (tmp_path / "join.py").write_text(JOIN)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short, socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
        s.close()
        ray = Path(sys.executable).with_name("ray")
        job_outputs = outputs(
            slurm, "ray.sbatch", tmp_path, f"--export=ALL,HOME={tmp_path},RAY_PORT={port}",
            rlsys=f"exec {sys.executable} {tmp_path}/join.py",
            ray=f'export RAY_TMPDIR={short}/"$SLURMD_NODENAME"; mkdir -p "$RAY_TMPDIR"; exec {ray} "$@"',
        )  # fmt: skip
    assert job_outputs == [["2", "2"]], [log.read_text() for log in tmp_path.glob("*.log")]
    assert not slurm.job_processes()
    assert not (tmp_path / ".ray" / "auth_token").exists()
