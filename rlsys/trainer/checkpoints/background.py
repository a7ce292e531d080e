"""Asynchronous write of a checkpoint: a thread writes copies of the tensors while training continues."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from rlsys.trainer.checkpoints import manifest

FULL_BYTES = 2**20
"""Free bytes below which the disk counts as full: no part of a checkpoint would fit."""


class TensorWrite:
    """Background write of this rank's files with Megatron's writer.

    The write runs in a thread, because a forked process, as in Megatron, would inherit the locks of the threads of
    gloo and torch. A copy of the saved tensors stays in host memory until all files are written.

    Attributes, valid after `is_done` has returned True:
        error: Description of the error that ended the write; None: no error.
        checksums: SHA-256 of each written file, by file name.
        seconds: Duration of the write.
    """

    def __init__(self, request: AsyncRequest, folder: Path) -> None:
        self.folder = folder
        self.error: str | None = None
        self.checksums: dict[str, str] = {}
        self.seconds = 0.0
        self._request = request
        self._results: dict[int, Any] | None = None
        buckets = request.async_fn_args[1] if request.async_fn_args else []
        # The copy must be complete before the constructor returns: the next optimizer step overwrites the tensors.
        self._buckets = [
            (file, key, (byte_items, [(item, t.detach().to("cpu", copy=True)) for item, t in tensors]))
            for file, key, (byte_items, tensors) in buckets
        ]
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        start = time.monotonic()
        self._write_all()
        self.seconds = time.monotonic() - start

    def _write_all(self) -> None:
        """Write all files until one fails, and compute their checksums."""
        results: dict[int, Any] = {}
        for i, bucket in enumerate(self._buckets):
            output: queue.Queue[Any] = queue.Queue()
            running: queue.Queue[int] = queue.Queue()
            running.put(i)
            FileSystemWriterAsync.write_preloaded_data(
                self._request.async_fn.args[0], i, bucket, output, running, use_fsync=True
            )
            _, results[i] = output.get()
            if isinstance(results[i], Exception):
                self.error = self._cause(results[i])
                return
            try:
                self.checksums[Path(bucket[0]).name] = manifest.sha256(Path(bucket[0]))
            except OSError as e:
                self.error = self._cause(e)  # Checkpoints.finish reports it on all ranks
                return
        if self._buckets:
            self._results = results
        self._buckets = []

    def _cause(self, error: Exception) -> str:
        """Describe an error, and say if the disk is full: torch's writer then raises an unrelated assertion."""
        free = shutil.disk_usage(self.folder).free
        full = f"the disk is full ({free} bytes free); " if free < FULL_BYTES else ""
        return f"{full}{type(error).__name__}: {error}"

    def is_done(self, wait: bool) -> bool:
        """Return whether the thread has ended, with or without an error. `wait`: wait for its end."""
        if wait:
            self._thread.join()
        return not self._thread.is_alive()

    def finalize(self) -> None:
        """Write Megatron's metadata of all files. Collective; call it after `is_done` is True on every rank."""
        if self._results is not None:
            # Megatron has one queue per process: remove results of an unfinished earlier save.
            results = self._request.async_fn_args[2]
            while not results.empty():
                results.get()
            results.put(self._results)
        for step in self._request.finalize_fns:
            step()
