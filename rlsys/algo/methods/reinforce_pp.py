"""REINFORCE++ (Hu 2025), with and without a group baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps, dr_grpo
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.reduction import Reduce
from rlsys.algo.segments import discounted_suffix_sum
from rlsys.algo.sequences import at_sequences, sequence_table, sums_after
from rlsys.algo.token_advantages import on_trained, whiten_tokens


class ReinforcePP(Advantage):
    """Reward minus the KL of the remaining tokens, whitened over all tokens of the step.

    A_t = R - beta * sum_{j >= t} (old_j - ref_j) over the remaining tokens of the sample, including its later
    sequences. The advantage is (A - mean) / std over all trained tokens. The method needs no critic and no group
    baseline.
    """

    paper: ClassVar[str] = "REINFORCE++ (Hu 2025), section 3"
    evidence: ClassVar[str] = "R"
    of_samples: ClassVar[bool] = False
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty."""
    eps: Eps = 1e-6
    """Added to the standard deviation."""

    def needs(self) -> frozenset[str]:
        return frozenset({"old", "ref"}) if self.beta else frozenset()

    def __call__(self, samples: Samples) -> Tensor:
        return samples.reward

    def per_token(
        self, advantages: Tensor, samples: Samples, parts: Sequence[Batch], reduce: Reduce
    ) -> list[Tensor]:
        values = [part.masked(part.expand(advantages)) for part in parts]
        if self.beta:
            remaining_kl = self._remaining_kl(parts, len(samples), reduce)
            values = [v - self.beta * kl for v, kl in zip(values, remaining_kl, strict=True)]
        return whiten_tokens(values, parts, reduce, self.eps)

    @staticmethod
    def _remaining_kl(parts: Sequence[Batch], samples: int, reduce: Reduce) -> list[Tensor]:
        """Return the sum of old - ref from each token to the end of its sample, `[T]` for each packed batch."""
        kls = [part.masked(part.signal("old") - part.signal("ref")) for part in parts]
        sums = [part.per_sequence(kl) for part, kl in zip(parts, kls, strict=True)]
        after = sums_after(sequence_table(parts, sums, samples, reduce))
        remaining = []
        for part, kl in zip(parts, kls, strict=True):
            in_sequence = on_trained(part, kl, lambda x, ids: discounted_suffix_sum(x, ids, 1.0))
            remaining.append(part.masked(in_sequence + at_sequences(part, after).to(in_sequence)[part.ids]))
        return remaining


class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++ with the group's mean reward as baseline."""

    evidence: ClassVar[str] = "R"
    of_samples: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Tensor:
        return dr_grpo(samples.reward, samples.group_ids)
