"""Control messages between ranks: pickled objects, in host memory, over a separate gloo group.

Ranks wait here while rank 0 waits for the rollout, possibly for hours. The time limit of a data group (ten minutes
with NCCL) would end the run, and NCCL would pickle the object into GPU memory and keep a kernel spinning on the
engines' GPU. A rank that dies closes its connections, which the others notice immediately; the supervisor reports one
that hangs (launch/stall_detector.py).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

UNLIMITED = timedelta(days=365)
"""Time limit that exceeds any run: gloo has no infinite one."""


class Control:
    """Owner of the control group. Every rank calls every method together."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Create the group, or take over `group`. Collective."""
        control_group = dist.new_group(backend="gloo", timeout=UNLIMITED) if group is None else group
        self._group: dist.ProcessGroup | None = control_group

    def on_main(self, call: Callable[[], T]) -> T:
        """Run `call` on rank 0 only and return its result on every rank."""
        box = [call() if dist.get_rank() == 0 else None]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank. Blocks until the last rank has called it."""
        out = [value] * dist.get_world_size()
        if dist.get_world_size() > 1:
            dist.all_gather_object(out, value, group=self._group)
        return out

    def to_main(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on rank 0; an empty list on other ranks."""
        if dist.get_world_size() == 1:
            return [value]
        values: list[T] | None = [value] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def wait_for_all(self) -> None:
        """Block until every rank has called this method."""
        self.gather(None)

    def close(self) -> None:
        """Leave the group. The object cannot be used afterwards."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
