"""Tokens of a micro-batch that a rank computes: all tokens, or chunks of each sequence under context parallelism.

Under context parallelism with c ranks, every sequence is divided into 2c equal chunks. Rank r computes chunks r and
2c-1-r, so that all ranks compute the same number of attention scores. Megatron's rotary embedding and Transformer
Engine expect this order. Padding follows the tokens of a sequence or is a separate sequence, so that no real token
attends to it.

Tokens that a sequence shares with the sequence before it (rlsys/trainer/prefixes.py) are computed once: several
tokens of the micro-batch then have the same padded token.

Shapes: T tokens of the micro-batch, P computed tokens with padding, c context-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlsys.trainer.pack import MicroBatch


def chunk_order(lengths: list[int], cp: int) -> Tensor:
    """Return the padded token at each position of the ranks' concatenated tokens, `[P]`.

    `lengths`: padded length of each sequence.
    """
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
    """Pad the lengths of sequences, and append a sequence of padding if the sum is then too small.

    Args:
        lengths: Number of tokens of each sequence.
        multiple: The number of tokens of each rank is a multiple of it.
        cp: Number of context-parallel ranks, into whose chunks each padded length is divisible.
        total: Minimum sum of the padded lengths.
    """
    chunks = 2 * cp if cp > 1 else 1
    padded = [-(-n // chunks) * chunks for n in lengths]
    missing = max(0, total - sum(padded))
    missing += -(sum(padded) + missing) % (chunks * multiple)
    return [*padded, missing] if missing else padded


@dataclass(frozen=True)
class Targets:
    """Fields of a `Share` for N of its tokens, which their logits `[N, V / tp]` are compared with."""

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
        tokens: `[P / c]` int64, ids of this rank's tokens.
        position_ids: `[P / c]`, positions of these tokens in their sequences.
        following: `[P / c]`, id of the token after each of these tokens, or the target in its place.
        lengths: Number of computed tokens of each whole sequence, with padding.
        gathered_index: `[P]`, index of each padded token among the gathered tokens of all ranks; None: one rank has
            all tokens in order.
        padded_index: `[T]`, index of each token of the micro-batch among the gathered tokens of all ranks.
        first: `[S]`, first token of each sequence in the micro-batch.
        source: `[P / c]`, the micro-batch's token at each of these tokens; the first one if several share it, -1 for
            padding.
        predicts: `[P / c]`, whether another token follows in the sequence.
        cp_group: Context-parallel group.
        prefixes: For each padded sequence, the indices of its shared tokens, `[k]` in host memory. They precede the
            sequence's own tokens. Empty: no tokens are shared.
        support_at: `[N]`, index among this rank's tokens for each id in `support_ids`; None: no token has a sampling
            mask.
        support_ids: `[N]`, ids of the sampling masks of `following`.
        teacher_ids: `[P / c, K]`, a teacher's most probable ids in place of `following`.
        teacher_logp: `[P / c, K]`, their log-probs.
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
        """Return the targets of the tokens `rows` of this rank."""
        support_at, support_ids = self.support_at, self.support_ids
        all_rows = (rows.start, rows.stop) == (0, len(self.tokens))
        if support_at is not None and support_ids is not None and not all_rows:
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

    def multiplicity(self) -> Tensor:
        """Return how many of the micro-batch's tokens share each computed token, `[P]`; 0 at padding.

        Requires that one rank has all tokens.
        """
        return torch.bincount(self.padded_index, minlength=len(self.tokens))

    @classmethod
    def of(
        cls, micro: MicroBatch, multiple: int, cp_group: ProcessGroup, device: torch.device, total: int = 0
    ) -> Share:
        """Build the share of this rank. `multiple`, `total`: see padded_lengths."""
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

        def to_share(values: Tensor) -> Tensor:
            """Select the values `[T]` of this rank's tokens, `[P / c]`, with 0 at padding."""
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
            tokens=to_share(tokens),
            position_ids=positions[local_order].to(device),
            following=to_share(targets.roll(-1)),
            lengths=padded,
            gathered_index=inverse_order.to(device) if cp > 1 else None,
            padded_index=inverse_order[padded_token].to(device),
            first=starts.to(device),
            source=source.to(device),
            predicts=to_share(follows),
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
    """Map the tokens of a micro-batch to padded tokens.

    Args:
        starts: `[S]`, first token of each sequence.
        sizes: `[S]`, number of tokens of each sequence.
        shared: Number of tokens that each sequence shares with the one before it; empty: no tokens are shared.
        padded: Padded length of each sequence, and of a sequence of padding.

    Returns:
        The padded token of each token `[T]`, the tokens that are not shared, and the padded tokens that each padded
        sequence shares.
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
        prefixes[i] = padded_token[previous_start : previous_start + k].clone()
        padded_token[start : start + k] = prefixes[i]
    return padded_token, tokens[is_own], prefixes


def _shift_to_predecessors(values: Tensor | None, source: Tensor, device: torch.device) -> Tensor | None:
    """Return the values `[T, K]` of the token after each of this rank's tokens, `[P / c, K]`.

    They are arbitrary at padding and at the last token of a sequence.
    """
    return None if values is None else values.cpu().roll(-1, 0)[source.clamp(min=0)].to(device)


def _local_support(micro: MicroBatch, index: Tensor, size: int) -> tuple[Tensor | None, Tensor | None]:
    """Return `support_at` and `support_ids` of the tokens that this rank predicts.

    Args:
        micro: The micro-batch.
        index: `[T]`, index of each token among this rank's tokens, outside of 0 to size - 1 if another rank has it.
        size: Number of this rank's tokens.
    """
    if micro.support_at is None or micro.support_ids is None:
        return None, None
    local_index = index[micro.support_at.cpu() - 1]  # the first token of a sequence is never sampled
    is_local = (local_index >= 0) & (local_index < size)
    return local_index[is_local], micro.support_ids.cpu()[is_local]
