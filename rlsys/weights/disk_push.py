"""Weight update through a safetensors folder on a path that trainer and engines share. Rank 0 writes it.

disk                all tensors
disk_delta          only the tensors that have changed since the last push (frozen layers, an adapter); all of them if
                    an engine does not hold the previous version
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.hf import write_hf
from rlsys.core.weight_updates import WeightUpdate
from rlsys.engine.weight_calls import load_from_disk
from rlsys.weights.push_plan import PushPlan
from rlsys.weights.receivers import Receivers
from rlsys.weights.weight_transport import GatheredTransport, Tensors


class DiskPush(GatheredTransport):
    """Transport through a folder that rank 0 writes and engines load (SGLang's `update_weights_from_disk`)."""

    def __init__(self, config: Config, rank: int = 0, plan: PushPlan | None = None) -> None:
        super().__init__(config, rank, plan)
        self._folders = DiskFolders(config)

    def push(self, tensors: Tensors, update: WeightUpdate) -> int:
        self.excluded = {}
        if self.rank != 0 or not update.engines:
            for _ in tensors:
                pass
            return 0
        with Receivers(update.engines, self.config.work_seconds) as receivers:
            sent_bytes = self._folders.push(tensors, update, receivers)
        self.excluded = receivers.excluded
        return sent_bytes


class DiskFolders:
    """Owns `weights/` in the run folder, and a digest per tensor of the last push."""

    def __init__(self, config: Config) -> None:
        self._source = config.model.path
        self._root = config.run.dir.resolve() / "weights"
        self._delta = config.weights.method == "disk_delta"
        self._digests: dict[str, bytes] = {}
        self._reading: dict[Path, set[str]] = {}
        """Folder -> URLs of engines that were asked to load it and did not respond."""
        self._version = -1
        self._base: int | None = None
        """Version that an engine must hold for the last folder to suffice; None: it has all tensors."""

    def push(self, tensors: Tensors, update: WeightUpdate, receivers: Receivers) -> int:
        """Write the tensors into a folder if needed, let the engines load it, and return its bytes."""
        folder = self._root / f"version-{update.weight_version:06d}"
        if self._is_current(update):  # the next round of a rolling push, or an engine that has rejoined
            for _ in tensors:
                pass
        else:
            self._base = None
            if self._delta:
                if any(engine.holds != self._version for engine in update.engines):
                    self._digests.clear()
                else:
                    self._base = self._version
                tensors = self._changed_tensors(tensors)
                if (first := next(tensors, None)) is None:
                    return 0
                tensors = chain([first], tensors)
            write_hf(folder, self._source, tensors)
        requested = {engine.url for engine in receivers.present}
        receivers.wait_all(receivers.post_all([load_from_disk(str(folder))] * len(receivers.present)))
        self._version = update.weight_version
        self._delete_unused(folder, requested, {engine.url for engine in receivers.present})
        return sum(f.stat().st_size for f in folder.glob("*.safetensors"))

    def _is_current(self, update: WeightUpdate) -> bool:
        """Return whether the folder of the last push suffices for every engine of the update."""
        same_version = update.weight_version == self._version
        return same_version and (self._base is None or all(e.holds == self._base for e in update.engines))

    def _delete_unused(self, folder: Path, requested: set[str], loaded: set[str]) -> None:
        """Delete folders without readers.

        An engine that did not respond may still read a folder until it has loaded a later one.
        """
        for readers in self._reading.values():
            readers -= loaded
        self._reading[folder] = requested - loaded
        for old in self._root.iterdir():
            if old != folder and not self._reading.get(old):
                shutil.rmtree(old)

    def _changed_tensors(self, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors whose digest differs from the last push."""
        for name, tensor in tensors:
            data = tensor.detach().cpu().contiguous()
            digest = hashlib.blake2b(data.view(torch.uint8).numpy().data, digest_size=16).digest()
            if self._digests.get(name) != digest:
                self._digests[name] = digest
                yield name, data
