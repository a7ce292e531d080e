"""A trainer's weights on their way to the engines: gathered, quantised, hashed and sent; and what rank 0 hears of it.
Runs on every trainer rank."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlsys.core.weight_updates import PushTicket
from rlsys.obs.phases import Phases
from rlsys.trainer import setup
from rlsys.trainer.trainer import Trainer
from rlsys.weights.adapters import AdapterPush
from rlsys.weights.checksums import EngineChecksums, put_together, under_adapter
from rlsys.weights.fp8 import for_engines
from rlsys.weights.hashes import compile_hash
from rlsys.weights.plan import PushPlan
from rlsys.weights.shard_plan import plan_senders
from rlsys.weights.sharded import ShardedPush
from rlsys.weights.shards import Shards
from rlsys.weights.sync import WeightSync


def push_phases() -> Phases:
    """Of a whole weight update: memory given back, engines made ready, tensors sent, canaries scored, engines
    attested."""
    return Phases("time_sync", ("room", "begin", "send", "canaries", "end"))


@dataclass(frozen=True)
class Delivered:
    """`digests`: what each rank of an engine must hold, one size of engine after the other
    (rlsys.weights.checksums); whole on rank 0 only. `left_out`: engines that did not get all tensors, URL -> why.
    `hashing`: seconds, of the rank that took longest."""

    digests: list[dict[str, str]]
    left_out: dict[str, str]
    hashing: float


class Delivery:
    """Owns what lasts from push to push: process groups with engines, and the folders of the disk methods."""

    def __init__(self, trainer: Trainer, plan: PushPlan) -> None:
        """Collective. `plan`: who reaches which engine."""
        self._trainer, self._config = trainer, trainer.config
        self._sharded: ShardedPush | None = None
        if self._config.weights.method == "sharded":
            senders = plan_senders(
                self._config, trainer.served, experts_together=not torch.cuda.is_available()
            )
            shards = Shards(trainer.local_weights(), trainer.served)
            self._sharded = ShardedPush(self._config, senders, shards, trainer.control, trainer.rank)
        self._adapters: AdapterPush | None = None
        self._base: list[dict[str, str]] | None = None
        """Checksums of the model under the adapters, on rank 0: it never changes."""
        if self._config.weights.method == "adapter":
            self._adapters = AdapterPush(self._config, trainer.hf, trainer.rank)
        self._sync = WeightSync(self._config, trainer.rank, plan)
        self.sent_bytes = 0
        """Of the last push, to each engine."""

    @property
    def figures(self) -> dict[str, float]:
        """Of the last push, for metrics.jsonl. Bytes for chains are of all rounds of a rolling push."""
        relayed = {"push_relayed_bytes": self._sync.relayed_bytes} if self._config.engine.chains else {}
        return {"push_bytes": self.sent_bytes, **relayed}

    def prepare(self) -> None:
        """Import and compile what the first push needs, while engines start, which takes as long."""
        compile_hash(setup.local_device())
        (self._adapters or self._sharded or self._sync).prepare()

    def push(self, ticket: PushTicket) -> Delivered:
        """Between `begin_push` and `end_push` of the rollout process. Collective."""
        trainer = self._trainer
        if self._sharded is not None:
            checksums = self._checksums()

            def prepare(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
                return checksums.watch(for_engines(self._config, tensors))

            sent = self._sharded.push(ticket, prepare)
            digests, hashing = self._put_together(checksums)
            return Delivered(digests, self._settled(self._sharded.left_out, sent), hashing)
        if self._adapters is not None:
            sent = self._adapters.push(trainer.named_factors(), ticket)
            base, hashing = self._of_base()
            return Delivered(base, self._settled(self._adapters.left_out, sent), hashing)
        checksums = self._checksums(trainer.config.parallel.world_size)
        tensors = for_engines(self._config, trainer.served_tensors())
        sent = self._sync.push(checksums.watch(tensors), ticket)
        digests, hashing = self._put_together(checksums)
        return Delivered(digests, self._settled(self._sync.left_out, sent), hashing)

    def close(self) -> None:
        """Leave the engines' process groups."""
        self._sync.close()
        if self._sharded is not None:
            self._sharded.close()

    def _checksums(self, ranks: int = 1) -> EngineChecksums:
        """`ranks`: trainer ranks that gather the same tensors, and share hashing them."""
        rank = self._trainer.rank if ranks > 1 else 0
        served = replace(self._trainer.served, mtp=False)
        return EngineChecksums(served, *self._config.engine.tps, rank=rank, ranks=ranks)

    def _put_together(self, checksums: EngineChecksums) -> tuple[list[dict[str, str]], float]:
        """The digests of all trainer ranks, on rank 0, and the seconds of the one that hashed longest. Collective."""
        told = self._trainer.control.to_main((checksums.found(), checksums.seconds))
        digests = put_together([found for found, _ in told])
        return digests, max((seconds for _, seconds in told), default=0.0)

    def _of_base(self) -> tuple[list[dict[str, str]], float]:
        """What engines must hold under the adapters. Gathered once. Collective."""
        if self._base is not None:
            return self._base, 0.0
        checksums = self._checksums(self._config.parallel.world_size)
        for _ in checksums.watch(self._trainer.named_base_tensors()):
            pass
        digests, hashing = self._put_together(checksums)
        self._base = [
            {under_adapter(name): digest for name, digest in of_rank.items()} for of_rank in digests
        ]
        return self._base, hashing

    def _settled(self, left_out: dict[str, str], sent: int) -> dict[str, str]:
        """Engines that any rank had to leave out. Collective."""
        told = self._trainer.control.gather((left_out, sent))
        bytes_of_ranks = [each for _, each in told]
        # Ranks that share an engine each give all of its ranks what these need; senders give each their own.
        self.sent_bytes = sum(bytes_of_ranks) if self._sharded is not None else max(bytes_of_ranks)
        return dict(ChainMap(*(mine for mine, _ in told)))
