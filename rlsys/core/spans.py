"""Spans of a response by token position: weight versions, observations, expert routes, forks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar


@dataclass(slots=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by weights `version` (a push counter, never reused)."""

    version: int
    start: int
    end: int


@dataclass(slots=True)
class TokenSpan:
    """Response tokens [start, end)."""

    start: int
    end: int


S = TypeVar("S", VersionSpan, TokenSpan)


def truncate_spans(spans: Iterable[S], end: int) -> list[S]:
    """Return the parts of the spans before token `end`."""
    return [replace(s, end=min(s.end, end)) for s in spans if s.start < end]


class TurnReward(NamedTuple):
    """Reward of one turn of the model.

    Attributes:
        reward: the reward.
        matched: whether the turn's action equals the recorded one, if the trajectory replays another one.
    """

    reward: float
    matched: bool = True


class RouteLocation(NamedTuple):
    """Location of routes that an engine wrote: a record of a segment file (rlsys/segments/route_records.py)."""

    segment: str
    offset: int
    length: int
    checksum: int
    """Checksum of the record, which identifies it."""


@dataclass(slots=True)
class RouteSpan:
    """Experts that the engine selected at sequence positions [start, end) of prompt + response.

    Position p is the forward pass that read token p and predicted token p + 1, so a sequence of n tokens has
    n - 1 positions.

    Attributes:
        experts: unsigned little-endian integers `[end - start, layers, topk]`, of one byte if no id of the
            span exceeds 255, else of two: the width is len(experts) / ((end - start) * layers * topk).
            `layers` counts all layers of the model; a dense layer has zeros. Empty if `location` is set.
        location: where the experts are stored, if not in `experts`.
    """

    start: int
    end: int
    experts: bytes
    location: RouteLocation | None = None


@dataclass(slots=True)
class TopLogprobs:
    """Request for the `k` most probable ids at each token of a turn, and the result. In memory only."""

    k: int
    by_token: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """Response token -> (log-prob, id) pairs, the most probable first."""


class Fork(NamedTuple):
    """Origin of a forked sample: its first `at` response tokens are those of sample `source` of its group."""

    source: int
    at: int


class Piece(NamedTuple):
    """Location of some of a sample's tokens: bytes of a segment file of the run (rlsys/segments/records.py)."""

    segment: str
    offset: int
    length: int
