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
"""Difference, as a share of the largest advantage, below which advantages count as equal: rounding differs by
group."""


def widest_subset(values: Tensor, count: int, draws: Tensor) -> Tensor:
    """Return the subset of `count` of N values with the largest variance, `[N]` bool.

    In sorted order this subset is always a prefix and a suffix, so all `count` + 1 candidates are compared in
    O(N log N). `draws` `[N]` order equal values, which are frequent with rewards of 0 and 1.
    """
    n = len(values)
    if count >= n:
        return torch.ones(n, dtype=torch.bool, device=values.device)
    values = values.double().cpu()
    scale = values.abs().max().clamp(min=1e-30)
    order = argsort_with_draws((values / scale / TIE).round(), draws.cpu())
    sorted_values = values[order]
    zero = sorted_values.new_zeros(1)
    sums, squares = (
        torch.cat([zero, sorted_values.cumsum(0)]),
        torch.cat([zero, (sorted_values**2).cumsum(0)]),
    )
    head = torch.arange(count + 1)
    tail = n - (count - head)
    total, total2 = sums[head] + sums[n] - sums[tail], squares[head] + squares[n] - squares[tail]
    best = int((total2 / count - (total / count) ** 2).argmax())
    keep = torch.zeros(n, dtype=torch.bool)
    keep[order[:best]] = True
    keep[order[n - (count - best) :]] = True
    return keep


class D3S(Selector):
    """Train on the subset of samples with the largest variance of advantages, and on their most informative tokens.

    Of the whole step, it selects a share of the samples with the largest variance of advantages, then a share of
    their tokens with the largest |A_t| H_t, where H is the entropy. Both shares grow linearly over `steps`. The
    paper does not state its schedule; these defaults are rlsys's.

    The loss is the mean over the selected samples and tokens: the denominator shrinks by both shares, so a selection
    makes gradients larger, as in the paper. With `denominator: all` it makes them smaller, and the growing shares act
    like a growing learning rate.
    """

    paper: ClassVar[str] = "D3S: dynamic dual-level down-sampling"
    evidence: ClassVar[str] = "P"
    samples_start: Fraction = 0.5
    """Share of samples at the first step."""
    samples_end: Fraction = 1.0
    """Share of samples after `steps`."""
    tokens_start: Fraction = 0.2
    """Share of tokens at the first step."""
    tokens_end: Fraction = 1.0
    """Share of tokens after `steps`."""
    steps: Annotated[int, Field(gt=0)] = 100
    """Train steps over which the shares grow."""
    denominator: Literal["kept", "all"] = "kept"
    """Denominator of the mean loss: the kept samples and tokens, or all of the step."""

    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"}) if min(self.tokens_start, self.tokens_end) < 1 else frozenset()

    def _share(self, start: float, end: float, step: int) -> float:
        return start + (end - start) * min(1.0, step / self.steps)

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        if advantages is None:
            raise ValueError(
                "algo.selectors d3s needs advantages of samples; expected an algo.advantage that provides them"
            )
        count = max(1, round(self._share(self.samples_start, self.samples_end, samples.step) * len(samples)))
        return widest_subset(advantages, count, sample_draws(samples)).to(advantages)

    def denominator_share(self, weight: Tensor, mass: Tensor, step: int) -> float:
        if self.denominator == "all" or not mass.any():
            return 1.0
        share = float(mass[(weight != 0).to(mass.device)].sum() / mass.sum())
        return share * self._share(self.tokens_start, self.tokens_end, step)

    @staticmethod
    def _tokens(parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> float:
        """Count the tokens of the selected samples, including those without a gradient, which are not packed."""
        rows, selected = [part.rows for part in parts], samples.column("selected").cpu()

        def sum_by_row(tokens: list[Tensor]) -> Tensor:
            sums = [sum_by(t.double(), p.ids, p.sequences) for t, p in zip(tokens, parts, strict=True)]
            return table_sum(sums, rows, len(samples), reduce).cpu()

        packed, counts = sum_by_row([p.keep for p in parts]), sum_by_row([p.counted_tokens for p in parts])
        return float(torch.where(packed > 0, counts, samples.lengths.cpu().double())[selected].sum())

    def per_token(self, parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> list[Tensor] | None:
        share = self._share(self.tokens_start, self.tokens_end, samples.step)
        if share >= 1:
            return None
        scores = [
            part.masked(part.signal("advantages").abs() * part.signal("entropy").detach()) for part in parts
        ]
        positive = [s[(s > 0) & p.counted_tokens] for s, p in zip(scores, parts, strict=True)]
        device = positive[0].device if positive else torch.device("cpu")
        candidates = torch.tensor(
            [float(sum(len(v) for v in positive)), 0.0], dtype=torch.float64, device=device
        )
        target = share * self._tokens(parts, samples, reduce)
        dropped = max(0.0, float(reduce(candidates)[0]) - target)
        largest = _largest(positive, reduce)

        def holds(edges: Tensor, counts: Tensor, _sums: Tensor) -> Tensor:
            return counts <= dropped

        bound = threshold(positive, holds, 0.0, largest, reduce)
        return [(s > bound).to(s) for s in scores]


def _largest(values: Sequence[Tensor], reduce: Reduce) -> float:
    """Return a power of two that no value of any rank exceeds, from sums alone."""
    powers = torch.arange(-30, 31, dtype=torch.float64)
    over = torch.zeros(len(powers), dtype=torch.float64)
    for value in values:
        over += (
            (value.double().cpu()[:, None] > 2.0 ** powers[None, :]).double().sum(0) if len(value) else 0.0
        )
    device = values[0].device if values else torch.device("cpu")
    free = (reduce(over.to(device)).cpu() == 0).nonzero()
    return float(2.0 ** powers[int(free[0])]) if len(free) else 2.0**31
