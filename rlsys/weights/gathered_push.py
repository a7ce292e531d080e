"""Push of gathered tensors in flattened buckets: weights.method auto and broadcast.

The push plan (rlsys.weights.push_plan) names the ranks that send. They send a bucket through rlsys.weights.transports
while the next bucket is gathered. Engines of pools with `relay` get the same buckets from rlsys.weights.relay_push.
"""

from __future__ import annotations

from rlsys.config import Config
from rlsys.core.weight_updates import EngineAddress, WeightUpdate
from rlsys.weights.buckets import FlatBucket, StagingBuffers, send_in_buckets
from rlsys.weights.group_cache import GroupCache
from rlsys.weights.push_plan import PushPlan
from rlsys.weights.receivers import Receivers
from rlsys.weights.relay_push import RelayPush
from rlsys.weights.transports import MemoryTransport, prepare_sglang
from rlsys.weights.weight_transport import GatheredTransport, Tensors


class GatheredPush(GatheredTransport):
    """Sends buckets through memory, process groups and relay chains, as the plan says for each engine."""

    def __init__(self, config: Config, rank: int = 0, plan: PushPlan | None = None) -> None:
        """Create the transports. Collective if several ranks serve one engine.

        Args:
            config: config of the run.
            rank: this trainer rank.
            plan: the senders of each engine; None: rank 0 sends to all engines.
        """
        plan = plan or PushPlan({}, group=config.weights.method == "broadcast")
        super().__init__(config, rank, plan)
        self._bucket_bytes = int(config.weights.bucket_mb * 2**20)
        self._buffers = StagingBuffers(shared=bool(plan.memory) or not plan.group)
        self._seconds = config.work_seconds
        self._memory = MemoryTransport(plan, rank, self._seconds)
        self._groups = GroupCache(self._seconds, config.answer_seconds)
        self._relays: RelayPush | None = None
        if plan.chains and rank == 0:
            self._relays = RelayPush(plan.chains, config.answer_seconds, self._seconds)
        self.relayed_bytes = 0
        """Bytes of the last push to the first engines of all chains, in all rounds."""

    def prepare(self) -> None:
        """Import the modules of SGLang that a push uses, on the ranks that send."""
        if self.rank in self.plan.senders:
            prepare_sglang()

    def sends(self, update: WeightUpdate) -> bool:
        """Return whether this rank sends tensors in this push. Other ranks only take part in gathering them."""
        if self.rank == 0 and any(self._is_relayed(engine) for engine in update.engines):
            return True
        direct = [engine for engine in update.engines if not self._is_relayed(engine)]
        return any(self.rank in (self._owners(engine) or (self.plan.sender,)) for engine in direct)

    def push(self, tensors: Tensors, update: WeightUpdate) -> int:
        self.excluded = {}
        if not self.sends(update):
            for _ in tensors:
                pass
            return 0
        return self._push_buckets(tensors, update)

    @property
    def metrics(self) -> dict[str, float]:
        """Bytes of the last push to all chains, in all rounds; empty without relay."""
        return {"push_relayed_bytes": self.relayed_bytes} if self.config.engine.chains else {}

    def close(self) -> None:
        """Leave the engines' process groups."""
        self._groups.close()
        if self._relays is not None:
            self._relays.close()

    def _is_relayed(self, engine: EngineAddress) -> bool:
        return engine.chain is not None or self.plan.is_relayed(engine.index)

    def _owners(self, engine: EngineAddress) -> tuple[int, ...] | None:
        return self.plan.owners(engine.index, engine.tp)

    def _push_buckets(self, tensors: Tensors, update: WeightUpdate) -> int:
        """Send the tensors to the engines that this rank serves, and return the number of bytes to each engine."""
        relayed = [e for e in update.engines if self._is_relayed(e)]
        direct = [e for e in update.engines if not self._is_relayed(e)]
        by_memory = self._memory.begin([e for e in direct if self._owners(e) is not None])
        by_group = [e for e in direct if self._owners(e) is None and self.plan.sender == self.rank]
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
