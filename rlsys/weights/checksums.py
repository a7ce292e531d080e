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

import torch
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.rules import Rule, Stack
from rlsys.convert.table import entries, held_as, slots, stacked_names
from rlsys.weights.hashes import TensorHash, TileHash, TilePart, hash_like_an_engine, join

_VOCABULARY_STEP = 64
"""SGLang pads the vocabulary to a multiple of this, with zeros."""


Found = list[dict[str, "str | list[TilePart]"]]
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
                parts.setdefault(name, []).extend(value)
        joined = {name: join(of_tensor) for name, of_tensor in parts.items()}
        digests.append(whole | {name: digest for name, digest in joined.items() if digest is not None})
    return digests


class EngineChecksums:
    """`watch` the tensors of one push, then `digests`; or, where several trainer ranks send some each, `found` on all
    of them and `put_together`. Holds no tensor but parts that came out of order."""

    def __init__(self, hf: HFConfig, *tps: int) -> None:
        """`tps`: tensor-parallel ranks of the engines, of each size that there is, ascending."""
        self._hf = hf
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
            joined = self._joined.setdefault(held_as(entry, hf), _Joined(experts=entry.expert is not None))
            for name in entry.hf:
                self._parts[name] = joined, joined.count, entry.rule
                joined.count += 1
                if hf.family.delta_net and entry.rule.megatron.endswith("layernorm.weight"):
                    held = held_as(entry, hf).removesuffix("weight") + "gemma_weight"
                    self._plus_one[name] = self._joined[held] = _Joined(1)
        for name, stack in stacked_names(hf).items():
            joined = self._joined[f"{hf.in_table(name).rpartition('.')[0]}.{stack.engine}"] = _Joined(1)
            self._stacks[name] = joined, stack

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            start = time.monotonic()
            if name in self._parts:
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
        return [
            {
                name: of_rank
                for name, joined in self._joined.items()
                if (of_rank := joined.found(i)) is not None
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
    """A tensor of the engine: hashed on each rank part by part, in order. A part that comes early waits, unless the
    hash can be put together from parts; then this may also be what one trainer rank has of the tensor.
    """

    def __init__(self, count: int = 0, *, experts: bool = False) -> None:
        """`count`: its parts. `experts`: they are of one size."""
        self.count = count
        self.experts = experts
        self._next = 0
        self._early: dict[int, list[Tensor]] = {}
        self._hashes: list[TensorHash] = []
        self._digests: list[str] = []
        """Of each rank, once all parts have come."""
        self._runs: list[list[TileHash]] = []
        """Of each run of neighbouring parts, of each rank, where experts may be spread over trainer ranks."""
        self._total: list[int] = []
        """Words of the whole tensor, of each rank."""

    def add(self, place: int, shares: list[Tensor]) -> None:
        if self.experts and shares[0].is_cuda:
            self._add_to_run(place, shares)
            return
        self._early[place] = shares
        while self._next in self._early:
            shares = self._early.pop(self._next)
            if not self._hashes:
                self._hashes = [hash_like_an_engine(share) for share in shares]
            for state, share in zip(self._hashes, shares, strict=True):
                state.update(share)
            self._next += 1
        if self._next == self.count:
            self._digests = [state.digest() for state in self._hashes]
            self._hashes = []

    def _add_to_run(self, place: int, shares: list[Tensor]) -> None:
        words = [share.nbytes // 4 for share in shares]
        if not self._runs or place != self._next:
            self._runs.append([TileHash(place * n) for n in words])
        for state, share in zip(self._runs[-1], shares, strict=True):
            state.update(share)
        self._total = [self.count * n for n in words]
        self._next = place + 1

    def found(self, index: int) -> str | list[TilePart] | None:
        if self._runs:
            return [run[index].part(self._total[index]) for run in self._runs]
        return self._digests[index] if self._digests else None
