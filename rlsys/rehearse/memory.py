"""Bytes alive, by kind, and their peak.

A storage counts from the first operation that gives a tensor of it until it is freed. What an allocator adds
(rounding, fragmentation), what libraries keep (NCCL, cuBLAS) and the CUDA context are not in it.
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
    """Owns what is known of each storage alive; `now[kind]` is the sum of their sizes at any time.

    `kind` is that of storages seen for the first time. `host` storages count, but not in the peak.
    """

    def __init__(self, host: str) -> None:
        self.kind = "weights"
        self.now: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self._host = host
        self._alive: dict[int, _Entry] = {}
        self._total = self._highest = 0

    def see(self, tensor: Tensor, kind: str | None = None) -> None:
        """Count the tensor's storage; as `kind` if one is given, also when it was counted as another before."""
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
            self._highest, self.peak = self._total, self.held

    def kind_of(self, tensor: Tensor) -> str | None:
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry.kind

    @property
    def held(self) -> dict[str, int]:
        return {kind: n for kind, n in self.now.items() if n}

    def new_peak(self) -> None:
        """Forget the peak: from now on another one is looked for."""
        self._highest, self.peak = self._total, self.held

    def _add(self, kind: str, size: int) -> None:
        self.now[kind] += size
        if kind != self._host:
            self._total += size

    def _free(self, key: int, entry: _Entry) -> None:
        if self._alive.get(key) is entry:  # else the address has a storage of its own by now
            del self._alive[key]
            self._add(entry.kind, -entry.size)
