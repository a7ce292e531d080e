"""Every collective: its group, inside a node or across, how often, how many bytes; and what a fake group answers."""

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
"""c10d operations whose second argument is the group; of all others it is the third, after output and input."""
_PAIR = {"send", "recv_"}
_FILLS = ("allgather", "gather", "reduce_scatter", "alltoall", "scatter", "recv")
"""What the names of operations begin with that fill buffers made for them."""


def tensors_of(value: object) -> list[Tensor]:
    """In `value` and in the lists, tuples and dicts that it is made of."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for each in value for t in tensors_of(each)]
    return []


def _bytes(value: object) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(value))


def filled(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """The buffers that this call fills and that were made for it; none where it works in place."""
    return tensors_of(args[0]) if func._opname.lstrip("_").startswith(_FILLS) else []


class Collectives:
    """Owns the log. `node_of(rank)`: the node that a rank is on."""

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
        found = tensors_of(args)
        dtype = str(found[0].dtype).removeprefix("torch.") if found else ""
        moved = max(_bytes(args[i]) for i in range(at))
        key = (phase, name, group.group_desc, tuple(ranks), dtype)
        call = self._calls.get(key) or Collective(phase, name, group.group_desc, ranks, across, dtype, 0, 0)
        self._calls[key] = replace(call, calls=call.calls + times, bytes=call.bytes + times * moved)


def answer(func: Any, args: tuple[Any, ...], from_neighbour: list[int]) -> Any:
    """What a call gives where no other rank exists.

    Of real (integer) tensors, what is gathered is as if all others had what this rank has, a sum is this rank's own,
    and a neighbouring pipeline stage sends the shape `from_neighbour`.
    """
    name = func._opname
    if name == "_allgather_base_":
        _repeat(args[0], args[1])
    elif name == "allgather_into_tensor_coalesced_":
        for out, mine in zip(args[0], args[1], strict=True):
            _repeat(out, mine)
    elif name == "allgather_":
        for outs, mine in zip(args[0], args[1], strict=True):
            for out in outs:
                _repeat(out, mine)
    elif name == "recv_":
        for tensor in args[0]:
            if _real(tensor) and tensor.numel() == len(from_neighbour):
                tensor.copy_(tensor.new_tensor(from_neighbour))
    work = FakeWork().boxed()
    returned = [work if "Work" in str(r.type) else args[0] for r in func._schema.returns]
    return returned[0] if len(returned) == 1 else tuple(returned)


def _real(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor)


def _repeat(out: Tensor, mine: Tensor) -> None:
    if _real(out) and _real(mine) and mine.numel():
        out.view(-1).copy_(mine.reshape(-1).repeat(out.numel() // mine.numel()))
