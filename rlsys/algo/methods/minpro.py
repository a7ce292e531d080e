"""MinPRO: weights from the smallest importance ratio of a token's prefix.

Shapes: T tokens and S sequences of a packed batch, N samples of the step, K at least the largest number of sequences
of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.corrections import Correction, CorrectionPlugin, PositiveFloat
from rlsys.algo.losses import View
from rlsys.algo.reduction import Reduce, single_rank
from rlsys.algo.segments import running_min
from rlsys.algo.sequences import at_sequences, minimum_before, sequence_table


def sequence_minimum(part: Batch, values: Tensor) -> Tensor:
    """Return the minimum of `values` `[T]` over each sequence's trained tokens, `[S]`; 0 without trained tokens."""
    minimum = torch.full((part.sequences,), torch.inf, dtype=values.dtype, device=values.device)
    minimum = minimum.scatter_reduce(0, part.ids[part.keep], values[part.keep], "amin")
    return torch.where(minimum.isinf(), torch.zeros_like(minimum), minimum)


class MinPro(CorrectionPlugin):
    """Weight each token by the smallest ratio among the tokens before it, instead of by the product of their ratios.

    w_t = min_{j < t} exp(logp_j - mu_j) over the earlier tokens of the sample in all its sequences, and 1 for its
    first token. The ratio of the token itself is in the loss. This is a reading of the abstract, which does not state
    whether the minimum includes j = t and what is clipped; see `inclusive` and `cap`.
    """

    paper: ClassVar[str] = "A Step Back: prefix importance ratio (MinPRO)"
    evidence: ClassVar[str] = "A"
    inclusive: bool = False
    """Whether the minimum includes the token itself."""
    cap: PositiveFloat | None = 1.0
    """Largest weight. null: no limit."""

    @property
    def whole_samples(self) -> bool:
        return True

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return the smallest log-ratio in the earlier sequences of each sequence's sample, `[N, K]`.

        Return None if `current` is not set, because every sample has one sequence.
        """
        if parts[0].current is None:
            return None
        groups = parts[0].groups
        assert groups is not None, "Objective.finish sets it"
        views = [View(p, p.masked(p.signal("current")), a) for p, a in zip(parts, anchors, strict=True)]
        return self._smallest_before(views, len(groups), reduce)

    @property
    def prepares(self) -> bool:
        return False

    @staticmethod
    def _smallest_before(views: Sequence[View], samples: int, reduce: Reduce) -> Tensor:
        """Return the smallest log-ratio in the earlier sequences of each sequence's sample, `[N, K]`.

        Args:
            views: micro-batches of this rank.
            samples: N.
            reduce: sum over ranks.
        """
        minima = [sequence_minimum(view.batch, view.log_total_ratio) for view in views]
        return minimum_before(sequence_table([view.batch for view in views], minima, samples, reduce))

    def __call__(self, view: View, update_stats: Any) -> Correction:
        batch, keep = view.batch, view.keep
        smallest_before = (
            self._smallest_before([view], int(batch.rows.max()) + 1, single_rank)
            if update_stats is None
            else update_stats
        )
        smallest = running_min(view.log_total_ratio[keep], batch.ids[keep], inclusive=self.inclusive)
        smallest = torch.minimum(smallest, at_sequences(batch, smallest_before).to(smallest)[batch.ids[keep]])
        log_weight = torch.zeros_like(view.anchor).masked_scatter(
            keep, torch.where(smallest.isinf(), 0.0, smallest)
        )
        weight = log_weight.exp()
        return Correction(weight if self.cap is None else weight.clamp(max=self.cap), keep)
