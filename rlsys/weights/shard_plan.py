"""Plan of a sharded push: the trainer rank that sends each tensor, and the shards it gathers. Pure, without torch.

A rank of its pipeline stage sends a tensor; a rank that owns an expert sends the expert. Of several candidates, the
plan chooses the rank with the fewest bytes to send. The sender gathers the tensor-parallel shards from its group, so
no rank stores more than the tensors in transfer. One rank sends all tensors that engines fuse on loading: query, key
and value; gate and up; latent attention's two first projections.

All senders send concurrently (rlsys.engine.hooks.bucket_order). An engine receives whole tensors, and SGLang's
loaders slice them for its ranks. Each bucket is sent to one of the engine's ranks, which distributes it within the
machine, so a link carries the size of the model divided by the number of the engine's ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from rlsys.config import Config
from rlsys.config.precision import is_quantised
from rlsys.config.trainer import ParallelConfig
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import layer_stages
from rlsys.convert.table import Entry, Slot, engine_name_of, entries, slots


@dataclass(frozen=True)
class Part:
    """A parameter of the model.

    Attributes:
        entry: its row in the name table.
        sources: ranks that have its shards, in the order of the shards; one rank if the parameter is not split.
    """

    entry: Entry
    sources: tuple[int, ...]


@dataclass(frozen=True)
class SenderSchedule:
    """Buckets that rank `sender` sends. Their parameters are in the order of the name table."""

    sender: int
    buckets: tuple[tuple[Part, ...], ...]

    @property
    def parts(self) -> Iterator[Part]:
        """Parameters of all buckets."""
        return chain.from_iterable(self.buckets)


@dataclass(frozen=True)
class SendersPlan:
    """Senders of a sharded push.

    Attributes:
        schedules: one per sender.
        engine_bytes: for each trainer rank, the bytes that it sends to each engine.
        gather_bytes: for each trainer rank, the bytes of shards that it sends to other trainer ranks.
        received_bytes: bytes that each engine receives.
    """

    schedules: tuple[SenderSchedule, ...]
    engine_bytes: tuple[float, ...]
    gather_bytes: tuple[float, ...]
    received_bytes: float

    @property
    def total_bytes(self) -> tuple[float, ...]:
        """Bytes that each trainer rank sends; data for several engines is counted once."""
        return tuple(
            to_engines + to_senders
            for to_engines, to_senders in zip(self.engine_bytes, self.gather_bytes, strict=True)
        )

    @property
    def mean(self) -> float:
        """Mean of `total_bytes`."""
        return sum(self.total_bytes) / len(self.total_bytes)


@dataclass(frozen=True)
class RankLayout:
    """Megatron-Core's assignment of a model's parameters to ranks.

    The ranks of a pipeline stage are consecutive. Within a stage, Megatron-Core numbers the ranks by tensor parallel
    rank first, then context, then data parallel rank; for experts by expert tensor parallel rank first, then expert
    parallel rank, then replica.

    Attributes:
        parallel: parallel sizes of the trainer.
        experts: number of experts of a layer.
    """

    parallel: ParallelConfig
    experts: int

    @property
    def stage_size(self) -> int:
        """Number of ranks of a stage."""
        return self.parallel.world_size // self.parallel.pp

    def stage_ranks(self, stage: int) -> range:
        """Return the ranks of a stage."""
        return range(stage * self.stage_size, (stage + 1) * self.stage_size)

    def holders(self, entry: Entry, stage: int) -> set[int]:
        """Return the ranks of a stage that have the parameter, or a shard of it."""
        stage_ranks = self.stage_ranks(stage)
        if entry.expert is None:
            return set(stage_ranks)
        expert_tp = self.parallel.expert_tp
        first_offset = self._expert_parallel_rank(entry.expert) * expert_tp
        first_of_replicas = stage_ranks[first_offset :: expert_tp * self.parallel.ep]
        return {first + i for first in first_of_replicas for i in range(expert_tp)}

    def sources(self, entry: Entry, sender: int) -> tuple[int, ...]:
        """Return the ranks whose shards of a parameter `sender` gathers: ranks of its replica of the stage."""
        index = sender % self.stage_size
        stage_start = sender - index
        if entry.expert is None:
            group_size = self.parallel.tp
            first = index - index % group_size
        else:
            group_size = self.parallel.expert_tp
            replica_size = group_size * self.parallel.ep
            replica_start = index - index % replica_size
            first = replica_start + group_size * self._expert_parallel_rank(entry.expert)
        group = range(stage_start + first, stage_start + first + group_size)
        return tuple(group) if entry.rule.shard_axis is not None else (group[index % group_size],)

    def _expert_parallel_rank(self, expert: int) -> int:
        """Return the expert parallel rank that has the expert."""
        return expert // (self.experts // self.parallel.ep)


def plan_senders(config: Config, hf: HFConfig, *, experts_together: bool = False) -> SendersPlan:
    """Assign every tensor of the model to a sending rank.

    Args:
        config: config of the run.
        hf: the model.
        experts_together: whether one rank sends all experts of a layer, because their checksum cannot be computed
            from parts (rlsys.weights.hashes). For families that stack experts, one rank always does.
    """
    p, ranks = config.parallel, RankLayout(config.parallel, hf.experts)
    stages = layer_stages(hf.layers, p.pp, p.vpp)
    units = [
        _Unit(
            _candidates(unit_entries, ranks, stages),
            sum(_pushed_bytes(entry, config) for entry in unit_entries),
            unit_entries,
        )
        for unit_entries in _units(hf, experts_together)
    ]
    parts_by_sender, engine_bytes, gather_bytes = _assign(units, ranks, _WIDTH[config.model.dtype])
    return SendersPlan(
        _schedules(parts_by_sender, config, hf),
        tuple(engine_bytes),
        tuple(gather_bytes),
        sum(unit.pushed_bytes for unit in units),
    )


class _Unit(NamedTuple):
    """Parameters that one rank must send.

    Attributes:
        candidates: ranks that can send them.
        pushed_bytes: bytes that each engine receives.
        entries: the parameters.
    """

    candidates: list[int]
    pushed_bytes: int
    entries: list[Entry]


def _candidates(unit_entries: Sequence[Entry], ranks: RankLayout, stages: list[int]) -> list[int]:
    """Return the ranks that can send a unit: the ranks that have a shard of each of its parameters.

    If there is none, because the unit contains experts of several ranks, any rank of the stage can send it.

    Args:
        unit_entries: parameters of the unit.
        ranks: layout of the trainer.
        stages: pipeline stage of each layer.
    """
    stage = _stage(unit_entries[0], stages)
    holders = set.intersection(*(ranks.holders(entry, stage) for entry in unit_entries))
    return sorted(holders) or list(ranks.stage_ranks(stage))


def _assign(
    units: Sequence[_Unit], ranks: RankLayout, width: int
) -> tuple[dict[int, list[Part]], list[float], list[float]]:
    """Assign each unit to the candidate that has the fewest bytes to send.

    Units with the fewest candidates are assigned first, the largest of them first. Units with many candidates, which
    come last, balance the load.

    Args:
        units: the units, in the order of the table.
        ranks: layout of the trainer.
        width: bytes per gathered element.

    Returns:
        parts of each sender; for each rank, the bytes that it sends to each engine; for each rank, the bytes that it
            sends to other senders.
    """
    engine_bytes, gather_bytes = [0.0] * ranks.parallel.world_size, [0.0] * ranks.parallel.world_size
    parts_by_sender: dict[int, list[Part]] = {}
    for unit in sorted(units, key=lambda unit: (len(unit.candidates), -unit.pushed_bytes)):
        sender = min(unit.candidates, key=lambda rank: engine_bytes[rank] + gather_bytes[rank])
        engine_bytes[sender] += unit.pushed_bytes
        for entry in unit.entries:
            part = Part(entry, ranks.sources(entry, sender))
            parts_by_sender.setdefault(sender, []).append(part)
            for source in part.sources:
                if source != sender:
                    gather_bytes[source] += entry.elements * width / len(part.sources)
    return parts_by_sender, engine_bytes, gather_bytes


def _schedules(
    parts_by_sender: Mapping[int, Sequence[Part]], config: Config, hf: HFConfig
) -> tuple[SenderSchedule, ...]:
    """Return the schedule of each sender, ordered by rank. The parts of a sender are in the order of the table."""
    order = {next(iter(entry.hf)): i for i, entry in enumerate(entries(hf))}
    return tuple(
        SenderSchedule(
            sender, _buckets(sorted(parts, key=lambda part: order[next(iter(part.entry.hf))]), config, hf)
        )
        for sender, parts in sorted(parts_by_sender.items())
    )


def _buckets(parts: Sequence[Part], config: Config, hf: HFConfig) -> tuple[tuple[Part, ...], ...]:
    """Group consecutive parameters into buckets of at most weights.bucket_mb; a larger one is a bucket by itself.

    Parameters that an engine must receive in one call are in one bucket: experts that a folder stacks, and latent
    attention's two first projections, because SGLang silently drops one that arrives without the other.
    """
    parts_by_call, stacked = defaultdict[str, list[Part]](list), slots(hf)
    for part in parts:
        parts_by_call[_call(part.entry, hf, stacked)].append(part)
    limit, size = config.weights.bucket_mb * 2**20, 0.0
    buckets: list[list[Part]] = []
    for call_parts in parts_by_call.values():
        call_size = sum(_pushed_bytes(part.entry, config) for part in call_parts)
        if not buckets or size + call_size > limit:
            buckets.append([])
            size = 0.0
        buckets[-1] += call_parts
        size += call_size
    return tuple(map(tuple, buckets))


_WIDTH = {"float32": 4, "bfloat16": 2}
"""Bytes per element."""


def _pushed_bytes(entry: Entry, config: Config) -> int:
    """Return the bytes of a parameter on an engine, without FP8 scales (4 bytes per block of 16,384 weights)."""
    quantised = config.model.fp8_engines
    return sum(
        math.prod(shape) * (1 if quantised and is_quantised(name) else _WIDTH[config.model.dtype])
        for name, shape in entry.hf.items()
    )


def _stage(entry: Entry, stages: list[int]) -> int:
    """Return the pipeline stage of a parameter.

    The embedding is in the first stage; the head, the final norm and multi-token prediction are in the last.

    Args:
        entry: the parameter.
        stages: pipeline stage of each layer.
    """
    if entry.layer is not None and entry.layer < len(stages):
        return stages[entry.layer]
    return 0 if entry.megatron.startswith("embedding.") else stages[-1]


def _units(hf: HFConfig, experts_together: bool) -> list[list[Entry]]:
    """Return the groups of parameters that one rank must send, in the order of the table."""
    stacked, units = slots(hf), defaultdict[str, list[Entry]](list)
    for entry in entries(hf):
        is_grouped = next(iter(entry.hf)) not in stacked and entry.expert is not None and experts_together
        units[engine_name_of(entry, hf) if is_grouped else _call(entry, hf, stacked)].append(entry)
    return list(units.values())


def _call(entry: Entry, hf: HFConfig, stacked: Mapping[str, Slot]) -> str:
    """Return a name shared by the parameters that an engine must receive in one call."""
    first = next(iter(entry.hf))
    if first in stacked:
        return stacked[first].name
    return first if entry.expert is not None else engine_name_of(entry, hf)
