"""What an engine's own checksums (SGLang's /weights_checker) must be after a push, from the tensors that pass by.

An engine keeps as one tensor what a folder keeps apart: query, key and value; gate and up; all experts of a layer.
Its tensor-parallel ranks each hold a part. SGLang hashes what each rank holds: SHA-256 on a CPU, a kernel of its own
on a GPU. Some kernels want their weights in yet another order; which those are shows in the comparison
(router/attest.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.hash_shares import HashShares, hash_shares
from rlsys.convert.rules import Rule, Stack
from rlsys.convert.table import entries, held_as, slots, stacked_names
from rlsys.weights.hashes import ByteHash, PartDigests, TilePart, join, merge

_VOCABULARY_STEP = 64
"""SGLang pads the vocabulary to a multiple of this, with zeros."""


Found = list[dict[str, "str | TilePart"]]
"""Of each rank of an engine, one size of engine after the other: the engine's name of a tensor -> its checksum, or
what one trainer rank has of it."""


def under_adapter(name: str) -> str:
    """What an engine that serves adapters calls a tensor: it wraps the experts."""
    return re.sub(r"\.experts\.(?=w\d+_weight)", ".experts.base_layer.", name)


def put_together(found: Sequence[Found]) -> list[dict[str, str]]:
    """The checksums that engines must report, from what each trainer rank found. Only of tensors that are whole."""
    digests = []
    for of_ranks in zip(*found, strict=True):  # of one engine rank
        whole: dict[str, str] = {}
        parts: dict[str, list[TilePart]] = {}
        for name, value in (item for each in of_ranks for item in each.items()):
            if isinstance(value, str):
                whole[name] = value
            else:
                parts.setdefault(name, []).append(value)
        joined = {name: join(of_tensor) for name, of_tensor in parts.items()}
        digests.append(whole | {name: digest for name, digest in joined.items() if digest is not None})
    return digests


class EngineChecksums:
    """`watch` the tensors of one push, then `digests`; or, where several trainer ranks hash some each, `found` on all
    of them and `put_together`. Holds no tensor but parts that came out of order, and those of the next launch on a
    GPU (rlsys.weights.hashes)."""

    def __init__(self, hf: HFConfig, *tps: int, rank: int = 0, ranks: int = 1) -> None:
        """`tps`: tensor-parallel ranks of the engines, of each size that there is, ascending. `ranks` trainer ranks
        watch the same tensors, and each hashes its share (rlsys.convert.hash_shares)."""
        self._hf, self._rank, self._of = hf, rank, ranks
        self._sums = PartDigests()
        self._shares: HashShares | None = None
        self._ranks = [(tp, rank) for tp in tps for rank in range(tp)]
        self.seconds = 0.0  # spent here
        self._parts: dict[str, tuple[_Joined, int, Rule]] = {}
        """Name in the folder -> the engine's tensor, its place there, how ranks share it."""
        self._stacks: dict[str, tuple[_Joined, Stack]] = {}
        """The same of tensors that hold all experts of a layer."""
        self._plus_one: dict[str, _Joined] = {}
        """The same of norms whose weights SGLang keeps twice: as they are, and with 1 added."""
        self._joined: dict[str, _Joined] = {}
        of_experts = slots(hf)
        for entry in entries(hf):
            if any(name in of_experts for name in entry.hf):
                continue
            joined = self._joined.setdefault(
                held_as(entry, hf), _Joined(self._sums, experts=entry.expert is not None)
            )
            for name in entry.hf:
                self._parts[name] = joined, joined.count, entry.rule
                joined.count += 1
                if hf.family.delta_net and entry.rule.megatron.endswith("layernorm.weight"):
                    held = held_as(entry, hf).removesuffix("weight") + "gemma_weight"
                    self._plus_one[name] = self._joined[held] = _Joined(self._sums, 1)
        for name, stack in stacked_names(hf).items():
            joined = self._joined[f"{hf.in_table(name).rpartition('.')[0]}.{stack.engine}"] = _Joined(
                self._sums, 1
            )
            self._stacks[name] = joined, stack

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            start = time.monotonic()
            if self._shares is None and self._of > 1:
                self._shares = hash_shares(self._hf, self._of, experts_together=not tensor.is_cuda)
            if self._shares is not None and self._shares.hasher.get(name) != self._rank:
                pass
            elif name in self._parts:
                joined, place, rule = self._parts[name]
                joined.add(place, [self._share(name, tensor, rule, tp, rank) for tp, rank in self._ranks])
                if name in self._plus_one:
                    self._plus_one[name].add(0, [tensor + 1 for _ in self._ranks])
            elif name in self._stacks:
                joined, stack = self._stacks[name]
                held = tensor.transpose(-1, -2) if tensor.dim() == 3 else tensor
                joined.add(0, [_share_of_stack(held, stack, tp, rank) for tp, rank in self._ranks])
            self.seconds += time.monotonic() - start
            yield name, tensor

    def digests(self) -> list[dict[str, str]]:
        """Of each rank, one size of engine after the other: the engine's name of a tensor -> its checksum. Only
        tensors that came whole."""
        return put_together([self.found()])

    def found(self) -> Found:
        """What this trainer rank can say. Ends the watch."""
        start = time.monotonic()
        parts = self._sums.results()
        self.seconds += time.monotonic() - start
        return [
            {
                name: of_rank
                for name, joined in self._joined.items()
                if (of_rank := joined.found(i, parts)) is not None
            }
            for i in range(len(self._ranks))
        ]

    def _share(self, name: str, tensor: Tensor, rule: Rule, tp: int, rank: int) -> Tensor:
        """What `rank` of `tp` holds of it: all, or a piece along the axis of the cut."""
        if rule.engine_dtype is not None:
            tensor = tensor.to(getattr(torch, rule.engine_dtype))
        if rule.cut is None:
            return tensor
        pieces = tp
        if rule.layout == "by_key_head":
            assert self._hf.delta is not None
            sections = tensor.split(self._hf.delta.sections)
            return torch.cat([section.tensor_split(tp)[rank] for section in sections])
        if rule.layout in ("qkv", "gated_qkv") and ".q_proj." not in name and self._hf.kv_heads < pieces:
            pieces, rank = self._hf.kv_heads, rank // (pieces // self._hf.kv_heads)  # ranks share a head
        if not rule.per_layer and (missing := -len(tensor) % _VOCABULARY_STEP):
            tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        return tensor.tensor_split(pieces, dim=rule.cut)[rank]


