"""Push of a trainer's weights by the transport of weights.method. Runs on every trainer rank."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass

from rlsys.core.weight_updates import WeightUpdate
from rlsys.obs.phases import Phases
from rlsys.trainer import setup
from rlsys.trainer.trainer import Trainer
from rlsys.weights.hashes import compile_hash
from rlsys.weights.push_plan import PushPlan
from rlsys.weights.weight_transport import transport_class


def push_phases() -> Phases:
    """Return the timer of a weight update.

    Its phases:

        room        free memory
        begin       prepare the engines
        send        send the tensors
        canaries    score the canaries
        end         attest the engines
    """
    return Phases("time_sync", ("room", "begin", "send", "canaries", "end"))


@dataclass(frozen=True)
class PushResult:
    """Result of a push.

    Attributes:
        digests: checksums that engines must report: for each engine rank, one engine size after the other, tensor
            name -> checksum (rlsys.weights.checksums). Complete on rank 0 only.
        excluded: URL -> reason, for engines that did not get all tensors.
        hash_seconds: hashing time of the slowest trainer rank.
    """

    digests: list[dict[str, str]]
    excluded: dict[str, str]
    hash_seconds: float


class WeightPush:
    """Owns the transport, and merges the results of all trainer ranks."""

    def __init__(self, trainer: Trainer, plan: PushPlan) -> None:
        """Create the transport (collective). `plan`: the senders of each engine."""
        self._trainer = trainer
        self._transport = transport_class(trainer.config).create(trainer, plan)
        self.sent_bytes = 0
        """Bytes of the last push to each engine."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last push, for metrics.jsonl."""
        return {"push_bytes": self.sent_bytes, **self._transport.metrics}

    def prepare(self) -> None:
        """Import the modules and compile the kernel that a push uses. Call this while engines start."""
        compile_hash(setup.local_device())
        self._transport.prepare()

    def push(self, update: WeightUpdate) -> PushResult:
        """Push the weights between `begin_push` and `end_push` of the rollout process (collective)."""
        transport = self._transport
        digests = transport.update_engines(self._trainer, update)
        results = self._trainer.control.gather((transport.excluded, transport.sent_bytes))
        all_bytes = [rank_bytes for _, rank_bytes in results]
        self.sent_bytes = sum(all_bytes) if transport.ranks_send_parts else max(all_bytes)
        excluded = dict(ChainMap(*(rank_excluded for rank_excluded, _ in results)))
        return PushResult(digests.expected, excluded, digests.hash_seconds)

    def close(self) -> None:
        """Leave the engines' process groups."""
        self._transport.close()
