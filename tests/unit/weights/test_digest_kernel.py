"""A push hashes GPU tensors with one kernel for many of them, and every trainer rank hashes its share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rlsys.config import load_config
from rlsys.convert.config import HFConfig
from rlsys.convert.hash_shares import hash_shares
from rlsys.convert.table import entries
from rlsys.core.weight_updates import WeightUpdate
from rlsys.trainer.trainer import Trainer
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.push_plan import PushPlan
from rlsys.weights.weight_push import WeightPush
from tests.helpers.python_path import python_path
from tests.helpers.servers import ROOT
from tests.unit.weights.test_weights import TINY


def tensors(dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    torch.manual_seed(0)
    return [
        (name, torch.randn(shape).to(dtype)) for entry in entries(TINY) for name, shape in entry.hf.items()
    ]


def digests(of: list[tuple[str, Tensor]]) -> list[dict[str, str]]:
    checksums = EngineChecksums(TINY, 1, 2)
    assert len(list(checksums.watch(of))) == len(of)
    return checksums.digests()


_COUNTED = """
import json, torch
from torch.utils._python_dispatch import TorchDispatchMode
from tests.unit.weights.test_digest_kernel import digests, tensors

class Count(TorchDispatchMode):
    computing = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.computing += not func.is_view
        return func(*args, **(kwargs or {}))

torch.Tensor.is_cuda = True
of, out = [*tensors(), *tensors(torch.bfloat16)], []
for each in (of[: len(of) // 2], of[len(of) // 2 :]):
    with Count() as count:
        found = digests(each)
    out.append((found, count.computing / len(each)))
print(json.dumps(out))
"""


@pytest.mark.gate
def test_hashing_is_few_operations_a_tensor_and_gives_the_same_digests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's interpreter stands for the GPU; the parent process computes the digests in plain torch."""
    pytest.importorskip("triton", reason="triton is not installed: the kernel is for CUDA hosts")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": python_path(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", _COUNTED], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-2000:]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for (kernel_digests, operations), dtype in zip(
        json.loads(process.stdout.splitlines()[-1]), (torch.float32, torch.bfloat16), strict=True
    ):
        assert kernel_digests == digests(tensors(dtype))
        assert operations < 5, f"{operations:.1f} operations to hash a tensor for 3 ranks"


def _delivered(rank: int) -> dict[str, str]:
    """What `rank` of two hashes of a push; nobody receives it."""
    config = load_config(ROOT / "configs/quickstart.yaml", ["parallel.tp=2"])
    control = SimpleNamespace(gather=lambda value: [value], to_main=lambda value: [value])
    trainer: Any = SimpleNamespace(
        config=config, served_config=TINY, rank=rank, is_main=rank == 0, control=control
    )
    trainer.served_tensors = lambda: iter(tensors())
    ticket = WeightUpdate(weight_version=1, engines=[], canaries=[])
    return WeightPush(cast(Trainer, trainer), PushPlan({}, group=False)).push(ticket).digests[0]


def test_hash_shares_of_ranks_are_even_and_adjacent_experts_are_spread() -> None:
    hf = HFConfig.read(ROOT / "configs/models/Qwen3-30B-A3B")
    shares = hash_shares(hf, 8, experts_together=False)
    assert sum(shares.elements) == sum(entry.elements for entry in entries(hf))
    assert max(shares.elements) < 1.1 * sum(shares.elements) / 8
    experts = [f"model.layers.5.mlp.experts.{e}.down_proj.weight" for e in range(8)]
    assert len({shares.hasher[name] for name in experts}) > 4
    together = hash_shares(hf, 8, experts_together=True)
    assert len({together.hasher[name] for name in experts}) == 1
    assert max(together.elements) < 1.1 * sum(shares.elements) / 8


@pytest.mark.parametrize("cuda", [False, True])
def test_every_trainer_rank_hashes_its_share(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", cuda)
    shares = [_delivered(rank) for rank in range(2)]
    checksums = EngineChecksums(TINY, 1)
    assert len(list(checksums.watch(tensors()))) == len(tensors())
    expected_digests = checksums.digests()[0]
    assert [len(share) > 0 for share in shares] == [True, True], "one rank hashes everything"
    assert not shares[0].keys() & shares[1].keys()
    assert all(expected_digests[name] == digest for share in shares for name, digest in share.items())
