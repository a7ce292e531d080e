"""Live bytes by kind, and their peak.

A storage counts from the first operation that returns a tensor in it until the storage is freed. The count excludes
the overhead of the allocator (rounding, fragmentation), of libraries (NCCL, cuBLAS) and of the CUDA context.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class _Entry:
    kind: str
    size: int


class Memory:
    """Owner of the records of live storages.

    Attributes:
        kind: Kind of storages that `record` counts for the first time.
        current: Live bytes, by kind.
        peak: Live bytes at the peak since the last `new_peak`, by kind.
    """

    def __init__(self, host: str) -> None:
        """Initialise. `host`: kind of host memory, whose size does not determine the peak."""
        self.kind = "weights"
        self.current: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self._host = host
        self._alive: dict[int, _Entry] = {}
        self._total = self._highest = 0

    def record(self, tensor: Tensor, kind: str | None = None) -> None:
        """Count the tensor's storage if it is new. `kind` not None: set the kind of the storage, new or not."""
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        entry = self._alive.get(key)
        if entry is None:
            self._alive[key] = entry = _Entry(kind or self.kind, size)
            weakref.finalize(storage, self._free, key, entry)
            self._add(entry.kind, size)
        elif (kind and entry.kind != kind) or entry.size != size:
            self._add(entry.kind, -entry.size)
            entry.kind, entry.size = kind or entry.kind, size
            self._add(entry.kind, size)
        if self._total > self._highest:
            self._highest, self.peak = self._total, self.nonzero

    def kind_of(self, tensor: Tensor) -> str | None:
        """Return the kind of the tensor's storage; None if it is not counted."""
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry.kind

    @property
    def nonzero(self) -> dict[str, int]:
        """Entries of `current` that are not 0."""
        return {kind: n for kind, n in self.current.items() if n}

    def new_peak(self) -> None:
        """Start a new peak at the current number of bytes."""
        self._highest, self.peak = self._total, self.nonzero

    def _add(self, kind: str, size: int) -> None:
        self.current[kind] += size
        if kind != self._host:
            self._total += size

    def _free(self, key: int, entry: _Entry) -> None:
        if self._alive.get(key) is entry:  # otherwise another storage has this address now
            del self._alive[key]
            self._add(entry.kind, -entry.size)
