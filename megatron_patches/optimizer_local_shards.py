"""DistributedOptimizer saves and loads only the local part of a rank's state, in a format that any layout can load.

Symptom: the only format that any layout can load, `fully_reshardable`, gathers the whole state of a
data-parallel group on its first rank, which alone writes it; to load, every rank allocates and reads the
state of the whole group. Upstream: 0.16.1 - 0.19.2 (0.14 removed the format with flat ranges of parameters).
How: a rank's state of a parameter is a range of the flattened parameter. As boxes of the unflattened one (at
most 2 x axes - 1 of them) it needs no gathering, and the torch_dist format supports any boxes. Keys and
shapes are unchanged, so earlier checkpoints still load. Why numbers stay equal: the same elements are copied
to the same positions (tests/integration/test_trainer_layouts.py). Delete when: upstream saves the distributed
optimizer's state without gathering it and loads it in any layout.
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
"""Offset and size of a block of a tensor along each axis."""


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Return blocks with the elements `start` to `end` of the flattened tensor, in order."""
    if start >= end:
        return []
    if len(shape) <= 1:
        return [((start,) * len(shape), (end - start,) * len(shape))]
    row = math.prod(shape[1:])
    first, first_offset = divmod(start, row)
    last, last_end = divmod(end, row)
    if first == last:
        return [((first, *at), (1, *size)) for at, size in boxes(shape[1:], first_offset, last_end)]
    blocks: list[Box] = []
    if first_offset:
        blocks += [((first, *at), (1, *size)) for at, size in boxes(shape[1:], first_offset, row)]
        first += 1
    if first < last:
        blocks.append(((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    return blocks + [((last, *at), (1, *size)) for at, size in boxes(shape[1:], 0, last_end)]


def parts(sharded: Any, key: str, state: Tensor, start: int, replica_id: Any) -> list[Any]:
    """Return ShardedTensors of `state` `[n]`: elements of the parameter of `sharded`, from `start` on."""
    pieces = [sharded]
    if not hasattr(
        sharded, "global_shape"
    ):  # a factory: for example gate and up, two tensors in one parameter
        pieces = list(_tensors(sharded.build()))
    sharded_tensors, storage = [], sharded.data.untyped_storage().data_ptr()
    state = state.detach().as_subclass(Tensor)  # a load accepts no subclass
    for piece in pieces:
        begin = piece.data.storage_offset() - sharded.data.storage_offset()
        if not piece.data.is_contiguous() or piece.data.untyped_storage().data_ptr() != storage:
            raise PatchError(
                f"megatron_patches.{_NAME}: {piece.key} is not a contiguous range of its parameter"
            )
        low, high = max(start, begin), min(start + state.numel(), begin + piece.data.numel())
        position = low
        for at, size in boxes(tuple(piece.data.shape), low - begin, high - begin):
            n = math.prod(size)
            ahead = piece.prepend_axis_num  # layer and expert, for which the parameter itself has no axis
            offset, inner = piece.global_offset[:ahead], piece.global_offset[ahead:]
            shape = (*(1,) * ahead, *size)
            sharded_tensors.append(
                replace(
                    piece,
                    key=key + piece.key,
                    data=state[position - start : position - start + n].view(shape),
                    dtype=state.dtype,
                    local_shape=shape,
                    global_offset=(*offset, *(a + b for a, b in zip(inner, at, strict=True))),
                    axis_fragmentations=None,  # no regular grid
                    prepend_axis_num=0,
                    replica_id=replica_id,
                )
            )
            position += n
    return sharded_tensors


def _tensors(built: Any) -> Iterator[Any]:
    """Yield the tensors in a factory's nested lists and dicts, in order."""
    if hasattr(built, "global_shape"):
        yield built
    else:
        for inner in built.values() if isinstance(built, dict) else built:
            yield from _tensors(inner)


def _edit(module: ModuleType) -> None:
    cls = target(_NAME, module, "DistributedOptimizer")
    target(_NAME, cls, "sharded_param_state_fully_reshardable", "prefix = 'optimizer.state'", "replica_id")
    target(_NAME, cls, "load_parameter_state_from_fully_reshardable", "_set_main_param_and_optimizer_states")
    target(_NAME, cls, "sharded_param_state_fs_model_space", "self.distributed_optimizer_instance_id)")

    def local_ranges(self: Any) -> Iterator[tuple[Any, Any]]:
        """Yield each parameter of which this rank has a part, and the part's range."""
        for maps in self.gbuf_ranges:
            for buckets in maps.values():
                for bucket in buckets:
                    for parameter, ranges in bucket["param_map"].items():
                        yield parameter, ranges["param"]

    def sharded(self: Any, model_sharded_state_dict: Any, *args: Any, **kwargs: Any) -> dict[int, Any]:
        sharded_model, _ = module.extract_sharded_tensors_and_factories(model_sharded_state_dict)
        by_parameter = {
            sharded_parameter.data: sharded_parameter
            for sharded_parameter in module.nested_values(sharded_model)
        }
        state: dict[int, Any] = {}
        for index, (parameter, local_range) in enumerate(local_ranges(self)):
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
        for index, (parameter, _) in enumerate(local_ranges(self)):
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
