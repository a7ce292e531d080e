"""Log of collective calls, and the results of collectives in a world in which the other ranks do not exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor

from rlsys.rehearse.figures import Collective

_GROUP_FIRST = {
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "send", "recv_", "recv_any_source_", "barrier",
}  # fmt: skip
"""c10d operations whose second argument is the group; for all others it is the third, after output and input."""
_PAIR = {"send", "recv_"}
"""Operations between two ranks, whose third argument is the other rank."""
_FILLS = ("allgather", "gather", "reduce_scatter", "alltoall", "scatter", "recv")
"""Prefixes of operations that write into separate buffers."""


def tensors_of(value: object) -> list[Tensor]:
    """Return all tensors in `value` and its nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_of(item)]
    return []


def _bytes(value: object) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(value))


def buffers_filled(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the output buffers of a c10d call; empty if the operation works in place."""
    return tensors_of(args[0]) if func._opname.lstrip("_").startswith(_FILLS) else []


class Collectives:
    """Owner of the log of collective calls."""

    def __init__(self, node_of: Callable[[int], int]) -> None:
        """Initialise. `node_of`: returns the node of a rank."""
        self._node_of = node_of
        self._calls: dict[tuple[Any, ...], Collective] = {}

    @property
    def calls(self) -> list[Collective]:
        """Logged calls, those with the most bytes first."""
        return sorted(self._calls.values(), key=lambda call: -call.bytes)

    def record(self, phase: str, func: Any, args: tuple[Any, ...], times: int = 1) -> None:
        """Log a call.

        Args:
            phase: Phase of the step.
            func: c10d operation.
            args: Arguments of the operation.
            times: Number of real calls that this call represents.
        """
        name = func._opname
        group_index = 1 if name in _GROUP_FIRST else 2
        group = ProcessGroup.unbox(args[group_index])
        ranks = dist.get_process_group_ranks(group)
        if name in _PAIR:
            ranks = sorted((dist.get_rank(), ranks[args[2]]))
        across = len({self._node_of(r) for r in ranks}) > 1
        tensors = tensors_of(args)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        moved_bytes = max(_bytes(args[i]) for i in range(group_index))
        key = (phase, name, group.group_desc, tuple(ranks), dtype)
        call = self._calls.get(key) or Collective(phase, name, group.group_desc, ranks, across, dtype, 0, 0)
        self._calls[key] = replace(call, calls=call.calls + times, bytes=call.bytes + times * moved_bytes)


def answer(func: Any, args: tuple[Any, ...], from_neighbour: list[int]) -> Any:
    """Return the result of a c10d call in a world without other ranks.

    Tensors without values stay unchanged. For real tensors, a gather returns this rank's values for all ranks, a
    reduction leaves this rank's values, and a receive of a shape returns `from_neighbour`.

    Args:
        func: The operation.
        args: Arguments of the operation; its outputs are written in place.
        from_neighbour: Shape of the tensors that a neighbouring pipeline stage sends.
    """
    name = func._opname
    if name == "_allgather_base_":
        _repeat(args[0], args[1])
    elif name == "allgather_into_tensor_coalesced_":
        for out, local in zip(args[0], args[1], strict=True):
            _repeat(out, local)
    elif name == "allgather_":
        for outs, local in zip(args[0], args[1], strict=True):
            for out in outs:
                _repeat(out, local)
    elif name == "recv_":
        for tensor in args[0]:
            if _real(tensor) and tensor.numel() == len(from_neighbour):
                tensor.copy_(tensor.new_tensor(from_neighbour))
    work = FakeWork().boxed()
    returned = [work if "Work" in str(r.type) else args[0] for r in func._schema.returns]
    return returned[0] if len(returned) == 1 else tuple(returned)


def _real(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor)


def _repeat(out: Tensor, local: Tensor) -> None:
    if _real(out) and _real(local) and local.numel():
        out.view(-1).copy_(local.reshape(-1).repeat(out.numel() // local.numel()))
