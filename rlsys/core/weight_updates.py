"""Messages between trainer and rollout process about a weight update."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineAddress:
    """An engine to which the trainer sends weights.

    Attributes:
        url: its address.
        tp: its tensor-parallel size.
        holds: the weight version that attestation has confirmed; -1 if none.
        index: its number in the run's layout; None if it joined later.
        key: its admin key; empty if it needs none.
        epoch: number of this update on the engine, which refuses tensors with another one.
        chain: number of the relay chain that ends with it, for an engine that joined later.
    """

    url: str
    tp: int
    holds: int = -1
    index: int | None = None
    key: str = field(default="", repr=False)
    epoch: int | None = None
    chain: int | None = None


@dataclass(slots=True)
class WeightUpdate:
    """Permission to send weights: created by begin_push, ended by end_push with the same version and engines.

    A rolling update has one for each round.

    Attributes:
        weight_version: the version to send.
        engines: the receivers.
        canaries: token sequences on which trainer and engines are compared: real prompts and responses,
            because on random tokens log-probs are so large that rounding alone exceeds a useful bound.
    """

    weight_version: int
    engines: list[EngineAddress]
    canaries: list[list[int]]


@dataclass(slots=True)
class Canary:
    """A token sequence and the trainer's log-probs of its tokens 1, 2, ..., for attestation (invariant 8)."""

    ids: list[int]
    logp: list[float]
