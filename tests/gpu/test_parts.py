"""Figures of bench/gpu.py on a device, held to what must be true there. Each part is a process under a time limit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.servers import ROOT
from tests.helpers.te_cases import FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

Found = dict[str, Any]


def the_kernels_hash(found: Found) -> bool:
    """Our hash is the golden one and SGLang's own, and allocates next to nothing beside what it hashes (1 GiB)."""
    return found["equal"] and found["kernel_equal"] and found["extra_bytes"] < 2**20


def nothing_leaks(found: Found) -> bool:
    """200 buckets by handle, and a receiver that is killed with the last: nothing of the others stays behind."""
    return bool(found["lost_bytes"] <= 2 * found["bucket_bytes"])


def all_got_it(found: Found) -> bool:
    return all("a step" in message for message in found["messages"])


def nccl_refuses(found: Found) -> bool:
    """The reason why weights/plan.py keeps a trainer and an engine rank of one GPU out of one group."""
    return not any("went through" in message for message in found["messages"])


def engines_get_their_memory(found: Found) -> bool:
    return bool(found["kept_after_make_room"] < max(2**26, found["kept_bytes"]))


def resumes(found: Found) -> bool:
    """Kernels may add in any order."""
    return found["loaded"] == 2 and found["resumed"][0][:2] == pytest.approx(found["whole"][0][:2], rel=1e-2)


def like_the_cpu(found: Found) -> bool:
    """Three steps in float32; TF32 is off by default."""
    return all(found[family] < 1e-3 for family in FAMILIES)


def eight_bits(found: Found) -> bool:
    return found["restored_error"] < 0.05 and found.get("gemm_error", 0.0) < 0.05


def as_rehearsed(found: Found) -> bool:
    """The allocator rounds up; what a rehearsal foretells is the tensors."""
    return bool(0.9 < found["allocator"] / max(found["rehearsed"].values()) < 1.2)


def checkpoint_stays_small(found: Found) -> bool:
    """A save gathers nothing on the device: the peak stays below the model, its gradients and its state once more."""
    return bool(found["peak_bytes"] < 1.2 * found["held_bytes"])


HOLDS: dict[str, Callable[[Found], bool]] = {
    "checksums": the_kernels_hash, "handles": nothing_leaks, "waiting": all_got_it,
    "two_ranks_on_one_gpu": nccl_refuses, "cache": engines_get_their_memory, "offload": resumes,
    "families": like_the_cpu, "fp8": eight_bits, "memory": as_rehearsed, "checkpoint": checkpoint_stays_small,
}  # fmt: skip


@pytest.mark.parametrize("part", HOLDS)
def test_a_part_of_the_drill(part: str, tmp_path: Path) -> None:
    command = [sys.executable, "bench/gpu.py", "--json", "--part", part, "--out", str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    result = json.loads(process.stdout)[part]
    print(json.dumps(result))
    assert result["status"] == "ok", result
    assert HOLDS[part](result["figures"]), result
