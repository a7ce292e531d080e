"""What the scripts in slurm/ run: each goes through bash, with a stand-in for `rlsys` that shows its arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rlsys.cli.main import make_parser
from rlsys.config import load_config
from rlsys.planner.layout import lay_out

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "quickstart.yaml")
SCRIPTS = sorted(path.name for path in (ROOT / "slurm").glob("*.sbatch"))
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2",
    "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1",
    "SLURM_ARRAY_JOB_ID": "7",
    "SLURM_ARRAY_TASK_ID": "1",
}
GIVEN = {
    "convert.sbatch": ["hf-to-megatron", "--hf", "here", "--out", "there", "--ep", "2"],
    "engines.sbatch": ["runs/mine"],
}
NODES = {"colocated.sbatch": 2, "disaggregated.sbatch": 2, "disaggregated_het.sbatch": 3, "ray.sbatch": 2}


def arguments(script: str, folder: Path, given: list[str], **job: str) -> list[str]:
    """What the script runs `rlsys` with, inside a job of two nodes."""
    for name, body in (
        (".venv/bin/rlsys", 'printf "%s\\n" "$@"'),
        (".venv/bin/ray", "true"),
        ("srun", 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"'),
    ):
        stand_in = folder / name
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        stand_in.write_text(f"#!/bin/sh\n{body}\n")
        stand_in.chmod(0o755)
    env = {**os.environ, **JOB, **job, "PATH": f"{folder}:{os.environ['PATH']}"}
    process = subprocess.run(
        ["bash", str(ROOT / "slurm" / script), *given], cwd=folder, env=env, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_a_command_that_exists(script: str, tmp_path: Path) -> None:
    script_args = GIVEN.get(script, [CONFIG, "engine.count=4"])
    args = make_parser().parse_args(arguments(script, tmp_path, script_args))
    if script in GIVEN:
        return
    config = load_config(Path(getattr(args, "config", None) or args.target), args.overrides)
    assert config.engine.count == 4
    assert (config.launch.nodes, config.launch.gpus_per_node) == (NODES.get(script, 1), 8)
    assert config.launch.backend == ("ray" if script == "ray.sbatch" else "slurm")
    assert (config.launch.placement == "disaggregated") == script.startswith("disaggregated")
    lay_out(config)


def test_an_array_runs_seeds_or_configs(tmp_path: Path) -> None:
    seeds = load_config(Path(CONFIG), arguments("array.sbatch", tmp_path, [CONFIG])[2:])
    assert (seeds.run.seed, str(seeds.run.dir)) == (1, "runs/array-7-1")
    configs = arguments("array.sbatch", tmp_path, ["run.seed=5"], CONFIGS=f"no.yaml {CONFIG}")
    assert configs[:3] == ["train", CONFIG, "run.seed=5"]


def test_every_script_is_in_the_table() -> None:
    table = (ROOT / "slurm" / "README.md").read_text()
    assert all(f"`{script}`" in table for script in SCRIPTS)
