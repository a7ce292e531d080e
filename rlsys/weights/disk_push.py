"""Weight updates through safetensors folders that rank 0 writes on a path that trainer and engines share.

disk            writes all tensors
disk_delta      writes only the tensors that have changed since the last push, for example not those of frozen layers;
                writes all tensors if an engine does not have the previous version
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
    """Transport through folders, which engines load with SGLang's `update_weights_from_disk`."""

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
    """Owns the folder RUN/weights, and a digest of each tensor of the last push."""

    def __init__(self, config: Config) -> None:
        self._source = config.model.path
        self._root = config.run.dir.resolve() / "weights"
        self._delta = config.weights.method == "disk_delta"
        self._digests: dict[str, bytes] = {}
        self._reading: dict[Path, set[str]] = {}
        """Folder -> URLs of the engines that may still read it, because they did not respond to the load request."""
        self._version = -1
        """Version of the last folder; -1 before the first push."""
        self._base: int | None = None
        """Version that an engine must have to load the last folder, which has only the tensors that changed since
        then. None if the folder has all tensors."""

    def push(self, tensors: Tensors, update: WeightUpdate, receivers: Receivers) -> int:
        """Write the tensors into a folder, unless the last folder suffices, and let the engines load it.

        Returns:
            Size of the folder's safetensors files in bytes; 0 if no tensor has changed.
        """
        folder = self._root / f"version-{update.weight_version:06d}"
        if self._is_current(update):  # in later rounds of a rolling push, and for an engine that has rejoined
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
        """Return whether every engine of the update can load the last folder."""
        same_version = update.weight_version == self._version
        return same_version and (self._base is None or all(e.holds == self._base for e in update.engines))

    def _delete_unused(self, folder: Path, requested: set[str], loaded: set[str]) -> None:
        """Delete the folders that no engine reads any more, except `folder`.

        An engine that did not respond may read a folder until it has loaded a later one.

        Args:
            folder: the last folder.
            requested: URLs of the engines that were requested to load it.
            loaded: URLs of the engines that have loaded it.
        """
        for readers in self._reading.values():
            readers -= loaded
        self._reading[folder] = requested - loaded
        for old in self._root.iterdir():
            if old != folder and not self._reading.get(old):
                shutil.rmtree(old)

    def _changed_tensors(self, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that have changed since the last push, and store their digests."""
        for name, tensor in tensors:
            data = tensor.detach().cpu().contiguous()
            digest = hashlib.blake2b(data.view(torch.uint8).numpy().data, digest_size=16).digest()
            if self._digests.get(name) != digest:
                self._digests[name] = digest
                yield name, data
