"""Meter of all torch operations of a rank, on fake or real tensors: live bytes by kind, FLOPs and collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from rlsys.rehearse.collectives import Collectives, answer, buffers_filled, tensors_of
from rlsys.rehearse.figures import HOST, Phase
from rlsys.rehearse.memory import Memory
from rlsys.rehearse.tensors import FakeTensors

_KIND = {"score": "activations", "passes": "activations", "gather": "communication"}
"""Kind of new storages, by phase; "other" in all other phases."""
_LASTING = ("weights", "gradients", "optimizer", HOST)
"""Kinds that a storage keeps when a collective writes into it."""


class Meter(TorchDispatchMode):
    """Context that measures memory, FLOPs and collectives of all torch operations.

    `phases` contains a phase after the next one has begun.
    """

    def __init__(self, node_of: Callable[[int], int], fake: FakeTensors | None) -> None:
        """Initialise.

        Args:
            node_of: Returns the node of a rank.
            fake: Runs operations on fake tensors; None: all tensors, ranks and collectives are real.
        """
        super().__init__()
        self.fake = fake
        self.memory = Memory(HOST)
        self.collectives = Collectives(node_of)
        self.phases: list[Phase] = []
        self.from_neighbour: list[int] = []
        """Shape of the tensor that a neighbouring pipeline stage sends."""
        self._phase, self._started_at = "build", time.monotonic()
        self._flops = self._operations = 0
        self._paused = False
        self._times = 1

    def begin(self, phase: str) -> None:
        """End the current phase and begin `phase`; "": no phase follows."""
        if self._phase not in ("", "build"):
            seconds = time.monotonic() - self._started_at
            self.phases.append(Phase(self._phase, self.memory.peak, self._flops, seconds, self._operations))
        self._phase, self._started_at = phase, time.monotonic()
        self._flops = self._operations = 0
        self.memory.kind = _KIND.get(phase, "other")
        self.memory.new_peak()

    def add_flops(self, count: int) -> None:
        """Add FLOPs to the current phase."""
        self._flops += count

    @property
    def phase(self) -> str:
        """Name of the current phase."""
        return self._phase

    @contextmanager
    def counting_as(self, calls: int) -> Iterator[None]:
        """Count each collective within the context as `calls` calls."""
        self._times = calls
        try:
            yield
        finally:
            self._times = 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Log no collectives within the context, such as those of objects, which use separate groups."""
        previous, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = previous

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        self._operations += 1
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        out = func(*args, **kwargs) if self.fake is None else self.fake.call(func, args, kwargs, self._phase)
        self._flops += _flops(func, args, kwargs, out)
        for tensor in tensors_of(out):
            self.memory.record(tensor)
        return out

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._paused:
            self.collectives.record(self._phase, func, args, self._times)
        for buffer in buffers_filled(func, args):
            if self.memory.kind_of(buffer) not in _LASTING:
                self.memory.record(buffer, "communication")
        return func(*args, **kwargs) if self.fake is None else answer(func, args, self.from_neighbour)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the FLOPs of a matrix product or attention; 0 for other operations.

    A multiplication and an addition count as two FLOPs.
    """
    if "flash_attention_for_cpu" in func._opname:
        # torch's registry lacks this operation. The causal mask excludes half of the scores.
        backward = "backward" in func._opname
        q, k, v = args[1:4] if backward else args[:3]
        forward = int(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3]))
        return forward * 5 // 2 if backward else forward
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))
