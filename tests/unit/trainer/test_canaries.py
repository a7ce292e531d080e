"""The trainer's log-probs of canaries: sequences side by side, in as few forward passes as their tokens allow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from rlsys.trainer.pack import MicroBatch
from rlsys.trainer.trainer import Trainer


class Passes:
    """Says of each token its own id as log-prob, and 0 of a sequence's first."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def logprobs(self, batch: list[MicroBatch], temperature: float) -> list[Tensor]:
        assert temperature == 1.0
        self.sizes = [len(micro.tokens) for micro in batch]
        firsts = [micro.cu_seqlens[:-1].long() for micro in batch]
        return [
            micro.tokens.float().index_fill(0, first_positions, 0.0)
            for micro, first_positions in zip(batch, firsts, strict=True)
        ]


def test_canaries_share_forward_passes() -> None:
    sequences = [[100 * i + k for k in range(5 + i)] for i in range(8)]
    passes = Passes()
    config = SimpleNamespace(trainer=SimpleNamespace(token_budget=30))
    trainer: Any = SimpleNamespace(passes=passes, config=config)
    canaries = Trainer.canaries(cast(Trainer, trainer), sequences)
    assert [canary.ids for canary in canaries] == sequences
    assert [canary.logp for canary in canaries] == [[float(i) for i in ids[1:]] for ids in sequences]
    assert len(passes.sizes) == 3
    assert sum(passes.sizes) == sum(map(len, sequences)) and max(passes.sizes) <= 30


def test_a_canary_longer_than_a_micro_batch_has_its_own() -> None:
    passes = Passes()
    config = SimpleNamespace(trainer=SimpleNamespace(token_budget=4))
    trainer: Any = SimpleNamespace(passes=passes, config=config)
    assert Trainer.canaries(cast(Trainer, trainer), [[7] * 9, [1, 2], [3, 4]])[0].logp == [7.0] * 8
    assert passes.sizes == [9, 4]
    assert Trainer.canaries(cast(Trainer, trainer), []) == []
    assert torch.is_tensor(MicroBatch.of_tokens(torch.tensor([1])).tokens)
