"""A colocated push: four trainer ranks, two engines of two ranks on the same host, shared memory for CUDA IPC."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.push_cases import config_of
from tests.helpers.python_path import python_path
from tests.helpers.servers import ROOT, running_engine, tiny_moe_model

pytestmark = pytest.mark.integration


def run(command: list[str], log: Path) -> tuple[int, str]:
    """Its exit code and what it said. Into a file: torch's shared-memory servers outlive the ranks that began them,
    as long as an engine has their memory open, and would keep a pipe from its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT)}
    with log.open("wb") as log_file:
        process = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log_file, stderr=subprocess.STDOUT
        )
    return process.returncode, log.read_text(errors="replace")


def test_each_rank_gives_its_own_engine_rank_the_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    # SGLang on a CPU pads each rank's part of an expert to 32 units, which no checksum could foretell.
    tiny_moe_model(seed=0, moe_intermediate_size=64).save_pretrained(model)
    config = config_of(model, tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with (
        running_engine(config, tmp_path / "one") as first_url,
        running_engine(config, tmp_path / "two") as second_url,
    ):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        command += ["-m", "tests.helpers.push_cases", str(model), str(tmp_path), first_url, second_url]
        code, output = run(command, tmp_path / "ranks.log")
    assert code == 0, output[-4000:]
    ranks = [json.loads((tmp_path / f"rank-{i}.json").read_text()) for i in range(4)]
    print([{k: rank[k] for k in ("tcp", "memory", "model")} for rank in ranks], ranks[0]["metrics"])
    metrics = ranks[0]["metrics"]
    assert metrics["push_tensors_equal"] == sum(ranks[0]["expected"]) > 0
    assert metrics["push_tensors_unknown"] == 0
    assert metrics["push_canary_mean"] <= 1e-6
    for way in ("tcp", "memory"):
        total = sum(rank[way] for rank in ranks)
        assert max(rank[way] for rank in ranks) <= 2 * total / 4, f"{way}: {[rank[way] for rank in ranks]}"
    assert all(rank["memory"] == rank["model"] for rank in ranks)


@pytest.mark.gate
def test_two_ranks_serve_one_engine_until_it_dies(tmp_path: Path) -> None:
    """Each engine rank opens the memory of its own trainer rank. When the engine dies, both ranks leave it out and
    gather to the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.helpers.memory_push", str(tmp_path)]
    code, output = run(command, tmp_path / "ranks.log")
    assert code == 0, output[-4000:]
    first, second = (json.loads((tmp_path / f"rank-{i}.json").read_text()) for i in range(2))
    assert first["seen"] == [[0.0] * 3, [1.0] * 3]
    assert first["sent"] == second["sent"] == 4 * 12
    assert "excluded from a weight update" in output
