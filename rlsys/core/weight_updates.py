"""What a trainer and a rollout process tell each other about a weight push."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineAddress:
    """Where a trainer sends weights. `holds`: the weight version it has been attested to hold, -1 for none.

    `index`: its number in the run's layout, None for one that joined later. `chain`: of one that joined, the chain at
    whose end it is, if it is in one. `key`: its admin key; empty: it asks for none. `epoch`: of this push there; the
    engine takes nothing from a sender with another one.
    """

    url: str
    tp: int
    holds: int = -1
    index: int | None = None
    key: str = field(default="", repr=False)
    epoch: int | None = None
    chain: int | None = None


@dataclass(slots=True)
class PushTicket:
    """Permission to send weights: made by begin_push, ended by end_push with the same version and engines. A rolling
    push has a ticket for every round.

    `canaries`: token sequences that trainer and engines are compared on; real prompts and responses, because on
    random tokens log-probs are so large that rounding alone exceeds a useful bound.
    """

    weight_version: int
    engines: list[EngineAddress]
    canaries: list[list[int]]


@dataclass(slots=True)
class Canary:
    """A token sequence and the trainer's log-probs of its tokens 1.., for attestation (invariant 8)."""

    ids: list[int]
    logp: list[float]
