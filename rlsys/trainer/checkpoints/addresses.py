"""Location of each parameter of the whole model in a Megatron checkpoint, computed by Megatron itself.

The model is built on the meta device, so that a model larger than the memory can be addressed.
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
    """Location of a parameter in a stored tensor, which can contain the parameter of every layer and expert.

    Attributes:
        key: Name of the stored tensor.
        shape: Shape of the stored tensor.
        index: Index of the parameter along the leading axes of the stored tensor (layer, expert).
    """

    key: str
    shape: tuple[int, ...]
    index: tuple[int, ...]

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Shape of the parameter, without the leading axes."""
        return self.shape[len(self.index) :]

    def box(self, start: tuple[int, ...] = (), size: tuple[int, ...] = ()) -> Box:
        """Return the region of the stored tensor that contains a part of the parameter.

        Args:
            start: First element of the part; empty: zeros.
            size: Size of the part; empty: the whole parameter.
        """
        shape = self.parameter_shape
        return Box((*self.index, *(start or (0,) * len(shape))), (*(1,) * len(self.index), *(size or shape)))


def addresses(config: Config, hf: HFConfig) -> Iterator[tuple[Entry, Address]]:
    """Yield the address of each parameter of the model, in the order of the name table.

    Call it while Megatron's process groups of a single rank exist.
    """
    # Megatron's own layers, even if Transformer Engine is installed, whose layers cannot be built without memory.
    # Both write the same checkpoints.
    overrides: dict[str, Any] = {"use_cpu_initialization": True, "moe_grouped_gemm": False}
    transformer = replace(transformer_config(config, hf), **overrides)
    with torch.device("meta"):
        model = Chunks([chunk(transformer, hf, None, transformer_engine=False)])
    shards = model.shards("")
    for entry in entries(hf):
        yield entry, _address(shards[entry.megatron.format(e=entry.expert)])


def _address(shard: ShardedTensor | ShardedTensorFactory) -> Address:
    if isinstance(shard, ShardedTensorFactory):  # gate and up, the two halves of one tensor
        shard = next(nested_values(shard.build()))
    return Address(shard.key, tuple(shard.global_shape), tuple(shard.global_offset[: shard.prepend_axis_num]))
