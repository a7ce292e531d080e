"""What ranks tell each other that is no tensor: pickled objects, in host memory, over a gloo group of their own.

Ranks wait here while rank 0 waits for the rollout: as long as a step's samples take, hours perhaps. A data group's
time limit would end the run meanwhile (NCCL's is ten minutes), and NCCL would pickle the object into GPU memory and
let a kernel spin on the engines' GPU until it comes. A rank that dies closes its connections, which the others
notice at once; one that hangs is told of by the supervisor (launch.silence_seconds).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

UNLIMITED = timedelta(days=365)
"""Longer than any run; gloo knows no "never"."""


class Control:
    """Owns the group. Every rank calls every method together."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Collective. `group`: one that is there already."""
        made = dist.new_group(backend="gloo", timeout=UNLIMITED) if group is None else group
        self._group: dist.ProcessGroup | None = made

    def on_main(self, call: Callable[[], T]) -> T:
        """Run `call` on rank 0 only; every rank gets what it returned."""
        box = [call() if dist.get_rank() == 0 else None]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Every rank's, in their order, on every rank. Returns when the last one has called it."""
        out = [value] * dist.get_world_size()
        if dist.get_world_size() > 1:
            dist.all_gather_object(out, value, group=self._group)
        return out

    def to_main(self, value: T) -> list[T]:
        """Every rank's, in their order, on rank 0; nothing on the others."""
        if dist.get_world_size() == 1:
            return [value]
        out: list[T] | None = [value] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, out, dst=0, group=self._group)
        return out or []

    def wait_for_all(self) -> None:
        """Returns when every rank has come here."""
        self.gather(None)

    def close(self) -> None:
        """Leave the group, once; nothing is told afterwards."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
