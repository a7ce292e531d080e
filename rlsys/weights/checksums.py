"""Expected values of an engine's checksums (SGLang's /weights_checker), computed from the tensors of a push.

An engine fuses tensors that a model folder stores separately: query, key and value; gate and up; all experts of a
layer. Each tensor-parallel rank has a part of the fused tensor. SGLang hashes the tensors of each rank: with SHA-256
on a CPU, with a special kernel on a GPU. Some kernels need their weights in another order; the comparison detects
these weights (router/attest.py).
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
from rlsys.convert.table import engine_name_of, entries, slots, stacked_names
from rlsys.weights.hashes import ByteHash, PartDigests, TilePart, final_hash, merge_parts

_VOCABULARY_STEP = 64
"""SGLang zero-pads the vocabulary to a multiple of this."""


PartialChecksums = list[dict[str, "str | TilePart"]]
"""For each engine rank, one engine size after the other: the engine's tensor name -> the checksum, or the hash of the
parts that one trainer rank has."""


def base_layer_name(name: str) -> str:
    """Return the tensor's name on an engine that serves adapters: SGLang wraps the experts in a base layer."""
    return re.sub(r"\.experts\.(?=w\d+_weight)", ".experts.base_layer.", name)


def merge_checksums(partials: Sequence[PartialChecksums]) -> list[dict[str, str]]:
    """Merge the partial checksums of all trainer ranks into the checksums that engines must report.

    Args:
        partials: one item per trainer rank.

    Returns:
        For each engine rank, one engine size after the other: tensor name -> checksum. Tensors without all their
            parts are omitted.
    """
    digests = []
    for rank_partials in zip(*partials, strict=True):  # partial checksums of one engine rank
        complete: dict[str, str] = {}
        parts: dict[str, list[TilePart]] = {}
        for name, value in (item for partial in rank_partials for item in partial.items()):
            if isinstance(value, str):
                complete[name] = value
            else:
                parts.setdefault(name, []).append(value)
        merged = {name: final_hash(tensor_parts) for name, tensor_parts in parts.items()}
        digests.append(complete | {name: digest for name, digest in merged.items() if digest is not None})
    return digests


