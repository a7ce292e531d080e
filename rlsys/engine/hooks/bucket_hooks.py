"""Hooks into SGLang: one call takes all buckets of a sharded push, from many trainer ranks (bucket_order.py).

SGLang's own `update_weights_from_distributed` takes one bucket, which rank 0 of a process group broadcasts. With our
load format it is called once for a push, and SGLang's code then runs once for each bucket that has come. An engine
that cannot load a bucket takes the rest all the same and refuses at the end: nobody waits for it meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.engine.hooks.bucket_order import Buckets, aligned, described, read_description, taker
from rlsys.engine.weight_calls import FORMAT

AHEAD = 2
"""Buckets that a rank has asked for and not yet taken: one is on its way while another is loaded."""


class Arrivals:
    """The buckets of one push, as one rank of an engine gets them. Each rank of the engine takes every one."""

    def __init__(
        self, told: Buckets, group: dist.ProcessGroup, tp_rank: int, tp: int, tp_group: Any, device: str
    ) -> None:
        """`group`: with the senders. `tp_group`: of the engine's own ranks; None for an engine of one rank."""
        self._told, self._group, self._device = told, group, device
        self._rank, self._tp, self._tp_group = tp_rank, tp, tp_group
        self._order = deque(told.order())
        self._mine = deque(item for item in self._order if taker(item[0], tp) == tp_rank)
        self._asked: deque[tuple[Tensor, dist.Work | None]] = deque()
        self._failure = ""

    @property
    def left(self) -> int:
        """Buckets that are still to be taken."""
        return len(self._order)

    def take(self) -> list[tuple[str, Tensor]]:
        """The tensors of the next bucket: views of memory that lasts as long as they do.

        Raises RuntimeError when it did not come: its sender has gone.
        """
        place, size = self._order.popleft()
        owner = taker(place, self._tp)
        memory = self._received() if owner == self._rank else self._empty(size)
        if self._tp_group is not None:
            # Also of one that did not come: its zeros tell the other ranks, who would wait for it.
            dist.broadcast(memory, group=self._tp_group, group_src=owner)
        tensors = unpacked(memory)
        if tensors is None:
            raise RuntimeError(self._failure or f"rank {owner} of the engine got no bucket")
        return tensors

    def drain(self) -> None:
        """Take what is left, and load none of it."""
        while self.left:
            try:
                self.take()
            except RuntimeError:  # it was told, or is why we are here
                continue

    def _received(self) -> Tensor:
        """The next of those that this rank takes; zeros when it did not come."""
        self._ask()
        memory, work = self._asked.popleft()
        self._ask()
        try:
            if work is not None:
                work.wait()
                return memory
        except RuntimeError as e:
            self._failure = str(e)
        return memory.zero_()

    def _ask(self) -> None:
        while self._mine and len(self._asked) < AHEAD:
            place, size = self._mine.popleft()
            memory = self._empty(size)
            try:
                wanted = dist.P2POp(dist.irecv, memory, group=self._group, group_peer=self._told.ranks[place])
                (work,) = dist.batch_isend_irecv([wanted])
            except RuntimeError as e:  # its sender has gone
                self._failure, work = str(e), None
            self._asked.append((memory, work))

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)


def unpacked(memory: Tensor) -> list[tuple[str, Tensor]] | None:
    """`[bytes]` uint8 -> the tensors in it, as views; None of a bucket that was never filled."""
    length = described(memory[-8:].cpu().numpy().tobytes())
    if length is None:
        return None
    tensors, start = [], 0
    for name, dtype_name, shape in read_description(memory[-length:].cpu().numpy().tobytes()):
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        tensors.append((name, memory[start : start + size].view(dtype).view(shape)))
        start += aligned(size)
    return tensors


_UNDER_WAY: dict[str, Arrivals] = {}
"""Of the process: group -> what it brings while a call is carried out."""


def update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around the scheduler's call: SGLang's own once for each bucket, until one fails."""
    if request.load_format != FORMAT:
        return original(manager, request)
    arrivals = _arrivals(manager.tp_worker.model_runner.weight_updater, request)
    _UNDER_WAY[request.group_name] = arrivals
    try:
        answer = original(manager, request)
        while answer.success and arrivals.left:
            answer = original(manager, request)
        arrivals.drain()
    finally:
        del _UNDER_WAY[request.group_name]
    return answer


def receive(original: Callable[..., Any], updater: Any, **told: Any) -> Any:
    """Around what takes one bucket. What it raises is SGLang's refusal."""
    if told.get("load_format") != FORMAT:
        return original(updater, **told)
    return _UNDER_WAY[told["group_name"]].take()


def _arrivals(updater: Any, request: Any) -> Arrivals:
    from sglang.srt.distributed import get_tp_group

    of_engine = get_tp_group()
    group, told = updater._model_update_group[request.group_name], Buckets.read(request.names[0])
    tp, own = of_engine.world_size, None if of_engine.world_size == 1 else of_engine.device_group
    if dist.get_backend(group) == "nccl":
        # All its ranks at once: NCCL makes a communicator when all have come.
        dist.all_reduce(torch.zeros(1, device=updater.device), group=group)
    return Arrivals(told, group, updater.tp_rank, tp, own, updater.device)


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    ".update_weights_from_distributed": update,
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    ".receive_weights_from_distributed": receive,
}
