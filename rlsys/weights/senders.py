"""Which trainer rank sends which tensors in a sharded push, and whose shards it gathers. Pure, without torch.

A tensor is sent by a rank of the pipeline stage that has it. An expert is sent by a rank that owns it; what several
ranks could send goes to the one with least to send. The sender gathers the tensor-parallel parts from its group, so
nobody holds more than the tensors that are on their way. What engines fuse as they load is one unit, which one rank
sends: query, key and value; gate and up; latent attention's two first projections.

Senders take turns, in an order that all engines share: an engine serves one call at a time and passes a broadcast on
to the next engine, so two engines that began with different senders would wait for each other for ever. Each engine
rank takes whole tensors and cuts its own part, as SGLang's loaders do, whatever the engine's layout. So its link
limits the push, and senders side by side would not be faster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from rlsys.config import Config
from rlsys.config.trainer import ParallelConfig
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import layer_stages
from rlsys.convert.table import Entry, entries, held_as, slots
from rlsys.precision import is_quantised

MOST_SENDERS = 32
"""Each sender shares a process group with all engines, of which every engine rank keeps a communicator."""


@dataclass(frozen=True)
class Part:
    """A parameter of the whole model, and the ranks whose shards make it up, in the order of the cut; one rank where
    nothing is cut."""

    entry: Entry
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Sending:
    """What one rank sends, in the order of the name table."""

    sender: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class SendersPlan:
    """`sent`: bytes that each trainer rank sends, to engines (once, however many they are) and to the senders that
    gather its shards. `received`: bytes that each engine rank takes."""

    sendings: tuple[Sending, ...]
    sent: tuple[float, ...]
    received: float

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


def plan_senders(
    config: Config, hf: HFConfig, *, experts_together: bool = False, senders: int | None = MOST_SENDERS
) -> SendersPlan:
    """`experts_together`: one rank sends all experts of a layer, because no checksum could be put together from parts
    (rlsys.weights.hashes). Families that stack experts need it in any case. `senders`: at most so many, but one a
    stage; None: every rank may. An owner that is no sender passes its experts to one of its stage.
    """
    p, ranks = config.parallel, Ranks(config.parallel, hf.experts)
    stages, able = layer_stages(hf.layers, p.pp, p.vpp), _able(ranks, senders)
    jobs = []
    for unit in _units(hf, experts_together):
        stage = _stage(unit[0], stages)
        holders = set.intersection(*(ranks.holders(entry, stage) for entry in unit))
        candidates = [rank for rank in able[stage] if rank in holders] or able[stage]
        jobs.append((candidates, sum(_pushed_bytes(entry, config) for entry in unit), unit))
    sent = [0.0] * p.world_size
    given: dict[int, list[Part]] = {}
    # Who has no choice first, then the largest: what many could send evens out the rest.
    for candidates, size, unit in sorted(jobs, key=lambda job: (len(job[0]), -job[1])):
        sender = min(candidates, key=lambda rank: sent[rank])
        sent[sender] += size
        for entry in unit:
            part = Part(entry, ranks.sources(entry, sender))
            given.setdefault(sender, []).append(part)
            for source in part.sources:
                if source != sender:
                    sent[source] += entry.elements * _WIDTH[config.model.dtype] / len(part.sources)
    order = {next(iter(entry.hf)): i for i, entry in enumerate(entries(hf))}
    sendings = tuple(
        Sending(sender, tuple(sorted(parts, key=lambda part: order[next(iter(part.entry.hf))])))
        for sender, parts in sorted(given.items())
    )
    return SendersPlan(sendings, tuple(sent), sum(size for _, size, _ in jobs))


_WIDTH = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""


def _pushed_bytes(entry: Entry, config: Config) -> int:
    """As engines get it; scales of FP8 blocks, 4 bytes for 16,384 weights, are left out."""
    quantised = config.model.fp8 != "none"
    return sum(
        math.prod(shape) * (1 if quantised and is_quantised(name) else _WIDTH[config.model.dtype])
        for name, shape in entry.hf.items()
    )


def _able(ranks: Ranks, senders: int | None) -> list[list[int]]:
    """Of each stage the ranks that may send, spread evenly over it."""
    pp, lanes = ranks.parallel.pp, ranks.lanes
    each = lanes if senders is None else min(lanes, max(1, senders // pp))
    return [[ranks.of_stage(stage)[i * lanes // each] for i in range(each)] for stage in range(pp)]


def _stage(entry: Entry, stages: list[int]) -> int:
    """What belongs to no layer is on the first stage if it is the embedding, else on the last."""
    if entry.layer is not None:
        return stages[entry.layer]
    return 0 if entry.megatron.startswith("embedding.") else stages[-1]


def _units(hf: HFConfig, experts_together: bool) -> list[list[Entry]]:
    """What one rank must send, in the order of the table."""
    stacked, units = slots(hf), defaultdict[str, list[Entry]](list)
    for entry in entries(hf):
        first = next(iter(entry.hf))
        if first in stacked:
            units[stacked[first].name].append(entry)
        elif entry.expert is not None and not experts_together:
            units[first].append(entry)
        else:
            units[held_as(entry, hf)].append(entry)
    return list(units.values())
