"""What an update is made of, and what it gives: plain data between the trainer and who calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import MicroBatch

LossFn = Callable[[Scores, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""(scores with gradient, their micro-batch) -> (sum of token losses, sums for metrics of any shape)."""


@dataclass(frozen=True)
class StepResult:
    """Loss (sum over all ranks / denominator), gradient norm before clipping, and the loss function's sums.

    `routing`: figures of replay and expert load (rlsys.trainer.routing), empty for a dense model. `padding_share`:
    of the tokens computed, those that are padding. `skipped`: the gradient was not finite, and the weights are as
    they were.
    """

    loss: float
    grad_norm: float
    sums: dict[str, Tensor]
    routing: dict[str, float]
    padding_share: float
    skipped: bool = False


@dataclass
class Pending:
    """Micro-batches of this rank whose gradients wait for the next update. `sums`: on the last stage, one of each."""

    sums: list[dict[str, Tensor]] = field(default_factory=list)
    real_tokens: int = 0
    computed_tokens: int = 0
