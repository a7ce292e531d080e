"""Save and load of a rank's own part of DistributedOptimizer's state, in a format that any layout can load.

Symptom: The only format that any layout can load, `fully_reshardable`, gathers the whole state of a data-parallel
group on its first rank, which alone writes it. To load it, every rank allocates and reads the state of the whole
group.
Upstream: 0.16.1 - 0.19.2 (0.14 removed the format with flat ranges of parameters).
How: A rank's state of a parameter is a range of the flattened parameter. It is stored as boxes of the unflattened
parameter, at most 2 x axes - 1 of them, which need no gathering. The torch_dist format supports any boxes. Keys and
shapes are unchanged, so that earlier checkpoints can still be loaded.
Why numbers stay equal: The same elements are copied to the same positions
(tests/integration/test_trainer_layouts.py).
Delete when: Upstream saves the distributed optimizer's state without gathering it, and can load it in any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_patches.registry import Patch, PatchError, target

_NAME = "optimizer_local_shards"

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size) of a block of a tensor along each axis."""


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Divide elements `start` to `end` - 1 of a flattened tensor `[shape]` into blocks of the tensor, in order."""
    if start >= end:
        return []
    if len(shape) <= 1:
        return [((start,) * len(shape), (end - start,) * len(shape))]
    row = math.prod(shape[1:])
    first, first_offset = divmod(start, row)
    last, last_end = divmod(end, row)

    def in_row(index: int, row_start: int, row_end: int) -> list[Box]:
        return [((index, *offset), (1, *size)) for offset, size in boxes(shape[1:], row_start, row_end)]

    if first == last:
        return in_row(first, first_offset, last_end)
    blocks: list[Box] = []
    if first_offset:
        blocks += in_row(first, first_offset, row)
        first += 1
    if first < last:
        blocks.append(((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    return blocks + in_row(last, 0, last_end)


def parts(sharded: Any, key: str, state: Tensor, start: int, replica_id: Any) -> list[Any]:
    """Describe a rank's part of an optimizer state as ShardedTensors.

    Args:
        sharded: Megatron's description of the parameter: a ShardedTensor, or a factory for several of them.
        key: Prefix of the keys in the checkpoint.
        state: `[n]`, state of n consecutive elements of the flattened parameter.
        start: Index of the first of these elements.
        replica_id: Megatron's id of the copy that this rank holds.

    Raises:
        PatchError: A tensor of the factory is not a contiguous range of the parameter.
    """
    # A factory builds several tensors from one parameter, for example gate and up.
    pieces = [sharded] if hasattr(sharded, "global_shape") else list(_tensors(sharded.build()))
    storage = sharded.data.untyped_storage().data_ptr()
    state = state.detach().as_subclass(Tensor)  # torch's reader accepts no subclass
    sharded_tensors = []
    for piece in pieces:
        if not piece.data.is_contiguous() or piece.data.untyped_storage().data_ptr() != storage:
            raise PatchError(
                f"megatron_patches.{_NAME}: {piece.key} is not a contiguous range of its parameter"
            )
        piece_start = piece.data.storage_offset() - sharded.data.storage_offset()
        low = max(start, piece_start)
        high = min(start + state.numel(), piece_start + piece.data.numel())
        position = low - start
        for offset, size in boxes(tuple(piece.data.shape), low - piece_start, high - piece_start):
            elements = math.prod(size)
            values = state[position : position + elements]
            sharded_tensors.append(_sharded_block(piece, key + piece.key, values, (offset, size), replica_id))
            position += elements
    return sharded_tensors


def _sharded_block(piece: Any, key: str, values: Tensor, block: Box, replica_id: Any) -> Any:
    """Describe the state of a block of the ShardedTensor `piece`. `values`: the state, flattened."""
    offset, size = block
    # The leading axes, layer and expert, which the parameter itself lacks.
    leading = piece.prepend_axis_num
    leading_offset, piece_offset = piece.global_offset[:leading], piece.global_offset[leading:]
    shape = (*(1,) * leading, *size)
    return replace(
        piece,
        key=key,
        data=values.view(shape),
        dtype=values.dtype,
        local_shape=shape,
        global_offset=(*leading_offset, *(a + b for a, b in zip(piece_offset, offset, strict=True))),
        axis_fragmentations=None,  # the blocks form no regular grid
        prepend_axis_num=0,
        replica_id=replica_id,
    )


def _tensors(built: Any) -> Iterator[Any]:
    """Yield the ShardedTensors in the nested lists and dicts that a factory built, in order."""
    if hasattr(built, "global_shape"):
        yield built
    else:
        for inner in built.values() if isinstance(built, dict) else built:
            yield from _tensors(inner)


def _local_ranges(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (parameter, range of the flattened parameter) of this rank's parts in a DistributedOptimizer."""
    for maps in optimizer.gbuf_ranges:
        for buckets in maps.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"]


def _edit(module: ModuleType) -> None:
    cls = target(_NAME, module, "DistributedOptimizer")
    target(_NAME, cls, "sharded_param_state_fully_reshardable", "prefix = 'optimizer.state'", "replica_id")
    target(_NAME, cls, "load_parameter_state_from_fully_reshardable", "_set_main_param_and_optimizer_states")
    target(_NAME, cls, "sharded_param_state_fs_model_space", "self.distributed_optimizer_instance_id)")

    def sharded(self: Any, model_sharded_state_dict: Any, *args: Any, **kwargs: Any) -> dict[int, Any]:
        sharded_model, _ = module.extract_sharded_tensors_and_factories(model_sharded_state_dict)
        by_parameter = {
            sharded_parameter.data: sharded_parameter
            for sharded_parameter in module.nested_values(sharded_model)
        }
        state: dict[int, Any] = {}
        for index, (parameter, local_range) in enumerate(_local_ranges(self)):
            sharded_parameter = by_parameter[parameter]
            replica = (*sharded_parameter.replica_id[:2], self.distributed_optimizer_instance_id)
            state[index] = {
                name: parts(sharded_parameter, f"optimizer.state.{name}.", tensor, local_range.start, replica)
                for name, tensor in self._get_main_param_and_optimizer_states(parameter).items()
                if name != "step"  # one number, stored with the groups
            }
        return state

    @torch.no_grad()
    def load(self: Any, state_dict: dict[int, Any]) -> None:
        for index, (parameter, _) in enumerate(_local_ranges(self)):
            tensors = {
                name: torch.cat([piece.flatten() for piece in pieces])
                for name, pieces in state_dict[index].items()
            }
            self._set_main_param_and_optimizer_states(parameter, tensors)
        if isinstance(self.optimizer, module.HybridDeviceOptimizer):
            self.optimizer._sync_hdo_state_to_sub_optimizers()

    cls.sharded_param_state_fully_reshardable = sharded
    cls.load_parameter_state_from_fully_reshardable = load


PATCH = Patch(
    _NAME, "megatron.core.optimizer.distrib_optimizer", "always", "0.16.1 - 0.19.2",
    "a save gathers the optimizer's state on one rank of each data-parallel group", _edit,
)  # fmt: skip
