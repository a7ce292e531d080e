"""Which tokens of a micro-batch this rank computes: all, or under context parallelism its chunks of each sequence.

Shapes: T tokens of the micro-batch, P tokens once it is padded, c context-parallel ranks. Every sequence is cut
into 2c equal chunks and rank r computes chunks r and 2c-1-r, so that all ranks see as many keys (the order that
megatron's rotary embedding and Transformer Engine expect). Padding ends a sequence or is one of its own: no real
token attends to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlsys.trainer.pack import MicroBatch


def chunk_order(lengths: list[int], cp: int) -> Tensor:
    """`[P]`: the padded token at each place, when the tokens of rank 0, rank 1, ... stand one after another."""
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
    """Lengths that every rank can cut evenly, its share a `multiple` of tokens; at least `total` tokens. What is
    missing is a sequence of its own."""
    chunks = 2 * cp if cp > 1 else 1
    padded = [-(-n // chunks) * chunks for n in lengths]
    missing = max(0, total - sum(padded))
    missing += -(sum(padded) + missing) % (chunks * multiple)
    return [*padded, missing] if missing else padded


@dataclass(frozen=True)
class Share:
    """tokens, position_ids, following `[P / c]` int64: this rank's tokens, and the token that follows each of them,
    or that is asked for in its place.

    `lengths`: those of the padded sequences, each whole. `gathered` `[P]`: where their tokens stand once the ranks'
    shares are gathered; None where one rank has them all, in order. `place` `[T]`: the same of the micro-batch's
    tokens. `source` `[P / c]`: which token of the micro-batch stands here, -1 for padding; `predicts`: whether
    another follows it.
    `support_at`, `support_ids` `[N]`: where `following` was drawn from a part of the vocabulary, that part's ids.
    `teacher_ids`, `teacher_logp` `[P / c, K]`: what a teacher finds most probable in the place of `following`.
    """

    tokens: Tensor
    position_ids: Tensor
    following: Tensor
    lengths: list[int]
    gathered: Tensor | None
    place: Tensor
    first: Tensor
    source: Tensor
    predicts: Tensor
    cp_group: ProcessGroup
    support_at: Tensor | None = None
    support_ids: Tensor | None = None
    teacher_ids: Tensor | None = None
    teacher_logp: Tensor | None = None

    @classmethod
    def of(
        cls, micro: MicroBatch, multiple: int, cp_group: ProcessGroup, device: torch.device, total: int = 0
    ) -> Share:
        """Padded to at least `total` tokens."""
        cp = cp_group.size()
        starts, ends = micro.cu_seqlens[:-1].long().cpu(), micro.cu_seqlens[1:].long().cpu()
        sizes = ends - starts
        padded = padded_lengths(sizes.tolist(), multiple, cp, total)
        padded_starts = torch.tensor([0, *padded]).cumsum(0)[: len(sizes)]
        at = torch.arange(len(micro.tokens)) + torch.repeat_interleave(padded_starts - starts, sizes)
        order = chunk_order(padded, cp)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        mine = order.chunk(cp)[cp_group.rank()]

        def spread(values: Tensor, padding: int = 0) -> Tensor:
            return values.new_full((len(order),), padding).index_copy(0, at, values)

        follows = torch.ones(len(micro.tokens), dtype=torch.bool).index_fill(0, ends - 1, False)
        tokens = micro.tokens.cpu()
        asked = tokens if micro.asked is None else micro.asked.cpu()
        source = spread(torch.arange(len(tokens)), -1)[mine]
        support_at, support_ids = _own_support(micro, source)
        positions = torch.cat([torch.arange(n) for n in padded])
        return cls(
            tokens=spread(tokens)[mine].to(device),
            position_ids=positions[mine].to(device),
            following=spread(asked.roll(-1))[mine].to(device),
            lengths=padded,
            gathered=place.to(device) if cp > 1 else None,
            place=place[at].to(device),
            first=starts.to(device),
            source=source.to(device),
            predicts=spread(follows)[mine].to(device),
            cp_group=cp_group,
            support_at=None if support_at is None else support_at.to(device),
            support_ids=None if support_ids is None else support_ids.to(device),
            teacher_ids=_at_following(micro.teacher_ids, source, device),
            teacher_logp=_at_following(micro.teacher_logp, source, device),
        )


def _at_following(values: Tensor | None, source: Tensor, device: torch.device) -> Tensor | None:
    """`[T, K]` -> `[P / c, K]`: of the token behind each of these; anything where there is none."""
    return None if values is None else values.cpu().roll(-1, 0)[source.clamp(min=0)].to(device)


def _own_support(micro: MicroBatch, source: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of the tokens that those of this rank predict: `source` as in Share."""
    if micro.support_at is None or micro.support_ids is None:
        return None, None
    here = source.new_full((len(micro.tokens),), -1)
    real = source >= 0
    here[source[real]] = torch.arange(len(source))[real]
    at = here[micro.support_at.cpu() - 1]  # no first token of a sequence is drawn
    return at[at >= 0], micro.support_ids.cpu()[at >= 0]
