"""Push of gathered tensors to engines. Runs on every trainer rank: gathering is collective.

The ranks that the plan names send (rlsys.weights.push_plan); rank 0 writes folders.

auto, broadcast     flattened buckets, see rlsys.weights.transports; one is sent while the next is gathered
                    (engines of pools with `relay` get the same buckets through rlsys.weights.relay_push)
disk                a safetensors folder on a path that trainer and engines share: `update_weights_from_disk`
disk_delta          the same with only the tensors that have changed since the last push (frozen layers, an adapter);
                    with all of them if an engine does not hold the previous version
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.hf import write_hf
from rlsys.core.weight_updates import EngineAddress, WeightUpdate
from rlsys.engine.weight_calls import load_from_disk
from rlsys.weights.buckets import FlatBucket, StagingBuffers, send_in_buckets
from rlsys.weights.group_cache import GroupCache
from rlsys.weights.push_plan import PushPlan
from rlsys.weights.receivers import Receivers
from rlsys.weights.relay_push import RelayPush
from rlsys.weights.transports import MemoryTransport, prepare_sglang


class GatheredPush:
    """Sends gathered tensors between `begin_push` and `end_push` of the rollout process; one per trainer rank."""

    def __init__(self, config: Config, rank: int = 0, plan: PushPlan | None = None) -> None:
        """Create the transports. Collective if several ranks serve one engine.

        `plan`: the senders of each engine; by default rank 0 sends to all.
        """
        method = config.weights.method
        self._bucket_bytes = int(config.weights.bucket_mb * 2**20)
        self._rank = rank
        if plan is None:
            plan = PushPlan({}, group=method == "broadcast")
        self._plan = plan
        self._buffers = StagingBuffers(shared=bool(plan.memory) or not plan.group)
        self._seconds = config.work_seconds
        self._memory = MemoryTransport(plan, rank, self._seconds)
        self._groups = GroupCache(self._seconds, config.answer_seconds)
        self._relays: RelayPush | None = None
        if plan.chains and rank == 0:
            self._relays = RelayPush(plan.chains, config.answer_seconds, self._seconds)
        self._folders = DiskFolders(config) if method in ("disk", "disk_delta") else None
        self.excluded: dict[str, str] = {}
        """Engines that did not receive all tensors of this rank's last push: URL -> reason."""
        self.relayed_bytes = 0
        """Bytes of the last push to the first engines of chains, over all rounds."""

    def prepare(self) -> None:
        """Import what the first push needs, on the sending ranks, while engines start, which takes as long."""
        if self._folders is None and self._rank in self._plan.senders:
            prepare_sglang()

    def sends(self, update: WeightUpdate) -> bool:
        """Return whether this rank sends tensors in this push; the others only help to gather them."""
        if self._folders is not None:
            return self._rank == 0 and bool(update.engines)
        if self._rank == 0 and any(self._is_relayed(engine) for engine in update.engines):
            return True
        direct = [engine for engine in update.engines if not self._is_relayed(engine)]
        by_memory = (self._owners(engine) for engine in direct)
        return any(self._rank in (owners or (self._plan.sender,)) for owners in by_memory)

    def push(self, tensors: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> int:
        """Consume `tensors` (collective), load them into every engine of the update, and return their bytes.

        An engine that fails or refuses is `excluded`.
        """
        self.excluded = {}
        if not self.sends(update):
            for _ in tensors:
                pass
            return 0
        if self._folders is not None:
            with Receivers(update.engines, self._seconds) as receivers:
                sent_bytes = self._folders.push(tensors, update, receivers)
            self.excluded = receivers.excluded
            return sent_bytes
        return self._push_buckets(tensors, update)

    def close(self) -> None:
        """Leave the engines' process groups."""
        self._groups.close()
        if self._relays is not None:
            self._relays.close()

    def _is_relayed(self, engine: EngineAddress) -> bool:
        return engine.chain is not None or self._plan.is_relayed(engine.index)

    def _owners(self, engine: EngineAddress) -> tuple[int, ...] | None:
        return self._plan.owners(engine.index, engine.tp)

    def _push_buckets(self, tensors: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> int:
        relayed = [e for e in update.engines if self._is_relayed(e)]
        direct = [e for e in update.engines if not self._is_relayed(e)]
        by_memory = self._memory.begin([e for e in direct if self._owners(e) is not None])
        by_group = [e for e in direct if self._owners(e) is None and self._plan.sender == self._rank]
        relays = self._relays if relayed else None
        if relays is not None:
            relays.begin(relayed, update.weight_version)
        with (
            Receivers(by_memory, self._seconds) as memory_receivers,
            Receivers(by_group, self._seconds) as group_receivers,
        ):
            group = self._groups.get(group_receivers) if by_group else None

            def send(flat: FlatBucket) -> None:
                if not self._memory.idle:
                    self._memory.send(flat, memory_receivers)
                if group is not None and group_receivers.present:
                    group.send(flat, group_receivers)
                if relays is not None:
                    relays.send(flat)

            sent_bytes = send_in_buckets(tensors, self._bucket_bytes, self._buffers, send)
        self.excluded = memory_receivers.excluded | group_receivers.excluded
        if relays is not None:
            relays.end()
            self.excluded |= relays.excluded
            self.relayed_bytes = relays.sent_bytes
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

    def push(self, tensors: Iterable[tuple[str, Tensor]], update: WeightUpdate, receivers: Receivers) -> int:
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
        """Return whether the folder of the last push brings every engine of the update to its version."""
        same_version = update.weight_version == self._version
        return same_version and (self._base is None or all(e.holds == self._base for e in update.engines))

    def _delete_unused(self, folder: Path, requested: set[str], loaded: set[str]) -> None:
        """Delete folders without readers.

        An engine that did not respond may read one until it has loaded a later one.
        """
        for readers in self._reading.values():
            readers -= loaded
        self._reading[folder] = requested - loaded
        for old in self._root.iterdir():
            if old != folder and not self._reading.get(old):
                shutil.rmtree(old)

    def _changed_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors whose digest differs from the last push."""
        for name, tensor in tensors:
            data = tensor.detach().cpu().contiguous()
            digest = hashlib.blake2b(data.view(torch.uint8).numpy().data, digest_size=16).digest()
            if self._digests.get(name) != digest:
                self._digests[name] = digest
                yield name, data
