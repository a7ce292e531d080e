"""Where megatron puts each parameter of a whole model in a checkpoint: asked of megatron, not assumed.

The model is built on the meta device, so that even one larger than memory costs none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.table import Entry, entries
from rlsys.convert.torch_dist import Box
from rlsys.trainer.model.chunks import Chunks
from rlsys.trainer.model.model import chunk, transformer_config


@dataclass(frozen=True)
class Address:
    """Tensor `key` `[shape]` holds the parameter at `index`, its place along the leading axes (layer, expert)."""

    key: str
    shape: tuple[int, ...]
    index: tuple[int, ...]

    @property
    def parameter(self) -> tuple[int, ...]:
        """The parameter's own shape."""
        return self.shape[len(self.index) :]

    def box(self, start: tuple[int, ...] = (), size: tuple[int, ...] = ()) -> Box:
        """Of a part of the parameter; of all of it when none is given."""
        own = self.parameter
        return Box((*self.index, *(start or (0,) * len(own))), (*(1,) * len(self.index), *(size or own)))


def addresses(config: Config, hf: HFConfig) -> Iterator[tuple[Entry, Address]]:
    """Of every parameter of the model, in the name table's order. One rank's process groups must be there."""
    # Megatron's own layers also where Transformer Engine is installed: those cannot be built without memory. Both
    # write the same checkpoints.
    own: dict[str, Any] = {"use_cpu_initialization": True, "moe_grouped_gemm": False}
    transformer = replace(transformer_config(config, hf), **own)
    with torch.device("meta"):
        model = Chunks([chunk(transformer, hf, None, transformer_engine=False)])
    shards = model.shards("")
    for entry in entries(hf):
        yield entry, _address(shards[entry.megatron.format(e=entry.expert)])


def _address(shard: ShardedTensor | ShardedTensorFactory) -> Address:
    if isinstance(shard, ShardedTensorFactory):  # gate and up, the two halves of one tensor
        shard = next(nested_values(shard.build()))
    return Address(shard.key, tuple(shard.global_shape), tuple(shard.global_offset[: shard.prepend_axis_num]))