class EngineChecksums:
    """Computes the checksums of one push: `watch` the tensors, then call `digests`.

    If several trainer ranks hash a share each, call `partial_digests` on all of them and `merge_checksums`. Memory
    holds only the parts that arrived out of order, and on a GPU the parts of the next kernel launch
    (rlsys.weights.hashes).
    """

    def __init__(self, hf: HFConfig, *tps: int, rank: int = 0, ranks: int = 1) -> None:
        """Prepare the checksums of all tensors.

        Args:
            hf: the model.
            tps: the distinct tensor-parallel sizes of the engines, ascending.
            rank: this trainer rank.
            ranks: number of trainer ranks that watch the same tensors; each hashes a share
                (rlsys.convert.hash_shares).
        """
        self._hf, self._rank, self._trainer_ranks = hf, rank, ranks
        self._sums = PartDigests()
        self._shares: HashShares | None = None
        self._ranks = [(tp, rank) for tp in tps for rank in range(tp)]
        self.seconds = 0.0  # spent hashing
        self._parts: dict[str, tuple[_EngineTensor, int, Rule]] = {}
        """Name in the model folder -> the engine's tensor, the part's index in it, and the rule of its shards."""
        self._stacks: dict[str, tuple[_EngineTensor, Stack]] = {}
        """Name of a tensor with all experts of a layer -> the engine's tensor, and the rule of its shards."""
        self._plus_one: dict[str, _EngineTensor] = {}
        """Name of a norm whose weight SGLang stores twice -> the engine's second tensor: the weight plus 1."""
        self._engine_tensors: dict[str, _EngineTensor] = {}
        expert_names = slots(hf)
        for entry in entries(hf):
            if any(name in expert_names for name in entry.hf):
                continue
            tensor = self._engine_tensors.setdefault(
                engine_name_of(entry, hf), _EngineTensor(self._sums, experts=entry.expert is not None)
            )
            for name in entry.hf:
                self._parts[name] = tensor, tensor.count, entry.rule
                tensor.count += 1
                if hf.family.delta_net and entry.rule.megatron.endswith("layernorm.weight"):
                    engine_name = engine_name_of(entry, hf).removesuffix("weight") + "gemma_weight"
                    self._plus_one[name] = self._engine_tensors[engine_name] = _EngineTensor(self._sums, 1)
        for name, stack in stacked_names(hf).items():
            tensor = self._engine_tensors[f"{hf.in_table(name).rpartition('.')[0]}.{stack.engine}"] = (
                _EngineTensor(self._sums, 1)
            )
            self._stacks[name] = tensor, stack

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors unchanged, and hash this trainer rank's share of them.

        Args:
            tensors: names in the model folder, and tensors.
        """
        for name, tensor in tensors:
            start = time.monotonic()
            if self._shares is None and self._trainer_ranks > 1:
                self._shares = hash_shares(self._hf, self._trainer_ranks, experts_together=not tensor.is_cuda)
            if self._shares is None or self._shares.hasher.get(name) == self._rank:
                self._hash(name, tensor)
            self.seconds += time.monotonic() - start
            yield name, tensor

    def _hash(self, name: str, tensor: Tensor) -> None:
        """Hash the shard of each engine rank. A tensor that engines do not report is ignored."""
        if name in self._parts:
            engine_tensor, index, rule = self._parts[name]
            engine_tensor.add(index, [self._shard(name, tensor, rule, tp, rank) for tp, rank in self._ranks])
            if name in self._plus_one:
                self._plus_one[name].add(0, [tensor + 1 for _ in self._ranks])
        elif name in self._stacks:
            engine_tensor, stack = self._stacks[name]
            weights = tensor.transpose(-1, -2) if tensor.dim() == 3 else tensor
            engine_tensor.add(0, [_stack_shard(weights, stack, tp, rank) for tp, rank in self._ranks])

    def digests(self) -> list[dict[str, str]]:
        """Return the checksums: for each engine rank, one engine size after the other, tensor name -> checksum.

        Tensors without all their parts are omitted.
        """
        return merge_checksums([self.partial_digests()])

    def partial_digests(self) -> PartialChecksums:
        """Return this trainer rank's part of the checksums. Call this once, after the last tensor."""
        start = time.monotonic()
        parts = self._sums.results()
        self.seconds += time.monotonic() - start
        return [
            {
                name: digest
                for name, tensor in self._engine_tensors.items()
                if (digest := tensor.digest(i, parts)) is not None
            }
            for i in range(len(self._ranks))
        ]

    def _shard(self, name: str, tensor: Tensor, rule: Rule, tp: int, rank: int) -> Tensor:
        """Return what rank `rank` of an engine with `tp` ranks stores of a tensor: all of it, or a shard."""
        if rule.engine_dtype is not None:
            tensor = tensor.to(getattr(torch, rule.engine_dtype))
        if rule.shard_axis is None:
            return tensor
        if rule.layout == "by_key_head":
            assert self._hf.delta is not None
            sections = tensor.split(self._hf.delta.sections)
            return torch.cat([section.tensor_split(tp)[rank] for section in sections])
        shards, index = tp, rank
        if rule.layout in ("qkv", "gated_qkv") and ".q_proj." not in name and self._hf.kv_heads < tp:
            # Several ranks store the same key and value head.
            shards = self._hf.kv_heads
            index = rank // (tp // shards)
        if not rule.per_layer and (missing := -len(tensor) % _VOCABULARY_STEP):
            tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        return tensor.tensor_split(shards, dim=rule.shard_axis)[index]


def _stack_shard(weights: Tensor, stack: Stack, tp: int, rank: int) -> Tensor:
    """Return what rank `rank` of an engine with `tp` ranks stores of all experts of a layer.

    Args:
        weights: `[experts, stack.sections * out, in]`, or biases `[experts, stack.sections * out]`.
        stack: rule of the shards.
        tp: tensor-parallel size of the engine.
        rank: rank in the engine.
    """
    if stack.shard_axis is None or tp == 1:
        return weights
    sections = weights.chunk(stack.sections, stack.shard_axis)
    return torch.cat(
        [section.tensor_split(tp, stack.shard_axis)[rank] for section in sections], stack.shard_axis
    )


