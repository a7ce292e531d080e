"""Figures of the rehearsal of one rank: plain data between the rehearsing process and the report."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

KINDS = ("weights", "gradients", "optimizer", "activations", "communication", "other")
"""Kinds of memory. communication: buffers that a collective fills; other: temporaries of the optimizer step."""
HOST = "host"
"""Kind of memory on the host, which a peak does not include."""
PHASES = ("score", "passes", "reduce", "update", "gather")
"""Phases in their order: scoring pass, forward and backward passes, gradients over data-parallel ranks, optimizer
step with the gathering of its parameters, and the gathering of whole tensors for the engines."""


@dataclass
class Phase:
    """Figures of a phase. `peak`: bytes alive at the peak, by kind. `flops`: of matrix products and attention."""

    name: str
    peak: dict[str, int]
    flops: int
    seconds: float
    operations: int

    @property
    def total(self) -> int:
        return sum(n for kind, n in self.peak.items() if kind != HOST)


@dataclass
class Collective:
    """All calls of one kind in one phase.

    `bytes` of all calls together: the larger of this rank's input and output of each. `across`: whether the group has
    ranks on several nodes.
    """

    phase: str
    op: str
    group: str
    ranks: list[int]
    across: bool
    dtype: str
    calls: int
    bytes: int


@dataclass
class Figures:
    """Figures of one rank.

    `live_bytes`: bytes alive after the step, by kind. `guessed`: number of requests for values of fake tensors, which
    returned 1. `micro_batches` have `tokens` each, including padding.
    """

    rank: int
    world: int
    stage: int
    stages: int
    layers: int
    parameters: int
    micro_batches: int
    tokens: int
    longest: int
    live_bytes: dict[str, int]
    phases: list[Phase]
    collectives: list[Collective]
    guessed: dict[str, int]
    resident: int
    """Real memory of the rehearsing process, in bytes."""
    notes: list[str] = field(default_factory=list)
    hashed: int = 0
    """Bytes that this rank hashes in a weight update."""

    @property
    def worst(self) -> Phase:
        """Return the phase with the largest peak."""
        return max(self.phases, key=lambda phase: phase.total)

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, raw: dict[str, Any]) -> Figures:
        phases = [Phase(**phase) for phase in raw["phases"]]
        calls = [Collective(**call) for call in raw["collectives"]]
        return cls(**{**raw, "phases": phases, "collectives": calls})
