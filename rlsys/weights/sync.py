"""Sends a trainer's weights to engines. Runs on every trainer rank: gathering is collective, rank 0 sends.

tensor, broadcast   flattened buckets, see rlsys.weights.transports; one is sent while the next is gathered
disk                a safetensors folder on a path that trainer and engines share: `update_weights_from_disk`
disk_delta          the same with only the tensors that have changed since the last push (frozen layers, an adapter);
                    all of them when an engine does not hold the version before
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.hf import write_hf
from rlsys.types import PushTicket
from rlsys.weights.receivers import Receivers
from rlsys.weights.transports import BroadcastTransport, Bucket, TensorTransport, Transport


class WeightSync:
    """`push` between `begin_push` and `end_push` of the rollout process."""

    def __init__(self, config: Config, is_main: bool) -> None:
        self._config = config
        self._is_main = is_main
        method = config.weights.method
        self._transport: Transport = BroadcastTransport() if method == "broadcast" else TensorTransport()
        self._on_disk = DiskFolders(config) if method in ("disk", "disk_delta") else None

    def push(self, tensors: Iterable[tuple[str, Tensor]], ticket: PushTicket) -> int:
        """Consume `tensors` (collective) and load them into every engine of the ticket; the bytes sent to each.

        An engine that dies meanwhile is left out: end_push finds it dead, and its restart brings the next push.
        Raises RunError when an engine refuses the tensors.
        """
        if not self._is_main or not ticket.engines:
            for _ in tensors:
                pass
            return 0
        with Receivers(ticket.engines) as receivers:
            if self._on_disk is not None:
                return self._on_disk.push(tensors, ticket, receivers)
            return self._push_buckets(tensors, receivers)

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if isinstance(self._transport, BroadcastTransport):
            self._transport.close()

    def _push_buckets(self, tensors: Iterable[tuple[str, Tensor]], receivers: Receivers) -> int:
        """At most two buckets are held: one on its way, one being gathered."""
        self._transport.begin(receivers)
        sent = 0
        with ThreadPoolExecutor(1, thread_name_prefix="push") as sender:
            under_way = None
            for bucket in buckets(tensors, int(self._config.weights.bucket_mb * 2**20)):
                if under_way is not None:
                    under_way.result()
                under_way = sender.submit(self._transport.send, bucket, receivers)
                sent += sum(t.nbytes for _, t in bucket)
            if under_way is not None:
                under_way.result()
        return sent


class DiskFolders:
    """Owns `weights/` in the run folder, and knows what the last push held: a digest per tensor."""

    def __init__(self, config: Config) -> None:
        self._source = config.model.path
        self._root = config.run.dir.resolve() / "weights"
        self._delta = config.weights.method == "disk_delta"
        self._digests: dict[str, bytes] = {}
        self._version = -1

    def push(self, tensors: Iterable[tuple[str, Tensor]], ticket: PushTicket, receivers: Receivers) -> int:
        folder = self._root / f"version-{ticket.weight_version:06d}"
        if self._delta:
            if any(engine.holds != self._version for engine in ticket.engines):
                self._digests.clear()
            tensors = self._changed(tensors)
            if (first := next(tensors, None)) is None:
                return 0
            tensors = chain([first], tensors)
        write_hf(folder, self._source, tensors)
        body = {"model_path": str(folder), "flush_cache": False}
        receivers.settle(receivers.ask("/update_weights_from_disk", [body] * len(receivers.present)))
        self._version = ticket.weight_version
        for old in self._root.iterdir():
            if old != folder:
                shutil.rmtree(old)
        return sum(f.stat().st_size for f in folder.glob("*.safetensors"))

    def _changed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            data = tensor.detach().cpu().contiguous()
            digest = hashlib.blake2b(data.view(torch.uint8).numpy().data, digest_size=16).digest()
            if self._digests.get(name) != digest:
                self._digests[name] = digest
                yield name, data


def buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Neighbouring tensors of one dtype, together at most `max_bytes`; a larger tensor has a bucket for itself."""
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and (size + tensor.nbytes > max_bytes or tensor.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach()))
        size += tensor.nbytes
    if bucket:
        yield bucket
