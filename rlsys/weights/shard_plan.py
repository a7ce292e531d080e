"""Plan of a sharded push: the trainer rank that sends each tensor, and the shards it gathers. Pure, without torch.

A tensor is sent by a rank of its pipeline stage, an expert by a rank that owns it; of several candidates, the one
with the least to send. The sender gathers the tensor-parallel shards from its group, so no rank holds more than the
tensors in transfer. Tensors that engines fuse on loading are one unit, sent by one rank: query, key and value; gate
and up; latent attention's two first projections.

All senders send concurrently (rlsys.engine.hooks.bucket_order). An engine receives whole tensors and slices its own
parts, as SGLang's loaders do in any layout. Each bucket is sent to one of the engine's ranks, which distributes it
within the machine, so a link carries the model's size divided by the engine's ranks.
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
    """A parameter of the whole model, and the ranks of its shards in the order of the split; one if not split."""

    entry: Entry
    sources: tuple[int, ...]


@dataclass(frozen=True)
class SenderSchedule:
    """Buckets that one rank sends, in the order of the name table."""

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
        engine_bytes: bytes that each trainer rank sends to each engine.
        gather_bytes: bytes that it sends to the senders that gather its shards.
        received_bytes: bytes that each engine receives.
    """

    schedules: tuple[SenderSchedule, ...]
    engine_bytes: tuple[float, ...]
    gather_bytes: tuple[float, ...]
    received_bytes: float

    @property
    def total_bytes(self) -> tuple[float, ...]:
        """Bytes that each rank sends; data for several engines is counted once."""
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
    """Megatron-Core's assignment of a model's parts to ranks.

    It numbers the ranks of a stage by tensor parallel rank first, then context, then data; for experts by
    expert tensor parallel rank, then expert parallel rank, then replica.
    """

    parallel: ParallelConfig
    experts: int

    @property
    def lanes(self) -> int:
        """Number of ranks of a stage."""
        return self.parallel.world_size // self.parallel.pp

    def of_stage(self, stage: int) -> range:
        """Return the ranks of a stage."""
        return range(stage * self.lanes, (stage + 1) * self.lanes)

    def holders(self, entry: Entry, stage: int) -> set[int]:
        """Return the ranks of a stage that hold the parameter, or a shard of it."""
        if entry.expert is None:
            return set(self.of_stage(stage))
        p, owner, expert_tp = self.parallel, self._owner(entry.expert), self.parallel.expert_tp
        copies = range(stage * self.lanes + owner * expert_tp, (stage + 1) * self.lanes, expert_tp * p.ep)
        return {first + i for first in copies for i in range(expert_tp)}

    def sources(self, entry: Entry, sender: int) -> tuple[int, ...]:
        """Return the ranks whose shards `sender` gathers, from its own replica of the stage."""
        p, lane = self.parallel, sender % self.lanes
        size, first = p.tp, lane - lane % p.tp
        if entry.expert is not None:
            size = p.expert_tp
            first = size * (lane // (size * p.ep) * p.ep + self._owner(entry.expert))
        group = range(sender - lane + first, sender - lane + first + size)
        return tuple(group) if entry.rule.shard_axis is not None else (group[lane % size],)

    def _owner(self, expert: int) -> int:
        return expert // (self.experts // self.parallel.ep)


def plan_senders(config: Config, hf: HFConfig, *, experts_together: bool = False) -> SendersPlan:
    """Assign every tensor of the model to a sending rank.

    Args:
        config: config of the run.
        hf: the model.
        experts_together: one rank sends all experts of a layer, because their checksum cannot be computed
            from parts (rlsys.weights.hashes). Families that stack experts need that in any case.
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
    """Return the ranks that can send a unit: those that hold a shard of each of its parameters.

    Experts without a common owner can be gathered by any rank of the stage.
    """
    stage = _stage(unit_entries[0], stages)
    holders = set.intersection(*(ranks.holders(entry, stage) for entry in unit_entries))
    return sorted(holders) or list(ranks.of_stage(stage))


def _assign(
    units: Sequence[_Unit], ranks: RankLayout, width: int
) -> tuple[dict[int, list[Part]], list[float], list[float]]:
    """Assign each unit to the candidate that has the least to send.

    Units with few candidates are first, then the largest; those with many candidates balance the rest.

    Args:
        units: the units, in the order of the table.
        ranks: layout of the trainer.
        width: bytes per gathered element.

    Returns:
        parts by sender; bytes that each rank sends to each engine; bytes that each rank sends to other senders.
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
    """Return the buckets of each sender, by rank; the parts of a sender are in the order of the table."""
    order = {next(iter(entry.hf)): i for i, entry in enumerate(entries(hf))}
    return tuple(
        SenderSchedule(
            sender, _buckets(sorted(parts, key=lambda part: order[next(iter(part.entry.hf))]), config, hf)
        )
        for sender, parts in sorted(parts_by_sender.items())
    )


def _buckets(parts: Sequence[Part], config: Config, hf: HFConfig) -> tuple[tuple[Part, ...], ...]:
    """Group consecutive parameters into buckets of at most weights.bucket_mb; a larger one is a bucket by itself.

    Tensors that an engine must receive in one call are in one bucket: experts that a folder stacks, and
    latent attention's two first projections, of which SGLang silently drops one whose partner is not in the
    same call.
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
    """Return the bytes that engines receive; scales of FP8 blocks, 4 bytes per 16,384 weights, are not counted."""
    quantised = config.model.fp8_engines
    return sum(
        math.prod(shape) * (1 if quantised and is_quantised(name) else _WIDTH[config.model.dtype])
        for name, shape in entry.hf.items()
    )


def _stage(entry: Entry, stages: list[int]) -> int:
    """Return the pipeline stage of a parameter.

    Without a layer it is the first for the embedding, else the last, which also has the layers for
    multi-token prediction.
    """
    if entry.layer is not None and entry.layer < len(stages):
        return stages[entry.layer]
    return 0 if entry.megatron.startswith("embedding.") else stages[-1]


def _units(hf: HFConfig, experts_together: bool) -> list[list[Entry]]:
    """Group the parameters that one rank must send, in the order of the table."""
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
