"""Puts parameters together on the rank that sends them, from the shards of the ranks that the plan names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.layout import to_hf
from rlsys.convert.stack import stacked
from rlsys.convert.table import Entry
from rlsys.trainer.model.weights import LocalWeights, join_shards
from rlsys.weights.shard_plan import Part


class Shards:
    """Both sides of a bucket. Every rank plays its part of every bucket, in one order: its sender `collect`s, the
    others `help`. One parameter is on its way at a time.
    """

    def __init__(self, local: LocalWeights, hf: HFConfig) -> None:
        self._local, self._hf = local, hf
        self._rank = dist.get_rank()

    def collect(self, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of a bucket that this rank sends, experts stacked where the family's
        folders have them so. A tensor may be a view of a parameter: use it before the next optimizer step."""
        return stacked(self._collected(parts), self._hf)

    def like(self, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
        """The same names, with tensors that have shape and dtype but no memory. Nobody helps."""
        return stacked(self._like(parts), self._hf)

    def help(self, parts: Sequence[Part], sender: int) -> None:
        """Give the sender what it lacks; returns when it has it all."""
        for part in parts:
            if self._rank in part.sources:
                dist.send(self._local.merged(self._name(part.entry)).contiguous(), sender)

    def _collected(self, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
        for part in parts:
            shards, coming = [], []
            for source in part.sources:
                # Shards have one shape everywhere, experts' too, so this rank's own is the mould for another's.
                name = self._name(part.entry)
                if source == self._rank:
                    shard = self._local.merged(name)
                else:
                    shard = torch.empty_like(self._local[name], memory_format=torch.contiguous_format)
                    coming.append(dist.irecv(shard, source))
                shards.append(shard)
            for work in coming:
                assert work is not None
                work.wait()
            tensors = to_hf(part.entry.rule, join_shards(shards, part.entry.rule), self._hf)
            yield from zip(part.entry.hf, tensors, strict=True)

    def _like(self, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
        for part in parts:
            dtype = self._local[self._name(part.entry)].dtype
            for name, shape in part.entry.hf.items():
                yield name, torch.empty(shape, dtype=dtype, device="meta")

    def _name(self, entry: Entry) -> str:
        """Of this rank's shard; of another's expert, its own of the same number. Raises RuntimeError where Megatron
        has put it elsewhere than the plan says."""
        for name in self._local.candidates(entry):
            if name in self._local:
                return name
        raise RuntimeError(f"rank {self._rank} was to have a part of {next(iter(entry.hf))}")
