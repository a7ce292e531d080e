"""Token baseline of a group: the mean reward of the responses that reach a position, weighted by gradient norms.

Shapes: N samples, T packed tokens, C cells: a response position for each group, up to its longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.reduction import Reduce
from rlsys.algo.segments import group_index
from rlsys.algo.sequences import at_sequences, sequence_table, sums_before

CHUNK = 2**20
"""Number of cells in one sum over ranks, which bounds the memory for any number of groups."""


def score_norm(part: Batch) -> Tensor:
    """Return |grad of log pi by the logits|^2 of each token, 1 - 2 pi + sum of pi^2, `[T]` float64; 0 where
    masked."""
    token_prob = part.masked(part.signal("old")).double().exp()
    return part.masked(1 - 2 * token_prob + part.signal("sum_pi_squared").double())


def running_sum(part: Batch, values: Tensor) -> Tensor:
    """Return the cumulative sum of `values` within each sequence, including the token itself, `[T]`."""
    total = values.cumsum(0)
    starts = torch.cat([total.new_zeros(1), total])[part.cu_seqlens[:-1].long()]
    return total - starts[part.ids]


class OptimalTokenBaseline(Advantage):
    """R minus the baseline of least variance for each token: B_t = sum W_t R / sum W_t over the group's responses.

    W_t = sum_{j <= t} (1 - 2 pi_j + sum_v pi_jv^2) is the squared norm of the gradient, by the logits, of the
    response's log-prob up to t; t counts the policy's own tokens over all sequences of the sample. At positions that
    only one response reaches, its advantage is R, as in verl; with `lone: false` it is 0.
    """

    paper: ClassVar[str] = (
        "The optimal token baseline (OTB, arXiv 2602.07078), verl core_algos.py, an author's own pull request 4678"
    )
    evidence: ClassVar[str] = "R"
    of_samples: ClassVar[bool] = False
    lone: bool = True
    """Whether tokens at positions that no other response of the group reaches have an advantage."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """Multiply each term of W by min(exp(old - mu), cap)^2, the square of a truncated importance weight."""
    eps: Annotated[float, Field(ge=0)] = 1e-8
    """Added to the sum of W."""

    def needs(self) -> frozenset[str]:
        return frozenset({"old", "sum_pi_squared"})

    def __call__(self, samples: Samples) -> Tensor:
        return samples.reward

    def per_token(
        self, advantages: Tensor, samples: Samples, parts: Sequence[Batch], reduce: Reduce
    ) -> list[Tensor]:
        start, cells = _cells(samples)
        rewards = [part.expand(advantages).double() for part in parts]
        n = len(samples)
        weights = _running(parts, [self._energy(part) for part in parts], n, reduce)
        token_numbers = _running(parts, [part.keep.double() for part in parts], n, reduce)
        token_cells = [
            _token_cell(part, start.to(part.mu.device), token_cell)
            for part, token_cell in zip(parts, token_numbers, strict=True)
        ]
        out = [torch.zeros_like(reward) for reward in rewards]
        for low in range(0, cells, CHUNK):
            size = min(CHUNK, cells - low)
            in_chunk = [
                p.keep & (token_cell >= low) & (token_cell < low + size)
                for p, token_cell in zip(parts, token_cells, strict=True)
            ]
            sums = torch.zeros(3, size, dtype=torch.float64, device=rewards[0].device)  # W R, W, responses
            for reward, weight, token_cell, in_range in zip(
                rewards, weights, token_cells, in_chunk, strict=True
            ):
                terms = torch.stack([weight * reward, weight, torch.ones_like(weight)])[:, in_range]
                sums.index_add_(1, token_cell[in_range] - low, terms)
            top, total, count = reduce(sums)
            shared = count > 1
            baseline = torch.where(shared, top / (total + self.eps), 0.0)
            for token_advantages, reward, token_cell, in_range in zip(
                out, rewards, token_cells, in_chunk, strict=True
            ):
                cell = token_cell[in_range] - low
                token_advantages[in_range] = (reward[in_range] - baseline[cell]) * (shared[cell] | self.lone)
        return [
            part.masked(token_advantages.to(part.mu.dtype))
            for part, token_advantages in zip(parts, out, strict=True)
        ]

    def _energy(self, part: Batch) -> Tensor:
        norm = score_norm(part)
        if self.cap is None:
            return norm
        gap = part.masked(part.signal("old") - part.mu).double()
        return norm * gap.exp().clamp(max=self.cap) ** 2


def _cells(samples: Samples) -> tuple[Tensor, int]:
    """Return (first cell of each sample's group `[N]`, number of cells)."""
    index, sizes = group_index(samples.group_ids)
    longest = torch.zeros(len(sizes), dtype=torch.long, device=index.device)
    longest = longest.scatter_reduce(0, index, samples.lengths.to(index), "amax")
    ends = longest.cumsum(0)
    return (ends - longest)[index], int(ends[-1])


def _running(parts: Sequence[Batch], values: Sequence[Tensor], samples: int, reduce: Reduce) -> list[Tensor]:
    """Return cumulative sums within each sample over all its sequences, including the token itself, `[T]` float64."""
    sums = [part.per_sequence(v) for part, v in zip(parts, values, strict=True)]
    earlier = sums_before(sequence_table(parts, sums, samples, reduce))
    return [
        running_sum(part, v) + at_sequences(part, earlier)[part.ids]
        for part, v in zip(parts, values, strict=True)
    ]


def _token_cell(part: Batch, start: Tensor, token_number: Tensor) -> Tensor:
    """Return the cell of each token, `[T]`; any cell where masked. `token_number`: number within the sample, from
    1."""
    return start[part.rows.to(start.device)][part.ids] + token_number.round().long() - 1
