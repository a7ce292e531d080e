"""Gathering of parameters on the sending rank, from the shards of the ranks that the plan names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.layout import to_hf
from rlsys.convert.stack import stack_experts
from rlsys.convert.table import Entry
from rlsys.trainer.model.weights import LocalWeights, join_shards
from rlsys.weights.shard_plan import Part


class Shards:
    """Gathers the parameters of a bucket from their shards.

    Every rank takes part in every bucket, in the same order: the bucket's sender calls `collect`, all other ranks
    call `send_shards`. One parameter is gathered at a time.
    """

    def __init__(self, local: LocalWeights, hf: HFConfig) -> None:
        self._local, self._hf = local, hf
        self._rank = dist.get_rank()

    def collect(self, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) of a bucket that this rank sends.

        Experts are stacked if the model's folder stacks them. A tensor may be a view of a parameter, so it is valid
        until the next optimizer step.
        """
        return stack_experts(self._collect(parts), self._hf)

    def meta_tensors(self, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same names, shapes and dtypes as `collect`, with meta tensors. Not collective."""
        return stack_experts(self._meta_tensors(parts), self._hf)

    def send_shards(self, parts: Sequence[Part], sender: int) -> None:
        """Send this rank's shards of the parameters to rank `sender`; return when they have been received."""
        for part in parts:
            if self._rank in part.sources:
                dist.send(self._local.merged(self._name(part.entry)).contiguous(), sender)

    def _collect(self, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
        for part in parts:
            shards, transfers = [], []
            for source in part.sources:
                # Shards have the same shape on all ranks, also those of experts.
                name = self._name(part.entry)
                if source == self._rank:
                    shard = self._local.merged(name)
                else:
                    shard = torch.empty_like(self._local[name], memory_format=torch.contiguous_format)
                    transfers.append(dist.irecv(shard, source))
                shards.append(shard)
            for work in transfers:
                assert work is not None
                work.wait()
            tensors = to_hf(part.entry.rule, join_shards(shards, part.entry.rule), self._hf)
            yield from zip(part.entry.hf, tensors, strict=True)

    def _meta_tensors(self, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
        for part in parts:
            dtype = self._local[self._name(part.entry)].dtype
            for name, shape in part.entry.hf.items():
                yield name, torch.empty(shape, dtype=dtype, device="meta")

    def _name(self, entry: Entry) -> str:
        """Return Megatron's name of the parameter on this rank.

        For an expert of another rank, this is the local expert with the same index, whose shard has the same shape.

        Raises:
            RuntimeError: this rank has no such parameter, because Megatron's layout differs from the plan.
        """
        for name in self._local.candidates(entry):
            if name in self._local:
                return name
        raise RuntimeError(
            f"rank {self._rank} has no shard of {next(iter(entry.hf))}, which the push plan expects on it"
        )
