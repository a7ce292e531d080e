"""Hooks into SGLang: one call receives all buckets of a sharded push from many trainer ranks (bucket_order.py).

SGLang's own `update_weights_from_distributed` receives one bucket, which rank 0 of a process group broadcasts. With
the load format FORMAT, a push makes one such call for all buckets, and the hook runs SGLang's code for each received
bucket. An engine that fails on a bucket still receives the others, so that no sender blocks, and then reports the
failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.engine.hooks.bucket_order import (
    Buckets,
    aligned_size,
    decode_description,
    description_size,
    receiver_rank,
)
from rlsys.engine.weight_calls import FORMAT

PREFETCH = 2
"""Number of buckets that a rank receives ahead: one is in transfer while another is loaded."""


class BucketReceiver:
    """Receives the buckets of one push in one rank of an engine. Each rank of the engine loads all buckets."""

    def __init__(
        self, buckets: Buckets, group: dist.ProcessGroup, tp_rank: int, tp: int, tp_group: Any, device: str
    ) -> None:
        """Create a receiver without communication.

        Args:
            buckets: Sizes and order of the buckets.
            group: Process group with the senders.
            tp_rank: Tensor-parallel rank in the engine.
            tp: Tensor-parallel size of the engine.
            tp_group: Process group of the engine's ranks; None for an engine of one rank.
            device: Device of the received tensors.
        """
        self._buckets, self._group, self._device = buckets, group, device
        self._rank, self._tp, self._tp_group = tp_rank, tp, tp_group
        self._order = deque(buckets.order())
        self._pending = deque(item for item in self._order if receiver_rank(item[0], tp) == tp_rank)
        self._in_flight: deque[tuple[Tensor, dist.Work | None]] = deque()
        self._failure = ""

    @property
    def remaining(self) -> int:
        """Number of buckets that `take` has not returned yet."""
        return len(self._order)

    def take(self) -> list[tuple[str, Tensor]]:
        """Return the tensors of the next bucket, as views that keep its memory alive.

        Raises:
            RuntimeError: The bucket was not received, because its sender has exited.
        """
        sender, size = self._order.popleft()
        owner = receiver_rank(sender, self._tp)
        memory = self._next_bucket() if owner == self._rank else self._empty(size)
        if self._tp_group is not None:
            # Also after a failed transfer: the other ranks wait for the bucket, and zeros report the failure.
            dist.broadcast(memory, group=self._tp_group, group_src=owner)
        tensors = unpack(memory)
        if tensors is None:
            raise RuntimeError(self._failure or f"rank {owner} of the engine received no bucket")
        return tensors

    def drain(self) -> None:
        """Receive the remaining buckets and discard them."""
        while self.remaining:
            try:
                self.take()
            except RuntimeError:  # the call already reports a failure
                continue

    def _next_bucket(self) -> Tensor:
        """Return the next bucket that this rank receives from a sender; zeros if the transfer failed."""
        self._prefetch()
        memory, work = self._in_flight.popleft()
        self._prefetch()
        try:
            if work is not None:
                work.wait()
                return memory
        except RuntimeError as e:
            self._failure = str(e)
        return memory.zero_()

    def _prefetch(self) -> None:
        """Start transfers until PREFETCH buckets are in flight."""
        while self._pending and len(self._in_flight) < PREFETCH:
            sender, size = self._pending.popleft()
            memory = self._empty(size)
            try:
                receive = dist.P2POp(
                    dist.irecv, memory, group=self._group, group_peer=self._buckets.ranks[sender]
                )
                (work,) = dist.batch_isend_irecv([receive])
            except RuntimeError as e:  # its sender has exited
                self._failure, work = str(e), None
            self._in_flight.append((memory, work))

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)


def unpack(memory: Tensor) -> list[tuple[str, Tensor]] | None:
    """Unpack a bucket `[bytes]` uint8 to named views of its tensors; None for a bucket of zeros."""
    length = description_size(memory[-8:].cpu().numpy().tobytes())
    if length is None:
        return None
    tensors, start = [], 0
    for name, dtype_name, shape in decode_description(memory[-length:].cpu().numpy().tobytes()):
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        tensors.append((name, memory[start : start + size].view(dtype).view(shape)))
        start += aligned_size(size)
    return tensors


_RECEIVERS: dict[str, BucketReceiver] = {}
"""Group name -> receiver, for calls under way."""


def update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Wrap the scheduler's weight update: run SGLang's own code for each bucket, until it fails for one."""
    if request.load_format != FORMAT:
        return original(manager, request)
    receiver = _receiver(manager.tp_worker.model_runner.weight_updater, request)
    _RECEIVERS[request.group_name] = receiver
    try:
        answer = original(manager, request)
        while answer.success and receiver.remaining:
            answer = original(manager, request)
        receiver.drain()
    finally:
        del _RECEIVERS[request.group_name]
    return answer


def receive(original: Callable[..., Any], updater: Any, **request: Any) -> Any:
    """Wrap SGLang's receipt of one bucket: return the next one. SGLang reports an exception as a refusal."""
    if request.get("load_format") != FORMAT:
        return original(updater, **request)
    return _RECEIVERS[request["group_name"]].take()


def _receiver(updater: Any, request: Any) -> BucketReceiver:
    """Create the receiver of a call. With NCCL, this is a collective operation of the group of the push."""
    from sglang.srt.distributed import get_tp_group

    engine_group = get_tp_group()
    group = updater._model_update_group[request.group_name]
    buckets = Buckets.decode(request.names[0])
    tp = engine_group.world_size
    tp_group = None if tp == 1 else engine_group.device_group
    if dist.get_backend(group) == "nccl":
        # All ranks of the group: NCCL creates a communicator collectively.
        dist.all_reduce(torch.zeros(1, device=updater.device), group=group)
    return BucketReceiver(buckets, group, updater.tp_rank, tp, tp_group, updater.device)


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    ".update_weights_from_distributed": update,
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    ".receive_weights_from_distributed": receive,
}
