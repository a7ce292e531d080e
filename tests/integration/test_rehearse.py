"""A rehearsal of the shipped small model against real steps of it: alone, and on 2 and 4 real gloo ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlsys.cli.rehearse import run_rank
from rlsys.rehearse.figures import Collective, Figures, Phase
from rlsys.rehearse.kinds import Request
from tests.helpers import rehearsal_cases as cases

pytestmark = pytest.mark.integration

LASTING = ("weights", "gradients", "optimizer")
LORA = "trainer.lora.rank=8"
EMBEDDING_BYTES = 256 * 128 * 4
"""Of the quickstart's model: its largest tensor."""


def real_ranks(folder: Path, ranks: int, layouts: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw of the step in each layout."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    subprocess.run([*torchrun, "-m", cases.__name__, str(folder), *layouts], check=True, env=env)
    return {
        layout: [json.loads((folder / f"{i}.{rank}.json").read_text()) for rank in range(ranks)]
        for i, layout in enumerate(layouts)
    }


def rehearsed(layout: str, rank: int) -> Figures:
    return run_rank(cases.CONFIG, cases.overrides(layout), Request(rank, micro_batches=cases.MICRO_BATCHES))


def traffic(calls: list[Collective]) -> dict[tuple[Any, ...], tuple[int, int]]:
    return {(c.phase, c.op, c.group, tuple(c.ranks), c.dtype): (c.calls, c.bytes) for c in calls}


def must_agree(real: dict[str, Any], found: Figures) -> None:
    """Exact: parameters, gradients, optimizer, every collective's calls and bytes. Peaks within 5 %, FLOPs 1 %."""
    assert {k: found.live_bytes[k] for k in LASTING} == {k: real["held"][k] for k in LASTING}
    assert traffic(found.collectives) == traffic([Collective(**c) for c in real["collectives"]])
    for phase in (Phase(**p) for p in real["phases"]):
        rehearsal = found.phase(phase.name)
        if (
            phase.name != "gather"
        ):  # adapters of experts are merged, of which two represent all in a rehearsal
            assert rehearsal.flops == pytest.approx(phase.flops, rel=0.01), phase.name
        lasting = sum(phase.peak[k] for k in LASTING)
        if (
            phase.name == "reduce"
        ):  # gloo copies what it scatters; NCCL does not, and neither does a rehearsal
            copied = sum(c.bytes for c in found.collectives if "reduce_scatter" in c.op)
            assert 0 <= phase.total - rehearsal.total <= copied
            continue
        # In a gather, gloo's thread may still hold the parts of the preceding tensor.
        slack = EMBEDDING_BYTES if phase.name == "gather" else 0
        tolerance = 0.05 * (phase.total - lasting)
        assert -tolerance <= phase.total - rehearsal.total <= slack + tolerance, phase.name


@pytest.mark.parametrize(
    ("ranks", "layouts", "look_at"),
    [
        (1, ["", LORA], [0]),
        pytest.param(
            2,
            ["dp=2,ep=2", "tp=2,ep=2,etp=1", "pp=2", f"dp=2,ep=2,{LORA}", f"tp=2,ep=2,etp=1,{LORA}"],
            [0, 1],
            marks=pytest.mark.full,
        ),
        pytest.param(4, ["tp=2,pp=2,ep=2,etp=1"], [0, 3], marks=pytest.mark.full),
    ],
)
def test_a_rehearsal_matches_real_ranks(
    ranks: int, layouts: list[str], look_at: list[int], tmp_path: Path
) -> None:
    real = real_ranks(tmp_path, ranks, layouts)
    for layout in layouts:
        for rank in look_at:
            must_agree(real[layout][rank], rehearsed(layout, rank))


def test_the_allocator_agrees() -> None:
    """Memory events of torch's profiler over a plain real step, which no meter sees."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(cases.ROOT), *sys.path])}
    command = [sys.executable, "-W", "ignore", cases.__file__, cases.PROFILE]
    process = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    peak = rehearsed("", 0).phase("passes").peak
    transient_bytes = sum(n for kind, n in peak.items() if kind not in LASTING)
    assert transient_bytes == pytest.approx(int(process.stdout.split()[-1]), rel=0.05)
