"""Separate critic: a second model with the policy's architecture and initial weights, and its own optimizer.

It has the policy's parallel layout and gets the policy's micro-batches. Shapes: T tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from rlsys.algo.objective import Objective
from rlsys.config.algo import CriticSection
from rlsys.trainer import setup
from rlsys.trainer.control import Control
from rlsys.trainer.logprobs import Scores, ValueScoring
from rlsys.trainer.model.chunks import Chunks
from rlsys.trainer.pack import MicroBatch
from rlsys.trainer.passes import ScoresOf
from rlsys.trainer.trainer import Trainer


class Critic(Trainer):
    """A trainer whose model outputs one value per token.

    Its scores contain only `values`; the log-probs are 0. Its routers select experts without replay. The policy's
    checkpoints contain the critic's state.
    """

    def __init__(self, policy: Trainer, section: CriticSection) -> None:
        self._policy = policy
        trainer_config = policy.config.trainer.model_copy(
            update={"replay": "off", "mtp_loss": 0.0, "mtp_trunk": False}
        )
        super().__init__(policy.config.model_copy(update={"trainer": trainer_config}))
        self.warmup_steps = section.warmup_steps
        self._lr_factor = (section.lr or trainer_config.lr) / trainer_config.lr

    def _init_layout(self, undo: ExitStack) -> torch.device:
        """Return this rank's device; the policy has created the process groups."""
        return setup.local_device()

    def _create_control(self, undo: ExitStack) -> Control:
        return self._policy.control

    def _build_model(self) -> Chunks:
        chunks = super()._build_model()
        chunks.end_in_values(self._device)
        return chunks

    def _scoring_function(self) -> ScoresOf:
        return ValueScoring(self._chunks.value_layer())

    def score_values(self, batches: Sequence[list[MicroBatch]]) -> None:
        """Set the field `values` `[T]` of every micro-batch."""
        for batch in batches:
            for micro, scores in zip(batch, self.passes.score(batch), strict=True):
                micro.values = scores.values

    def improve(
        self, objective: Objective, batch: list[MicroBatch], policy_lr: float, denominator: float
    ) -> dict[str, object]:
        """Run one update on this rank's micro-batches and return its metrics.

        Args:
            objective: Computes the loss of the values.
            batch: The micro-batches, scored, with advantages.
            policy_lr: Learning rate of the policy's schedule at this step. The critic's rate is proportional to it.
            denominator: Divides the loss sum of all ranks.
        """

        def loss(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            assert scores.values is not None
            return objective.critic_loss(scores.values, micro)

        rate = policy_lr * self._lr_factor
        result = self.update(batch, loss, rate, denominator=denominator)
        return {
            "critic_loss": result.loss,
            "critic_grad_norm": result.grad_norm,
            "critic_lr": rate,
            "critic_skipped": int(result.skipped),
            "value_error": float(result.sums["value_error"]) / max(1.0, float(result.sums["tokens"])),
        }


def add_critic(policy: Trainer, section: CriticSection) -> None:
    """Set `policy.critic` to a new critic with the weights of `model.path`. Collective."""
    policy.critic = Critic(policy, section)