def _share_of_stack(held: Tensor, stack: Stack, tp: int, rank: int) -> Tensor:
    """What `rank` of `tp` holds of all experts `[experts, n out, in]`, or of their biases."""
    if stack.cut is None or tp == 1:
        return held
    sections = held.chunk(stack.sections, stack.cut)
    return torch.cat([section.tensor_split(tp, stack.cut)[rank] for section in sections], stack.cut)


class _Joined:
    """A tensor of the engine, hashed on each of its ranks. SHA-256 takes the parts in order, so one that comes early
    waits. A GPU's digest is a sum: of experts, this trainer rank may have some only.
    """

    def __init__(self, digests: PartDigests, count: int = 0, *, experts: bool = False) -> None:
        """`count`: its parts. `experts`: they are of one size."""
        self.count = count
        self.experts = experts
        self._digests = digests
        self._next = 0
        self._early: dict[int, list[Tensor]] = {}
        self._hashes: list[ByteHash] = []
        self._whole: list[str] = []
        """Of each rank, once all parts have come."""
        self._parts: list[list[int]] = []
        """Of each rank, indices of its parts among the digests."""

    def add(self, place: int, shares: list[Tensor]) -> None:
        if not shares[0].is_cuda:
            self._add_in_order(place, shares)
        elif self.experts:
            words = [share.nbytes // 4 for share in shares]
            self._add_parts([[(s, place * n, self.count * n)] for s, n in zip(shares, words, strict=True)])
        else:
            self._early[place] = shares
            if len(self._early) == self.count:
                self._add_parts([_placed(parts) for parts in zip(*self._in_order(), strict=True)])
                self._early = {}

    def found(self, index: int, parts: Sequence[TilePart]) -> str | TilePart | None:
        """`parts`: results of the digests."""
        if self._parts:
            return merge([parts[i] for i in self._parts[index]])
        return self._whole[index] if self._whole else None

    def _in_order(self) -> list[list[Tensor]]:
        return [self._early[place] for place in range(self.count)]

    def _add_parts(self, of_ranks: list[list[tuple[Tensor, int, int]]]) -> None:
        """Of each rank: parts, their first word, and words of the whole tensor."""
        self._parts = self._parts or [[] for _ in of_ranks]
        for indices, parts in zip(self._parts, of_ranks, strict=True):
            indices += [self._digests.add(*part) for part in parts]

    def _add_in_order(self, place: int, shares: list[Tensor]) -> None:
        self._early[place] = shares
        while self._next in self._early:
            shares = self._early.pop(self._next)
            if not self._hashes:
                self._hashes = [ByteHash() for _ in shares]
            for state, share in zip(self._hashes, shares, strict=True):
                state.update(share)
            self._next += 1
        if self._next == self.count:
            self._whole = [state.digest() for state in self._hashes]
            self._hashes = []


def _placed(parts: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
    """Parts of a whole tensor, the first word of each, and words of the whole. They are put together where one ends
    within a word."""
    if any(part.nbytes % 4 for part in parts[:-1]):
        parts = [torch.cat([part.reshape(-1) for part in parts])]
    total = -(-sum(part.nbytes for part in parts) // 4)
    starts = accumulate((part.nbytes // 4 for part in parts[:-1]), initial=0)
    return [(part, start, total) for part, start in zip(parts, starts, strict=True)]
