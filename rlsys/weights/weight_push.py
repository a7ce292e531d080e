"""Push of a trainer's weights: gathered, quantised, hashed and sent. Runs on every trainer rank."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlsys.core.weight_updates import WeightUpdate
from rlsys.obs.phases import Phases
from rlsys.trainer import setup
from rlsys.trainer.trainer import Trainer
from rlsys.weights.adapter_push import AdapterPush
from rlsys.weights.checksums import EngineChecksums, base_layer_name, merge_checksums
from rlsys.weights.fp8 import quantise_for_engines
from rlsys.weights.gathered_push import GatheredPush
from rlsys.weights.hashes import compile_hash
from rlsys.weights.push_plan import PushPlan
from rlsys.weights.shard_plan import plan_senders
from rlsys.weights.sharded_push import ShardedPush
from rlsys.weights.shards import Shards


def push_phases() -> Phases:
    """Return the timer of a weight update.

    Its phases: memory freed, engines prepared, tensors sent, canaries scored, engines attested.
    """
    return Phases("time_sync", ("room", "begin", "send", "canaries", "end"))


@dataclass(frozen=True)
class PushResult:
    """Result of a push.

    Attributes:
        digests: checksums that each rank of an engine must report, one engine size after the other
            (rlsys.weights.checksums); complete on rank 0 only.
        excluded: engines that did not get all tensors, URL -> reason.
        hash_seconds: hashing time of the slowest rank.
    """

    digests: list[dict[str, str]]
    excluded: dict[str, str]
    hash_seconds: float


class WeightPush:
    """Owns the state that lasts between pushes: process groups with engines, and the folders of the disk methods."""

    def __init__(self, trainer: Trainer, plan: PushPlan) -> None:
        """Create the senders (collective). `plan`: the senders of each engine."""
        self._trainer, self._config = trainer, trainer.config
        self._sharded: ShardedPush | None = None
        if self._config.weights.method == "sharded":
            senders = plan_senders(
                self._config, trainer.served_config, experts_together=not torch.cuda.is_available()
            )
            shards = Shards(trainer.local_weights(), trainer.served_config)
            self._sharded = ShardedPush(self._config, senders, shards, trainer.control, trainer.rank)
        self._adapters: AdapterPush | None = None
        self._base: list[dict[str, str]] | None = None
        """Checksums of the base model below adapters, which never changes; on rank 0."""
        if self._config.weights.method == "adapter":
            self._adapters = AdapterPush(self._config, trainer.hf, trainer.rank)
        self._gathered = GatheredPush(self._config, trainer.rank, plan)
        self.sent_bytes = 0
        """Bytes of the last push to each engine."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last push, for metrics.jsonl. Bytes to chains are of all rounds of a rolling push."""
        relayed = {"push_relayed_bytes": self._gathered.relayed_bytes} if self._config.engine.chains else {}
        return {"push_bytes": self.sent_bytes, **relayed}

    def prepare(self) -> None:
        """Import and compile what the first push needs, while engines start, which takes as long."""
        compile_hash(setup.local_device())
        (self._adapters or self._sharded or self._gathered).prepare()

    def push(self, update: WeightUpdate) -> PushResult:
        """Push the weights between `begin_push` and `end_push` of the rollout process (collective)."""
        trainer = self._trainer
        if self._sharded is not None:
            checksums = self._checksums()

            def prepare(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
                return checksums.watch(quantise_for_engines(self._config, tensors))

            sent_bytes = self._sharded.push(update, prepare)
            digests, hash_seconds = self._merge_checksums(checksums)
            return PushResult(digests, self._merge_results(self._sharded.excluded, sent_bytes), hash_seconds)
        if self._adapters is not None:
            sent_bytes = self._adapters.push(trainer.named_factors(), update)
            base, hash_seconds = self._base_checksums()
            return PushResult(base, self._merge_results(self._adapters.excluded, sent_bytes), hash_seconds)
        checksums = self._checksums(trainer.config.parallel.world_size)
        tensors = quantise_for_engines(self._config, trainer.served_tensors())
        sent_bytes = self._gathered.push(checksums.watch(tensors), update)
        digests, hash_seconds = self._merge_checksums(checksums)
        return PushResult(digests, self._merge_results(self._gathered.excluded, sent_bytes), hash_seconds)

    def close(self) -> None:
        """Leave the engines' process groups."""
        self._gathered.close()
        if self._sharded is not None:
            self._sharded.close()

    def _checksums(self, ranks: int = 1) -> EngineChecksums:
        """Create the checksums. `ranks`: number of trainer ranks that gather the same tensors."""
        rank = self._trainer.rank if ranks > 1 else 0
        model = replace(self._trainer.served_config, mtp=False)
        return EngineChecksums(model, *self._config.engine.tps, rank=rank, ranks=ranks)

    def _merge_checksums(self, checksums: EngineChecksums) -> tuple[list[dict[str, str]], float]:
        """Return the digests of all trainer ranks, on rank 0, and the hashing time of the slowest (collective)."""
        results = self._trainer.control.to_main((checksums.partial_digests(), checksums.seconds))
        digests = merge_checksums([partial for partial, _ in results])
        return digests, max((seconds for _, seconds in results), default=0.0)

    def _base_checksums(self) -> tuple[list[dict[str, str]], float]:
        """Return the checksums of the base model, computed once (collective)."""
        if self._base is not None:
            return self._base, 0.0
        checksums = self._checksums(self._config.parallel.world_size)
        for _ in checksums.watch(self._trainer.named_base_tensors()):
            pass
        digests, hash_seconds = self._merge_checksums(checksums)
        self._base = [
            {base_layer_name(name): digest for name, digest in rank_digests.items()}
            for rank_digests in digests
        ]
        return self._base, hash_seconds

    def _merge_results(self, excluded: dict[str, str], sent_bytes: int) -> dict[str, str]:
        """Return the engines that any rank excluded (collective)."""
        results = self._trainer.control.gather((excluded, sent_bytes))
        all_bytes = [rank_bytes for _, rank_bytes in results]
        # With a sharded push each rank sends its own part; otherwise every sender sends all tensors.
        self.sent_bytes = sum(all_bytes) if self._sharded is not None else max(all_bytes)
        return dict(ChainMap(*(rank_excluded for rank_excluded, _ in results)))
