"""Control messages between ranks: pickled objects, in host memory, over a separate gloo group.

Ranks wait in these calls while rank 0 waits for the rollout, possibly for hours. The timeout of a data group (ten
minutes with NCCL) would end the run, and NCCL would pickle the object into GPU memory and keep a kernel spinning on
the engines' GPU. If a rank dies, its connections close and the calls of the other ranks fail at once. The supervisor
reports a rank that hangs (launch/stall_detector.py).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

UNLIMITED = timedelta(days=365)
"""Timeout that exceeds the duration of any run: gloo has no infinite timeout."""


class Control:
    """Owner of the control group. All methods are collective."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Create a group, or take over `group`, which `close` then destroys."""
        control_group = dist.new_group(backend="gloo", timeout=UNLIMITED) if group is None else group
        self._group: dist.ProcessGroup | None = control_group

    def on_main(self, call: Callable[[], T]) -> T:
        """Run `call` on rank 0 only and return its result on every rank."""
        results = [call() if dist.get_rank() == 0 else None]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(results, src=0, group=self._group)
        return results[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank. Block until every rank has called it."""
        values = [value] * dist.get_world_size()
        if dist.get_world_size() > 1:
            dist.all_gather_object(values, value, group=self._group)
        return values

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
        """Destroy the group. The object cannot be used afterwards."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
