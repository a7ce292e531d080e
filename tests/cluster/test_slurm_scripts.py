"""The scripts of slurm/ through a real sbatch, with a stand-in for what they run: Slurm takes their options, and a
heterogeneous job and an array come to what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.runs import ROOT
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.cluster
SCRIPTS = sorted(path.name for path in (ROOT / "slurm").glob("*.sbatch"))


def outputs(slurm: SlurmCluster, script: str, folder: Path, *options: str) -> list[list[str]]:
    """What each task of the script's job ran `rlsys` with, in the order of their logs' names."""
    for name, body in (("rlsys", 'echo "$SLURM_JOB_ID" "$@"'), ("ray", "true")):
        stand_in = folder / ".venv" / "bin" / name
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        stand_in.write_text(f"#!/bin/sh\n{body}\n")
        stand_in.chmod(0o755)
    slurm.run("sbatch", "--chdir", str(folder), *options, str(ROOT / "slurm" / script), "a.yaml")
    slurm.wait(lambda: not slurm.run("squeue", "--noheader").strip(), f"{script} does not end")
    return [log.read_text().split() for log in sorted(folder.glob("slurm-*.log"))]


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s != "array.sbatch"])
def test_slurm_takes_a_script(slurm: SlurmCluster, tmp_path: Path, script: str) -> None:
    (words,) = outputs(slurm, script, tmp_path)
    assert words[2] == "a.yaml"
    nodes = {"disaggregated_het.sbatch": 3, "colocated.sbatch": 2, "disaggregated.sbatch": 2, "ray.sbatch": 2}
    if script in nodes:
        assert f"launch.nodes={nodes[script]}" in words


def test_an_array_is_a_job_for_each_seed(slurm: SlurmCluster, tmp_path: Path) -> None:
    found = outputs(slurm, "array.sbatch", tmp_path, "--array=0-2")
    assert len({words[0] for words in found}) == 3
    seeds = [next(w for w in words if w.startswith("run.seed=")) for words in found]
    assert seeds == ["run.seed=0", "run.seed=1", "run.seed=2"]
    assert len({next(w for w in words if w.startswith("run.dir=")) for words in found}) == 3
