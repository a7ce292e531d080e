"""Log of collectives: group, node-local or not, calls, bytes; and the results of a fake group."""

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
_FILLS = ("allgather", "gather", "reduce_scatter", "alltoall", "scatter", "recv")
"""Prefixes of operations that fill buffers allocated for them."""


def tensors_of(value: object) -> list[Tensor]:
    """Collect the tensors in `value` and in nested lists, tuples and dicts."""
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
    """Return the buffers that were allocated for this call and that it fills; none if it works in place."""
    return tensors_of(args[0]) if func._opname.lstrip("_").startswith(_FILLS) else []


class Collectives:
    """Owner of the log. `node_of(rank)`: the node of a rank."""

    def __init__(self, node_of: Callable[[int], int]) -> None:
        self._node_of = node_of
        self._calls: dict[tuple[Any, ...], Collective] = {}

    @property
    def calls(self) -> list[Collective]:
        return sorted(self._calls.values(), key=lambda call: -call.bytes)

    def record(self, phase: str, func: Any, args: tuple[Any, ...], times: int = 1) -> None:
        name = func._opname
        at = 1 if name in _GROUP_FIRST else 2
        group = ProcessGroup.unbox(args[at])
        ranks = dist.get_process_group_ranks(group)
        if name in _PAIR:
            ranks = sorted((dist.get_rank(), ranks[args[2]]))
        across = len({self._node_of(r) for r in ranks}) > 1
        tensors = tensors_of(args)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        moved_bytes = max(_bytes(args[i]) for i in range(at))
        key = (phase, name, group.group_desc, tuple(ranks), dtype)
        call = self._calls.get(key) or Collective(phase, name, group.group_desc, ranks, across, dtype, 0, 0)
        self._calls[key] = replace(call, calls=call.calls + times, bytes=call.bytes + times * moved_bytes)


def answer(func: Any, args: tuple[Any, ...], from_neighbour: list[int]) -> Any:
    """Return the result of a call in a world without other ranks.

    For real (integer) tensors, a gather returns this rank's values for all ranks, a sum is this rank's own, and a
    neighbouring pipeline stage sends the shape `from_neighbour`.
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
