"""Tokens of a micro-batch that this rank computes: all, or its chunks of each sequence under context parallelism.

Shapes: T tokens of the micro-batch, P tokens once it is padded, c context-parallel ranks. Every sequence is cut into
2c equal chunks and rank r computes chunks r and 2c-1-r, so that all ranks attend to equally many keys (the order that
Megatron's rotary embedding and Transformer Engine expect). Padding ends a sequence or is a separate sequence: no real
token attends to it.

Tokens that a sequence shares with the one before it (rlsys/trainer/prefixes.py) are excluded here: the P tokens are
the computed ones, and several of the T may have the same index.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlsys.trainer.pack import MicroBatch


def chunk_order(lengths: list[int], cp: int) -> Tensor:
    """Return the padded token at each position if the tokens of rank 0, rank 1, ... are concatenated, `[P]`."""
    if cp == 1:
        return torch.arange(sum(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    chunks = []
    for rank in range(cp):
        for start, length in zip(starts, lengths, strict=False):
            size = length // (2 * cp)
            for chunk in (rank, 2 * cp - 1 - rank):
                chunks.append(torch.arange(start + chunk * size, start + (chunk + 1) * size))
    return torch.cat(chunks)


def padded_lengths(lengths: list[int], multiple: int, cp: int, total: int = 0) -> list[int]:
    """Return padded lengths with which ranks get equal chunks and a `multiple` of tokens, at least `total` tokens in
    all.

    Missing tokens are appended as a separate sequence.
    """
    chunks = 2 * cp if cp > 1 else 1
    padded = [-(-n // chunks) * chunks for n in lengths]
    missing = max(0, total - sum(padded))
    missing += -(sum(padded) + missing) % (chunks * multiple)
    return [*padded, missing] if missing else padded


@dataclass(frozen=True)
class Targets:
    """The fields of a `Share` that logits `[N, V / tp]` of some of its tokens are scored against."""

    following: Tensor
    predicts: Tensor
    support_at: Tensor | None
    support_ids: Tensor | None
    teacher_ids: Tensor | None
    teacher_logp: Tensor | None


@dataclass(frozen=True)
class Share:
    """Tokens of this rank, and the indices that map them to the micro-batch.

    Attributes:
        tokens, position_ids, following: `[P / c]` int64, this rank's tokens, their positions, and the token after
            each of them, or the target in its place.
        lengths: Those of the whole padded sequences.
        gathered_index: `[P]`, index of their tokens after the ranks' shares are gathered; None if one rank has them
            all, in order.
        padded_index: `[T]`, the same for the tokens of the micro-batch.
        first: First token of each sequence.
        source: `[P / c]`, token of the micro-batch at this index, the first of several; -1 for padding.
        predicts: Whether another token follows it.
        prefixes: For each padded sequence the indices of the tokens that it shares, `[k]` in host memory, all before
            its own; empty: no tokens are shared.
        support_at, support_ids: `[N]`, ids of the sampling mask, if `following` was drawn from a part of the
            vocabulary.
        teacher_ids, teacher_logp: `[P / c, K]`, a teacher's most probable tokens in place of `following`.
    """

    tokens: Tensor
    position_ids: Tensor
    following: Tensor
    lengths: list[int]
    gathered_index: Tensor | None
    padded_index: Tensor
    first: Tensor
    source: Tensor
    predicts: Tensor
    cp_group: ProcessGroup
    prefixes: list[Tensor] = field(default_factory=list)
    support_at: Tensor | None = None
    support_ids: Tensor | None = None
    teacher_ids: Tensor | None = None
    teacher_logp: Tensor | None = None

    def targets(self, rows: slice) -> Targets:
        """Return the targets of the logits of these rows of the `[P / c]` tokens."""
        support_at, support_ids = self.support_at, self.support_ids
        if (
            support_at is not None
            and support_ids is not None
            and (rows.start, rows.stop) != (0, len(self.tokens))
        ):
            is_local = (support_at >= rows.start) & (support_at < rows.stop)
            support_at, support_ids = support_at[is_local] - rows.start, support_ids[is_local]
        return Targets(
            self.following[rows],
            self.predicts[rows],
            support_at,
            support_ids,
            None if self.teacher_ids is None else self.teacher_ids[rows],
            None if self.teacher_logp is None else self.teacher_logp[rows],
        )

    def times(self) -> Tensor:
        """Return the number of micro-batch tokens for which each token is computed, `[P]`; 0 at padding.

        It requires that one rank has all tokens.
        """
        return torch.bincount(self.padded_index, minlength=len(self.tokens))

    @classmethod
    def of(
        cls, micro: MicroBatch, multiple: int, cp_group: ProcessGroup, device: torch.device, total: int = 0
    ) -> Share:
        """Build the share of this rank, padded to at least `total` tokens."""
        cp = cp_group.size()
        starts, ends = micro.cu_seqlens[:-1].long().cpu(), micro.cu_seqlens[1:].long().cpu()
        padded = padded_lengths(micro.computed_lengths, multiple, cp, total)
        padded_token, own_tokens, prefixes = _padded_places(starts, ends - starts, micro.prefixes, padded)
        order = chunk_order(padded, cp)
        inverse_order = torch.empty_like(order)
        inverse_order[order] = torch.arange(len(order))
        local_order = order.chunk(cp)[cp_group.rank()]
        source = torch.full((len(order),), -1).index_copy(0, padded_token[own_tokens], own_tokens)[
            local_order
        ]

        def spread(values: Tensor) -> Tensor:
            return torch.where(source < 0, values.new_zeros(()), values[source]).to(device)

        follows = torch.ones(len(micro.tokens), dtype=torch.bool).index_fill(0, ends - 1, False)
        tokens = micro.tokens.cpu()
        targets = tokens if micro.targets is None else micro.targets.cpu()
        support_at, support_ids = _local_support(
            micro, inverse_order[padded_token] - cp_group.rank() * len(local_order), len(local_order)
        )
        prefix_lengths = [len(prefix) for prefix in prefixes] or [0] * len(padded)
        positions = torch.cat([torch.arange(k, k + n) for k, n in zip(prefix_lengths, padded, strict=True)])
        return cls(
            tokens=spread(tokens),
            position_ids=positions[local_order].to(device),
            following=spread(targets.roll(-1)),
            lengths=padded,
            gathered_index=inverse_order.to(device) if cp > 1 else None,
            padded_index=inverse_order[padded_token].to(device),
            first=starts.to(device),
            source=source.to(device),
            predicts=spread(follows),
            cp_group=cp_group,
            prefixes=prefixes,
            support_at=None if support_at is None else support_at.to(device),
            support_ids=None if support_ids is None else support_ids.to(device),
            teacher_ids=_shift_to_predecessors(micro.teacher_ids, source, device),
            teacher_logp=_shift_to_predecessors(micro.teacher_logp, source, device),
        )


def _padded_places(
    starts: Tensor, sizes: Tensor, shared: list[int], padded: list[int]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Map tokens to padded tokens.

    Returns `[T]` the padded token of each token, the tokens that are not shared, and the indices of each padded
    sequence's shared tokens.
    """
    padded_starts = torch.tensor([0, *padded]).cumsum(0)[: len(sizes)]
    tokens = torch.arange(int(sizes.sum()))
    if not shared:
        return tokens + torch.repeat_interleave(padded_starts - starts, sizes), tokens, []
    padded_token = tokens + torch.repeat_interleave(padded_starts - torch.tensor(shared) - starts, sizes)
    is_own = torch.ones(len(padded_token), dtype=torch.bool)
    prefixes = [padded_token.new_empty(0)] * len(padded)
    for i, (start, previous_start, k) in enumerate(
        zip(starts.tolist(), [0, *starts.tolist()], shared, strict=False)
    ):
        is_own[start : start + k] = False
        padded_token[start : start + k] = prefixes[i] = padded_token[
            previous_start : previous_start + k
        ].clone()
    return padded_token, tokens[is_own], prefixes


def _shift_to_predecessors(values: Tensor | None, source: Tensor, device: torch.device) -> Tensor | None:
    """Shift `[T, K]` to `[P / c, K]`: the values of the token after each of these; arbitrary if there is none."""
    return None if values is None else values.cpu().roll(-1, 0)[source.clamp(min=0)].to(device)


def _local_support(micro: MicroBatch, index: Tensor, size: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the sampling masks of the tokens that this rank predicts.

    `index` `[T]`: index of each token among the rank's `size` tokens, outside this range if another rank has it.
    """
    if micro.support_at is None or micro.support_ids is None:
        return None, None
    local_index = index[micro.support_at.cpu() - 1]  # the first token of a sequence is never sampled
    is_local = (local_index >= 0) & (local_index < size)
    return local_index[is_local], micro.support_ids.cpu()[is_local]
