"""Figures of the rehearsal of one rank, which the rehearsing process sends to the report."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

KINDS = ("weights", "gradients", "optimizer", "activations", "communication", "other")
"""Kinds of GPU memory. communication: output buffers of collectives; other: temporaries of the optimizer step."""
HOST = "host"
"""Kind of host memory, which peaks exclude."""
PHASES = ("score", "passes", "reduce", "update", "gather")
"""Phases of a step in their order.

    score     scoring pass
    passes    forward and backward passes
    reduce    reduction of gradients over data-parallel ranks
    update    optimizer step and gathering of its parameters
    gather    gathering of full tensors for the engines
"""


@dataclass
class Phase:
    """Figures of a phase.

    Attributes:
        name: One of PHASES.
        peak: Live bytes at the peak, by kind.
        flops: FLOPs of matrix products and attention.
        seconds: Duration of the rehearsal of the phase.
        operations: Number of torch operations.
    """

    name: str
    peak: dict[str, int]
    flops: int
    seconds: float
    operations: int

    @property
    def total(self) -> int:
        """Bytes of GPU memory at the peak."""
        return sum(n for kind, n in self.peak.items() if kind != HOST)


@dataclass
class Collective:
    """All calls of one operation in one phase, with the same group and dtype.

    Attributes:
        phase: One of PHASES, or "build".
        op: Name of the c10d operation.
        group: Description of the group.
        ranks: Global ranks of the group, or the two ranks of a send or a receive.
        across: Whether these ranks are on several nodes.
        dtype: Type of the tensors; "" without tensors.
        calls: Number of calls.
        bytes: Sum over the calls of the larger one of this rank's input and output.
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

    Attributes:
        rank: Global rank.
        world: Number of ranks.
        stage: Pipeline stage of the rank.
        stages: Number of pipeline stages.
        layers: Number of layers on the rank.
        parameters: Number of trained parameters on the rank.
        micro_batches: Number of micro-batches of the update.
        tokens: Number of tokens of a micro-batch, including padding.
        longest: Number of tokens of the longest sequence.
        live_bytes: Live bytes after the step, by kind.
        phases: Figures of each phase.
        collectives: Collective calls.
        guessed: Number of requests for values of fake tensors, which returned 1 or True, by request.
        resident: Maximum resident memory of the rehearsing process in bytes.
        notes: Parts of the config that the rehearsal ignores.
        hashed: Bytes that the rank hashes in a weight update.
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
    notes: list[str] = field(default_factory=list)
    hashed: int = 0

    @property
    def worst(self) -> Phase:
        """Phase with the largest peak."""
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
