"""Which trainer rank sends which tensors in a sharded push, and whose shards it gathers. Pure, without torch.

A tensor is sent by a rank of the pipeline stage that has it. An expert is sent by a rank that owns it; what several
ranks could send goes to the one with least to send. The sender gathers the tensor-parallel parts from its group, so
nobody holds more than the tensors that are on their way. What engines fuse as they load is one unit, which one rank
sends: query, key and value; gate and up; latent attention's two first projections.

All senders send at once (rlsys.engine.hooks.bucket_order). An engine gets whole tensors and cuts its own parts, as
SGLang's loaders do, whatever its layout. But each bucket comes to one of its ranks, which hands it to the others
within the machine: so a link carries the model divided by the engine's ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from rlsys.config import Config
from rlsys.config.precision import is_quantised
from rlsys.config.trainer import ParallelConfig
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import layer_stages
from rlsys.convert.table import Entry, Slot, entries, held_as, slots


@dataclass(frozen=True)
class Part:
    """A parameter of the whole model, and the ranks whose shards make it up, in the order of the cut; one rank where
    nothing is cut."""

    entry: Entry
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Sending:
    """What one rank sends, bucket by bucket, in the order of the name table."""

    sender: int
    buckets: tuple[tuple[Part, ...], ...]

    @property
    def parts(self) -> Iterator[Part]:
        return chain.from_iterable(self.buckets)


@dataclass(frozen=True)
class SendersPlan:
    """`given`: bytes that each trainer rank sends to each engine. `passed`: to the senders that gather its shards.
    `received`: bytes that each engine takes."""

    sendings: tuple[Sending, ...]
    given: tuple[float, ...]
    passed: tuple[float, ...]
    received: float

    @property
    def sent(self) -> tuple[float, ...]:
        """Bytes of each rank, what goes to engines once, however many they are."""
        return tuple(given + passed for given, passed in zip(self.given, self.passed, strict=True))

    @property
    def mean(self) -> float:
        return sum(self.sent) / len(self.sent)


@dataclass(frozen=True)
class Ranks:
    """Where Megatron-Core puts the parts of a model. It numbers the ranks of a stage by tensor parallel rank first,
    then context, then data; for experts by expert tensor parallel rank, then expert parallel rank, then copy."""

    parallel: ParallelConfig
    experts: int

    @property
    def lanes(self) -> int:
        """Ranks of a stage."""
        return self.parallel.world_size // self.parallel.pp

    def of_stage(self, stage: int) -> range:
        return range(stage * self.lanes, (stage + 1) * self.lanes)

    def holders(self, entry: Entry, stage: int) -> set[int]:
        """Ranks of its stage that hold it, or a part of it."""
        if entry.expert is None:
            return set(self.of_stage(stage))
        p, owner, each = self.parallel, self._owner(entry.expert), self.parallel.expert_tp
        copies = range(stage * self.lanes + owner * each, (stage + 1) * self.lanes, each * p.ep)
        return {first + i for first in copies for i in range(each)}

    def sources(self, entry: Entry, sender: int) -> tuple[int, ...]:
        """Whose shards `sender` puts together: of its own copy of the stage."""
        p, lane = self.parallel, sender % self.lanes
        size, first = p.tp, lane - lane % p.tp
        if entry.expert is not None:
            size = p.expert_tp
            first = size * (lane // (size * p.ep) * p.ep + self._owner(entry.expert))
        group = range(sender - lane + first, sender - lane + first + size)
        return tuple(group) if entry.rule.cut is not None else (group[lane % size],)

    def _owner(self, expert: int) -> int:
        return expert // (self.experts // self.parallel.ep)


def plan_senders(config: Config, hf: HFConfig, *, experts_together: bool = False) -> SendersPlan:
    """`experts_together`: one rank sends all experts of a layer, because no checksum could be put together from parts
    (rlsys.weights.hashes). Families that stack experts need it in any case."""
    p, ranks = config.parallel, Ranks(config.parallel, hf.experts)
    stages = layer_stages(hf.layers, p.pp, p.vpp)
    jobs = []
    for unit in _units(hf, experts_together):
        stage = _stage(unit[0], stages)
        holders = set.intersection(*(ranks.holders(entry, stage) for entry in unit))
        # Of experts that have no common owner any rank of the stage may put them together.
        candidates = sorted(holders) or list(ranks.of_stage(stage))
        jobs.append((candidates, sum(_pushed_bytes(entry, config) for entry in unit), unit))
    given, passed = [0.0] * p.world_size, [0.0] * p.world_size
    mine: dict[int, list[Part]] = {}
    # Who has no choice first, then the largest: what many could send evens out the rest.
    for candidates, size, unit in sorted(jobs, key=lambda job: (len(job[0]), -job[1])):
        sender = min(candidates, key=lambda rank: given[rank] + passed[rank])
        given[sender] += size
        for entry in unit:
            part = Part(entry, ranks.sources(entry, sender))
            mine.setdefault(sender, []).append(part)
            for source in part.sources:
                if source != sender:
                    passed[source] += entry.elements * _WIDTH[config.model.dtype] / len(part.sources)
    order = {next(iter(entry.hf)): i for i, entry in enumerate(entries(hf))}
    sendings = tuple(
        Sending(sender, _buckets(sorted(parts, key=lambda p: order[next(iter(p.entry.hf))]), config, hf))
        for sender, parts in sorted(mine.items())
    )
    return SendersPlan(sendings, tuple(given), tuple(passed), sum(size for _, size, _ in jobs))


def _buckets(parts: Sequence[Part], config: Config, hf: HFConfig) -> tuple[tuple[Part, ...], ...]:
    """Neighbours, together at most weights.bucket_mb; what is larger has a bucket for itself. What an engine must get
    in one call is in one: experts that a folder stacks; latent attention's two first projections, of which SGLang
    forgets one whose partner is not in the same call, without a word."""
    of_call, stacked = defaultdict[str, list[Part]](list), slots(hf)
    for part in parts:
        of_call[_call(part.entry, hf, stacked)].append(part)
    limit, size = config.weights.bucket_mb * 2**20, 0.0
    buckets: list[list[Part]] = []
    for together in of_call.values():
        more = sum(_pushed_bytes(part.entry, config) for part in together)
        if not buckets or size + more > limit:
            buckets.append([])
            size = 0.0
        buckets[-1] += together
        size += more
    return tuple(map(tuple, buckets))


_WIDTH = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""


def _pushed_bytes(entry: Entry, config: Config) -> int:
    """As engines get it; scales of FP8 blocks, 4 bytes for 16,384 weights, are left out."""
    quantised = config.model.fp8 != "none"
    return sum(
        math.prod(shape) * (1 if quantised and is_quantised(name) else _WIDTH[config.model.dtype])
        for name, shape in entry.hf.items()
    )


def _stage(entry: Entry, stages: list[int]) -> int:
    """What belongs to no layer is on the first stage if it is the embedding, else on the last. Layers for multi-token
    prediction are there, too."""
    if entry.layer is not None and entry.layer < len(stages):
        return stages[entry.layer]
    return 0 if entry.megatron.startswith("embedding.") else stages[-1]


def _units(hf: HFConfig, experts_together: bool) -> list[list[Entry]]:
    """What one rank must send, in the order of the table."""
    stacked, units = slots(hf), defaultdict[str, list[Entry]](list)
    for entry in entries(hf):
        together = next(iter(entry.hf)) not in stacked and entry.expert is not None and experts_together
        units[held_as(entry, hf) if together else _call(entry, hf, stacked)].append(entry)
    return list(units.values())


def _call(entry: Entry, hf: HFConfig, stacked: Mapping[str, Slot]) -> str:
    """A name that entries share which an engine must get in one call."""
    first = next(iter(entry.hf))
    if first in stacked:
        return stacked[first].name
    return first if entry.expert is not None else held_as(entry, hf)