class _EngineTensor:
    """Hash of a tensor of an engine, for each engine rank.

    SHA-256 needs the parts in order, so a part that arrives early is stored until its turn. The GPU hash is a sum
    over parts, so a trainer rank may hash only some of the experts.
    """

    def __init__(self, digests: PartDigests, count: int = 0, *, experts: bool = False) -> None:
        """Start the hash.

        Args:
            digests: hashes the parts that are on a GPU.
            count: number of parts.
            experts: whether the parts are experts, which have equal sizes.
        """
        self.count = count
        self.experts = experts
        self._digests = digests
        self._next_index = 0
        self._early: dict[int, list[Tensor]] = {}
        self._hashes: list[ByteHash] = []
        self._complete: list[str] = []
        """Checksum of each engine rank; empty until all parts have arrived, and on a GPU."""
        self._parts: list[list[int]] = []
        """For each engine rank, the indices of its parts in the results of the digests; empty on a CPU."""

    def add(self, index: int, shares: list[Tensor]) -> None:
        """Hash part `index` of the tensor. `shares`: for each engine rank, its shard of the part."""
        if not shares[0].is_cuda:
            self._add_in_order(index, shares)
        elif self.experts:
            word_counts = [share.nbytes // 4 for share in shares]
            self._add_parts(
                [[(s, index * n, self.count * n)] for s, n in zip(shares, word_counts, strict=True)]
            )
        else:
            self._early[index] = shares
            if len(self._early) == self.count:
                in_order = [self._early[index] for index in range(self.count)]
                self._add_parts([_with_offsets(parts) for parts in zip(*in_order, strict=True)])
                self._early = {}

    def digest(self, index: int, parts: Sequence[TilePart]) -> str | TilePart | None:
        """Return the checksum of engine rank `index`, or on a GPU the hash of this trainer rank's parts.

        Args:
            index: index of the engine rank.
            parts: results of the digests.

        Returns:
            None if parts are missing for SHA-256, or this trainer rank has no part.
        """
        if self._parts:
            return merge_parts([parts[i] for i in self._parts[index]])
        return self._complete[index] if self._complete else None

    def _add_parts(self, rank_parts: list[list[tuple[Tensor, int, int]]]) -> None:
        """Hash parts on a GPU.

        Args:
            rank_parts: for each engine rank, its parts: words, index of the first word in the rank's tensor, and
                number of words of the rank's tensor.
        """
        self._parts = self._parts or [[] for _ in rank_parts]
        for indices, parts in zip(self._parts, rank_parts, strict=True):
            indices += [self._digests.add(*part) for part in parts]

    def _add_in_order(self, index: int, shares: list[Tensor]) -> None:
        """Hash part `index` with SHA-256, once all parts before it have arrived."""
        self._early[index] = shares
        while self._next_index in self._early:
            shares = self._early.pop(self._next_index)
            if not self._hashes:
                self._hashes = [ByteHash() for _ in shares]
            for state, share in zip(self._hashes, shares, strict=True):
                state.update(share)
            self._next_index += 1
        if self._next_index == self.count:
            self._complete = [state.digest() for state in self._hashes]
            self._hashes = []


def _with_offsets(parts: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
    """Return (part, index of its first word, number of words of the tensor) for consecutive parts of a tensor.

    All parts are concatenated into one if a part other than the last ends within a word.
    """
    if any(part.nbytes % 4 for part in parts[:-1]):
        parts = [torch.cat([part.reshape(-1) for part in parts])]
    total = -(-sum(part.nbytes for part in parts) // 4)
    starts = accumulate((part.nbytes // 4 for part in parts[:-1]), initial=0)
    return [(part, start, total) for part, start in zip(parts, starts, strict=True)]
