"""Sends a trainer's weights to engines. Runs on every trainer rank: gathering is collective, and those send that the
plan names (rlsys.weights.plan); a folder is written by rank 0.

tensor, broadcast   flattened buckets, see rlsys.weights.transports; one is sent while the next is gathered
                    (engines of pools with `relay` get the same buckets by rlsys.weights.relayed)
disk                a safetensors folder on a path that trainer and engines share: `update_weights_from_disk`
disk_delta          the same with only the tensors that have changed since the last push (frozen layers, an adapter);
                    all of them when an engine does not hold the version before
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
from rlsys.core.weight_updates import EngineAddress, PushTicket
from rlsys.engine.weight_calls import load_from_disk
from rlsys.weights.buckets import Areas, Flat, stream
from rlsys.weights.groups import Groups
from rlsys.weights.plan import PushPlan
from rlsys.weights.receivers import Receivers
from rlsys.weights.relayed import RelayPush
from rlsys.weights.transports import MemoryTransport, prepare_sglang


class WeightSync:
    """`push` between `begin_push` and `end_push` of the rollout process. Every trainer rank has one."""

    def __init__(self, config: Config, rank: int = 0, plan: PushPlan | None = None) -> None:
        """`plan`: who sends to whom; when none is given, rank 0 to all. Collective, where ranks send together."""
        method = config.weights.method
        self._bucket_bytes = int(config.weights.bucket_mb * 2**20)
        self._rank = rank
        if plan is None:
            plan = PushPlan({}, group=method == "broadcast")
        self._plan = plan
        self._areas = Areas(shared=bool(plan.memory) or not plan.group)
        self._seconds = config.work_seconds
        self._memory = MemoryTransport(plan, rank, self._seconds)
        self._groups = Groups(self._seconds, config.answer_seconds)
        self._relays: RelayPush | None = None
        if plan.chains and rank == 0:
            self._relays = RelayPush(plan.chains, config.answer_seconds, self._seconds)
        self._on_disk = DiskFolders(config) if method in ("disk", "disk_delta") else None
        self.left_out: dict[str, str] = {}
        """Engines that this rank's last push could not give all tensors to: URL -> why."""
        self.relayed_bytes = 0
        """That the last push sent to first engines of chains, in all its rounds."""

    def prepare(self) -> None:
        """Import what the first push needs, on the ranks that send: while engines start, which takes as long."""
        if self._on_disk is None and self._rank in self._plan.senders:
            prepare_sglang()

    def sends(self, ticket: PushTicket) -> bool:
        """Whether this rank sends tensors in this push; the others only help to gather them."""
        if self._on_disk is not None:
            return self._rank == 0 and bool(ticket.engines)
        if self._rank == 0 and any(self._relayed(engine) for engine in ticket.engines):
            return True
        others = [engine for engine in ticket.engines if not self._relayed(engine)]
        by_memory = (self._owners(engine) for engine in others)
        return any(self._rank in (owners or (self._plan.sender,)) for owners in by_memory)

    def push(self, tensors: Iterable[tuple[str, Tensor]], ticket: PushTicket) -> int:
        """Consume `tensors` (collective) and load them into every engine of the ticket; the bytes that this rank
        gave to each of its engines.

        An engine that dies meanwhile, or refuses, is `left_out`.
        """
        self.left_out = {}
        if not self.sends(ticket):
            for _ in tensors:
                pass
            return 0
        if self._on_disk is not None:
            with Receivers(ticket.engines, self._seconds) as receivers:
                sent = self._on_disk.push(tensors, ticket, receivers)
            self.left_out = receivers.left_out
            return sent
        return self._push_buckets(tensors, ticket)

    def close(self) -> None:
        """Leave the engines' process groups, if there are any."""
        self._groups.close()
        if self._relays is not None:
            self._relays.close()

    def _relayed(self, engine: EngineAddress) -> bool:
        return engine.chain is not None or self._plan.relayed(engine.index)

    def _owners(self, engine: EngineAddress) -> tuple[int, ...] | None:
        return self._plan.owners(engine.index, engine.tp)

    def _push_buckets(self, tensors: Iterable[tuple[str, Tensor]], ticket: PushTicket) -> int:
        relayed = [e for e in ticket.engines if self._relayed(e)]
        others = [e for e in ticket.engines if not self._relayed(e)]
        by_memory = self._memory.begin([e for e in others if self._owners(e) is not None])
        by_group = [e for e in others if self._owners(e) is None and self._plan.sender == self._rank]
        relays = self._relays if relayed else None
        if relays is not None:
            relays.begin(relayed, ticket.weight_version)
        with Receivers(by_memory, self._seconds) as near, Receivers(by_group, self._seconds) as far:
            group = self._groups.of(far) if by_group else None

            def send(flat: Flat) -> None:
                if not self._memory.idle:
                    self._memory.send(flat, near)
                if group is not None and far.present:
                    group.send(flat, far)
                if relays is not None:
                    relays.send(flat)

            sent = stream(tensors, self._bucket_bytes, self._areas, send)
        self.left_out = near.left_out | far.left_out
        if relays is not None:
            relays.end()
            self.left_out |= relays.left_out
            self.relayed_bytes = relays.sent
        return sent


class DiskFolders:
    """Owns `weights/` in the run folder, and knows what the last push held: a digest per tensor."""

    def __init__(self, config: Config) -> None:
        self._source = config.model.path
        self._root = config.run.dir.resolve() / "weights"
        self._delta = config.weights.method == "disk_delta"
        self._digests: dict[str, bytes] = {}
        self._reading: dict[Path, set[str]] = {}
        """URLs of engines that were asked to load a folder and gave no answer."""
        self._version = -1
        self._base: int | None = None
        """Version that an engine must hold for the last folder to be enough; None: it has all tensors."""

    def push(self, tensors: Iterable[tuple[str, Tensor]], ticket: PushTicket, receivers: Receivers) -> int:
        folder = self._root / f"version-{ticket.weight_version:06d}"
        if self._enough(ticket):  # the next round of a rolling push, or an engine that came back
            for _ in tensors:
                pass
        else:
            self._base = None
            if self._delta:
                if any(engine.holds != self._version for engine in ticket.engines):
                    self._digests.clear()
                else:
                    self._base = self._version
                tensors = self._changed(tensors)
                if (first := next(tensors, None)) is None:
                    return 0
                tensors = chain([first], tensors)
            write_hf(folder, self._source, tensors)
        asked = {engine.url for engine in receivers.present}
        receivers.settle(receivers.ask([load_from_disk(str(folder))] * len(receivers.present)))
        self._version = ticket.weight_version
        self._delete_read(folder, asked, {engine.url for engine in receivers.present})
        return sum(f.stat().st_size for f in folder.glob("*.safetensors"))

    def _enough(self, ticket: PushTicket) -> bool:
        """Whether the folder of the last push brings every engine of the ticket to its version."""
        same = ticket.weight_version == self._version
        return same and (self._base is None or all(e.holds == self._base for e in ticket.engines))

    def _delete_read(self, folder: Path, asked: set[str], loaded: set[str]) -> None:
        """What nobody reads any more goes. Who did not answer may still be at it, until it has loaded a later one."""
        for readers in self._reading.values():
            readers -= loaded
        self._reading[folder] = asked - loaded
        for old in self._root.iterdir():
            if old != folder and not self._reading.get(old):
                shutil.rmtree(old)

    def _changed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            data = tensor.detach().cpu().contiguous()
            digest = hashlib.blake2b(data.view(torch.uint8).numpy().data, digest_size=16).digest()
            if self._digests.get(name) != digest:
                self._digests[name] = digest
                yield name, data
