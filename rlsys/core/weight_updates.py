"""Messages between trainer and rollout process about a weight update."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineAddress:
    """An engine to which the trainer sends weights.

    Attributes:
        url: address of the engine.
        tp: tensor-parallel size of the engine.
        holds: weight version that attestation has confirmed on the engine; -1: none.
        index: number of the engine in the run's layout; None: it joined later.
        key: admin key of the engine; empty: it needs none.
        epoch: number of this update on the engine, which refuses tensors of another update; None: none.
        chain: number of the relay chain that ends with the engine, if it joined later.
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
    """Permission to send weights, from begin_push until end_push with the same version and engines.

    A rolling update has one for each round.

    Attributes:
        weight_version: the version to send.
        engines: the engines that receive the weights.
        canaries: token sequences of prompts and responses on which log-probs of trainer and engines are compared.
            Random tokens would be of no use: their log-probs are so large that rounding exceeds the bound.
    """

    weight_version: int
    engines: list[EngineAddress]
    canaries: list[list[int]]


@dataclass(slots=True)
class Canary:
    """A token sequence for attestation (invariant 8).

    Attributes:
        ids: the token ids, [n].
        logp: the trainer's log-probs of the tokens after the first, [n - 1].
    """

    ids: list[int]
    logp: list[float]
