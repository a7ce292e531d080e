"""D3S: dynamic dual-level down-sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.draws import argsort_with_draws, sample_draws
from rlsys.algo.reduction import Reduce, table_sum, threshold
from rlsys.algo.segments import sum_by
from rlsys.algo.selectors import Selector
from rlsys.config.section import Fraction

TIE = 2.0**-20
"""Difference below which advantages count as equal, as a share of the largest one, because rounding differs between
groups."""


def widest_subset(values: Tensor, count: int, draws: Tensor) -> Tensor:
    """Return the mask of the `count` values with the largest variance, `[N]` bool.

    In sorted order, these values are always a prefix and a suffix. The function compares all `count` + 1 such subsets
    in O(N log N).

    Args:
        values: `[N]`.
        count: size of the subset.
        draws: random numbers that order equal values, `[N]`.
    """
    n = len(values)
    if count >= n:
        return torch.ones(n, dtype=torch.bool, device=values.device)
    values = values.double().cpu()
    scale = values.abs().max().clamp(min=1e-30)
    order = argsort_with_draws((values / scale / TIE).round(), draws.cpu())
    sorted_values = values[order]
    zero = sorted_values.new_zeros(1)
    sums = torch.cat([zero, sorted_values.cumsum(0)])
    squares = torch.cat([zero, (sorted_values**2).cumsum(0)])
    prefix_end = torch.arange(count + 1)
    suffix_start = n - (count - prefix_end)
    subset_sums = sums[prefix_end] + sums[n] - sums[suffix_start]
    subset_squares = squares[prefix_end] + squares[n] - squares[suffix_start]
    best = int((subset_squares / count - (subset_sums / count) ** 2).argmax())
    keep = torch.zeros(n, dtype=torch.bool)
    keep[order[:best]] = True
    keep[order[n - (count - best) :]] = True
    return keep


class D3S(Selector):
    """Train on the samples whose advantages have the largest variance, and on their most informative tokens.

    From all samples of a step, the selector selects a share with the largest variance of advantages, then the share
    of their tokens with the largest |A_t| H_t, where H is the entropy. Both shares grow linearly over `steps`. The
    paper does not state its schedule; rlsys chose these defaults.

    By default the loss is the mean over the selected samples and tokens: the denominator is multiplied by both
    shares, so a selection makes gradients larger, as in the paper. With `denominator: all` a selection makes
    gradients smaller, and the growing shares act like a growing learning rate.
    """

    paper: ClassVar[str] = "D3S: dynamic dual-level down-sampling"
    evidence: ClassVar[str] = "P"
    samples_start: Fraction = 0.5
    """Share of samples at the first step."""
    samples_end: Fraction = 1.0
    """Share of samples from step `steps` on."""
    tokens_start: Fraction = 0.2
    """Share of tokens at the first step."""
    tokens_end: Fraction = 1.0
    """Share of tokens from step `steps` on."""
    steps: Annotated[int, Field(gt=0)] = 100
    """Number of train steps over which the shares grow."""
    denominator: Literal["kept", "all"] = "kept"
    """Samples and tokens in the denominator. kept: the selected ones. all: all of the step."""

    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"}) if min(self.tokens_start, self.tokens_end) < 1 else frozenset()

    def _share(self, start: float, end: float, step: int) -> float:
        """Return the share at a train step, on the line from `start` to `end`."""
        return start + (end - start) * min(1.0, step / self.steps)

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        if advantages is None:
            raise ValueError(
                "advantages = None; expected the advantages of samples, which algo.selectors d3s needs"
            )
        count = max(1, round(self._share(self.samples_start, self.samples_end, samples.step) * len(samples)))
        return widest_subset(advantages, count, sample_draws(samples)).to(advantages)

    def denominator_share(self, weight: Tensor, mass: Tensor, step: int) -> float:
        if self.denominator == "all" or not mass.any():
            return 1.0
        share = float(mass[(weight != 0).to(mass.device)].sum() / mass.sum())
        return share * self._share(self.tokens_start, self.tokens_end, step)

    @staticmethod
    def _selected_tokens(parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> float:
        """Return the number of tokens of the selected samples on all ranks.

        It includes the tokens of samples without a gradient, which are not packed.
        """

        def count_by_row(masks: list[Tensor]) -> Tensor:
            """Count the tokens of each sample where a mask, `[T]` for each part, is true, `[N]`."""
            counts = [sum_by(m.double(), p.ids, p.sequences) for m, p in zip(masks, parts, strict=True)]
            return table_sum(counts, [part.rows for part in parts], len(samples), reduce).cpu()

        packed = count_by_row([part.keep for part in parts])
        counted_tokens = count_by_row([part.counted_tokens for part in parts])
        tokens = torch.where(packed > 0, counted_tokens, samples.lengths.cpu().double())
        return float(tokens[samples.column("selected").cpu()].sum())

    def per_token(self, parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> list[Tensor] | None:
        share = self._share(self.tokens_start, self.tokens_end, samples.step)
        if share >= 1:
            return None
        scores = [
            part.masked(part.signal("advantages").abs() * part.signal("entropy").detach()) for part in parts
        ]
        positive = [s[(s > 0) & p.counted_tokens] for s, p in zip(scores, parts, strict=True)]
        device = positive[0].device if positive else torch.device("cpu")
        count = float(sum(len(values) for values in positive))
        candidates = torch.tensor([count, 0.0], dtype=torch.float64, device=device)
        target = share * self._selected_tokens(parts, samples, reduce)
        dropped = max(0.0, float(reduce(candidates)[0]) - target)
        upper = _upper_bound(positive, reduce)
        bound = threshold(positive, lambda edges, counts, sums: counts <= dropped, 0.0, upper, reduce)
        return [(s > bound).to(s) for s in scores]


def _upper_bound(parts: Sequence[Tensor], reduce: Reduce) -> float:
    """Return the smallest power of two from 2^-30 on that no value of any rank exceeds; at most 2^31.

    Args:
        parts: values of this rank, `[n]` each.
        reduce: sum over ranks.
    """
    exponents = torch.arange(-30, 31, dtype=torch.float64)
    exceeding = torch.zeros(len(exponents), dtype=torch.float64)
    for values in parts:
        if len(values):
            exceeding += (values.double().cpu()[:, None] > 2.0 ** exponents[None, :]).double().sum(0)
    device = parts[0].device if parts else torch.device("cpu")
    bounds = (reduce(exceeding.to(device)).cpu() == 0).nonzero()
    return float(2.0 ** exponents[int(bounds[0])]) if len(bounds) else 2.0**31
