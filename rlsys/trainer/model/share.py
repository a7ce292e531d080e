"""Which tokens of a micro-batch this rank computes: all, or under context parallelism its chunks of each sequence.

Shapes: T tokens of the micro-batch, P tokens once it is padded, c context-parallel ranks. Every sequence is cut
into 2c equal chunks and rank r computes chunks r and 2c-1-r, so that all ranks see as many keys (the order that
megatron's rotary embedding and Transformer Engine expect). Padding ends a sequence or is one of its own: no real
token attends to it.

What a sequence shares with the one before it (rlsys/trainer/prefixes.py) is no part of it here: the P tokens are
those that are computed, and several of the T may stand at one of their places.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    tokens. `prefixes`: of each padded sequence the places of the tokens that it shares, `[k]` in host memory, all
    before its own; empty: none shares any. `source` `[P / c]`: which token of the micro-batch stands here, the first
    of several, -1 for padding; `predicts`: whether another follows it.
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
    prefixes: list[Tensor] = field(default_factory=list)
    support_at: Tensor | None = None
    support_ids: Tensor | None = None
    teacher_ids: Tensor | None = None
    teacher_logp: Tensor | None = None

    def times(self) -> Tensor:
        """`[P]`: for how many tokens of the micro-batch each is computed; 0 at padding. One rank has them all."""
        return torch.bincount(self.place, minlength=len(self.tokens))

    @classmethod
    def of(
        cls, micro: MicroBatch, multiple: int, cp_group: ProcessGroup, device: torch.device, total: int = 0
    ) -> Share:
        """Padded to at least `total` tokens."""
        cp = cp_group.size()
        starts, ends = micro.cu_seqlens[:-1].long().cpu(), micro.cu_seqlens[1:].long().cpu()
        padded = padded_lengths(micro.computed_lengths, multiple, cp, total)
        at, own, prefixes = _places(starts, ends - starts, micro.prefixes, padded)
        order = chunk_order(padded, cp)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        mine = order.chunk(cp)[cp_group.rank()]
        source = torch.full((len(order),), -1).index_copy(0, at[own], own)[mine]

        def spread(values: Tensor) -> Tensor:
            return torch.where(source < 0, values.new_zeros(()), values[source]).to(device)

        follows = torch.ones(len(micro.tokens), dtype=torch.bool).index_fill(0, ends - 1, False)
        tokens = micro.tokens.cpu()
        asked = tokens if micro.asked is None else micro.asked.cpu()
        support_at, support_ids = _own_support(micro, place[at] - cp_group.rank() * len(mine), len(mine))
        before = [len(prefix) for prefix in prefixes] or [0] * len(padded)
        positions = torch.cat([torch.arange(k, k + n) for k, n in zip(before, padded, strict=True)])
        return cls(
            tokens=spread(tokens),
            position_ids=positions[mine].to(device),
            following=spread(asked.roll(-1)),
            lengths=padded,
            gathered=place.to(device) if cp > 1 else None,
            place=place[at].to(device),
            first=starts.to(device),
            source=source.to(device),
            predicts=spread(follows),
            cp_group=cp_group,
            prefixes=prefixes,
            support_at=None if support_at is None else support_at.to(device),
            support_ids=None if support_ids is None else support_ids.to(device),
            teacher_ids=_at_following(micro.teacher_ids, source, device),
            teacher_logp=_at_following(micro.teacher_logp, source, device),
        )


def _places(
    starts: Tensor, sizes: Tensor, shared: list[int], padded: list[int]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`[T]`: the padded token that stands for each token. The tokens that are not shared. Of each padded sequence the
    places of what it shares."""
    padded_starts = torch.tensor([0, *padded]).cumsum(0)[: len(sizes)]
    tokens = torch.arange(int(sizes.sum()))
    if not shared:
        return tokens + torch.repeat_interleave(padded_starts - starts, sizes), tokens, []
    at = tokens + torch.repeat_interleave(padded_starts - torch.tensor(shared) - starts, sizes)
    own = torch.ones(len(at), dtype=torch.bool)
    prefixes = [at.new_empty(0)] * len(padded)
    for i, (start, before, k) in enumerate(zip(starts.tolist(), [0, *starts.tolist()], shared, strict=False)):
        own[start : start + k] = False
        at[start : start + k] = prefixes[i] = at[before : before + k].clone()
    return at, tokens[own], prefixes


def _at_following(values: Tensor | None, source: Tensor, device: torch.device) -> Tensor | None:
    """`[T, K]` -> `[P / c, K]`: of the token behind each of these; anything where there is none."""
    return None if values is None else values.cpu().roll(-1, 0)[source.clamp(min=0)].to(device)


def _own_support(micro: MicroBatch, place: Tensor, size: int) -> tuple[Tensor | None, Tensor | None]:
    """Of the tokens that those of this rank predict. `place` `[T]`: where each token stands among the rank's `size`
    ones, outside of these where another rank has it."""
    if micro.support_at is None or micro.support_ids is None:
        return None, None
    at = place[micro.support_at.cpu() - 1]  # no first token of a sequence is drawn
    mine = (at >= 0) & (at < size)
    return at[mine], micro.support_ids.cpu()[mine]
