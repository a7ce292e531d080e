"""What an engine's own checksums (SGLang's /weights_checker) must be after a push, from the tensors that pass by.

An engine keeps as one tensor what a folder keeps apart: query, key and value; gate and up; all experts of a layer.
Its tensor-parallel ranks each hold a part. SGLang hashes what each rank holds: SHA-256 on a CPU, a kernel of its own
on a GPU. Some kernels want their weights in yet another order; which those are shows in the comparison
(router/attest.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.rules import Rule, Stack
from rlsys.convert.table import Entry, entries, slots, stacked_names
from rlsys.weights.hashes import TensorHash, hash_like_an_engine

_VOCABULARY_STEP = 64
"""SGLang pads the vocabulary to a multiple of this, with zeros."""


class EngineChecksums:
    """`watch` the tensors of one push, then `digests`. Holds no tensor but parts that came out of order."""

    def __init__(self, hf: HFConfig, tp: int) -> None:
        """`tp`: tensor-parallel ranks of the engines."""
        self._hf, self._tp = hf, tp
        self.seconds = 0.0  # spent here
        self._parts: dict[str, tuple[_Joined, int, Rule]] = {}
        """Name in the folder -> the engine's tensor, its place there, how ranks share it."""
        self._stacks: dict[str, tuple[_Joined, Stack]] = {}
        """The same of tensors that hold all experts of a layer."""
        self._joined: dict[str, _Joined] = {}
        compressed = hf.latent is not None and hf.latent.q_rank is not None
        of_experts = slots(hf)
        for entry in entries(hf):
            if any(name in of_experts for name in entry.hf):
                continue
            joined = self._joined.setdefault(held_as(entry, compressed), _Joined())
            for name in entry.hf:
                self._parts[name] = joined, joined.count, entry.rule
                joined.count += 1
        for name, stack in stacked_names(hf).items():
            joined = self._joined[f"{name.rpartition('.')[0]}.{stack.engine}"] = _Joined(1)
            self._stacks[name] = joined, stack

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            start = time.monotonic()
            if name in self._parts:
                joined, place, rule = self._parts[name]
                joined.add(place, [self._share(name, tensor, rule, rank) for rank in range(self._tp)])
            elif name in self._stacks:
                joined, stack = self._stacks[name]
                held = tensor.transpose(-1, -2) if tensor.dim() == 3 else tensor
                axis, pieces = stack.cut or 0, 1 if stack.cut is None else self._tp
                joined.add(0, [held.tensor_split(pieces, axis)[rank % pieces] for rank in range(self._tp)])
            self.seconds += time.monotonic() - start
            yield name, tensor

    def digests(self) -> list[dict[str, str]]:
        """Of each rank: the engine's name of a tensor -> its checksum. Only tensors that came whole."""
        whole = {
            name: found for name, joined in self._joined.items() if (found := joined.digests) is not None
        }
        return [{name: ranks[rank] for name, ranks in whole.items()} for rank in range(self._tp)]

    def _share(self, name: str, tensor: Tensor, rule: Rule, rank: int) -> Tensor:
        """What `rank` holds of it: all, or a piece along the axis of the cut."""
        if rule.engine_dtype is not None:
            tensor = tensor.to(getattr(torch, rule.engine_dtype))
        if rule.cut is None:
            return tensor
        pieces = self._tp
        if rule.layout == "qkv" and ".q_proj." not in name and self._hf.kv_heads < pieces:
            pieces, rank = self._hf.kv_heads, rank // (pieces // self._hf.kv_heads)  # ranks share a head
        if not rule.per_layer and (missing := -len(tensor) % _VOCABULARY_STEP):
            tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        return tensor.tensor_split(pieces, dim=rule.cut)[rank]


def held_as(entry: Entry, queries_compressed: bool) -> str:
    """The engine's name of the tensor that holds this parameter. `queries_compressed`: latent attention's, too."""
    if entry.rule.engine_name:
        return entry.rule.engine_name.format(l=entry.layer)
    first = next(iter(entry.hf))
    if entry.expert is not None:
        which = "w13" if entry.rule.layout == "gate_up" else "w2"
        return f"{first[: first.index('.experts.')]}.experts.{which}_weight"
    if ".q_a_proj." in first or (queries_compressed and ".kv_a_proj_with_mqa." in first):
        return re.sub(r"\.(q_a_proj|kv_a_proj_with_mqa)\.", ".fused_qkv_a_proj_with_mqa.", first)
    if entry.rule.layout == "qkv":
        return first.replace(".q_proj.", ".qkv_proj.")
    return first.replace(".gate_proj.", ".gate_up_proj.") if entry.rule.layout == "gate_up" else first


class _Joined:
    """A tensor of the engine: hashed on each rank part by part, in order. A part that comes early waits."""

    def __init__(self, count: int = 0) -> None:
        """`count`: its parts."""
        self.count = count
        self._hashed = 0
        self._early: dict[int, list[Tensor]] = {}
        self._hashes: list[TensorHash] = []
        self.digests: list[str] | None = None
        """Of each rank, once all parts have come."""

    def add(self, place: int, shares: list[Tensor]) -> None:
        self._early[place] = shares
        while self._hashed in self._early:
            shares = self._early.pop(self._hashed)
            if not self._hashes:
                self._hashes = [hash_like_an_engine(share) for share in shares]
            for state, share in zip(self._hashes, shares, strict=True):
                state.update(share)
            self._hashed += 1
        if self._hashed == self.count:
            self.digests = [state.digest() for state in self._hashes]
            self._hashes = []
