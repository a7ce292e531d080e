"""Optimal token baseline: the mean reward of a group's responses that reach a position, weighted by gradient norms.

A cell is a response position of a group; a group has as many cells as its longest response has tokens. Shapes: N
samples of the step, T packed tokens.
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
"""Largest number of cells in one sum over ranks, which limits the memory."""


def score_norm(part: Batch) -> Tensor:
    """Return the squared norm of the gradient of log pi with respect to the logits for each token, `[T]` float64.

    It is 1 - 2 pi + sum over the vocabulary of pi^2, and 0 where masked.
    """
    token_prob = part.masked(part.signal("old")).double().exp()
    return part.masked(1 - 2 * token_prob + part.signal("sum_pi_squared").double())


def running_sum(part: Batch, values: Tensor) -> Tensor:
    """Return the cumulative sum of `values` `[T]` within each sequence, including the token itself, `[T]`."""
    total = values.cumsum(0)
    starts = torch.cat([total.new_zeros(1), total])[part.cu_seqlens[:-1].long()]
    return total - starts[part.ids]


class OptimalTokenBaseline(Advantage):
    """R - B_t with the baseline of least variance for token t, B_t = sum W_t R / sum W_t over the group's responses.

    W_t = sum_{j <= t} (1 - 2 pi_j + sum_v pi_jv^2) is the squared norm of the gradient, with respect to the logits,
    of the response's log-prob up to token t. t counts the trained tokens of the sample in all its sequences. At a
    position that only one response of the group reaches, the advantage is R as in verl, or 0 with `lone: false`.
    """

    paper: ClassVar[str] = (
        "The optimal token baseline (OTB, arXiv 2602.07078), verl core_algos.py, an author's own pull request 4678"
    )
    evidence: ClassVar[str] = "R"
    of_samples: ClassVar[bool] = False
    lone: bool = True
    """Whether a token has an advantage if no other response of the group reaches its position."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """Largest importance weight exp(old - mu), whose square multiplies each term of W; null: no importance weight."""
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
        weights = _running(parts, [self._energy(part) for part in parts], len(samples), reduce)
        numbers = _running(parts, [part.keep.double() for part in parts], len(samples), reduce)
        token_cells = [
            _token_cell(part, start.to(part.mu.device), number)
            for part, number in zip(parts, numbers, strict=True)
        ]
        token_advantages = [torch.zeros_like(reward) for reward in rewards]
        for low in range(0, cells, CHUNK):
            size = min(CHUNK, cells - low)
            in_chunk = [
                part.keep & (cell >= low) & (cell < low + size)
                for part, cell in zip(parts, token_cells, strict=True)
            ]
            chunk_cells = [cell[mask] - low for cell, mask in zip(token_cells, in_chunk, strict=True)]
            chunk_weights = [weight[mask] for weight, mask in zip(weights, in_chunk, strict=True)]
            chunk_rewards = [reward[mask] for reward, mask in zip(rewards, in_chunk, strict=True)]
            baseline, is_shared = self._baseline(chunk_cells, chunk_weights, chunk_rewards, size, reduce)
            for values, mask, cell, reward in zip(
                token_advantages, in_chunk, chunk_cells, chunk_rewards, strict=True
            ):
                values[mask] = (reward - baseline[cell]) * (is_shared[cell] | self.lone)
        return [
            part.masked(values.to(part.mu.dtype))
            for part, values in zip(parts, token_advantages, strict=True)
        ]

    def _baseline(
        self,
        cells: Sequence[Tensor],
        weights: Sequence[Tensor],
        rewards: Sequence[Tensor],
        size: int,
        reduce: Reduce,
    ) -> tuple[Tensor, Tensor]:
        """Return the baseline of each cell, and whether several responses reach the cell, `[size]` each.

        Args:
            cells: cell of each token, `[n]` for each packed batch of this rank.
            weights: W of each token, `[n]` for each batch.
            rewards: reward of each token's sample, `[n]` for each batch.
            size: number of cells.
            reduce: sum over ranks.
        """
        sums = torch.zeros(3, size, dtype=torch.float64, device=rewards[0].device)  # W R, W, responses
        for cell, weight, reward in zip(cells, weights, rewards, strict=True):
            sums.index_add_(1, cell, torch.stack([weight * reward, weight, torch.ones_like(weight)]))
        weighted_reward, total_weight, count = reduce(sums)
        is_shared = count > 1
        return torch.where(is_shared, weighted_reward / (total_weight + self.eps), 0.0), is_shared

    def _energy(self, part: Batch) -> Tensor:
        """Return the term of each token in W, `[T]` float64."""
        norm = score_norm(part)
        if self.cap is None:
            return norm
        gap = part.masked(part.signal("old") - part.mu).double()
        return norm * gap.exp().clamp(max=self.cap) ** 2


def _cells(samples: Samples) -> tuple[Tensor, int]:
    """Return the first cell of each sample's group, `[N]`, and the number of cells of all groups."""
    index, sizes = group_index(samples.group_ids)
    longest = torch.zeros(len(sizes), dtype=torch.long, device=index.device)
    longest = longest.scatter_reduce(0, index, samples.lengths.to(index), "amax")
    ends = longest.cumsum(0)
    return (ends - longest)[index], int(ends[-1])


def _running(parts: Sequence[Batch], values: Sequence[Tensor], samples: int, reduce: Reduce) -> list[Tensor]:
    """Return the cumulative sums of `values` within each sample, over all its sequences.

    Args:
        parts: packed batches of this rank.
        values: `[T]` for each batch.
        samples: number of samples of the step.
        reduce: sum over ranks.

    Returns:
        `[T]` float64 for each batch; the sum includes the token itself.
    """
    sums = [part.per_sequence(v) for part, v in zip(parts, values, strict=True)]
    earlier = sums_before(sequence_table(parts, sums, samples, reduce))
    return [
        running_sum(part, v) + at_sequences(part, earlier)[part.ids]
        for part, v in zip(parts, values, strict=True)
    ]


def _token_cell(part: Batch, start: Tensor, token_number: Tensor) -> Tensor:
    """Return the cell of each token, `[T]`; undefined where masked.

    Args:
        part: a packed batch.
        start: first cell of each sample's group, `[N]`.
        token_number: number of each token among the trained tokens of its sample, from 1, `[T]`.
    """
    return start[part.rows.to(start.device)][part.ids] + token_number.round().long() - 1
