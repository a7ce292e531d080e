"""Spans of the tokens of a response, and locations of stored tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar


@dataclass(slots=True)
class VersionSpan:
    """Response tokens [start, end), sampled with one weight version."""

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
    """Return copies of the spans without the tokens from `end` on."""
    return [replace(s, end=min(s.end, end)) for s in spans if s.start < end]


class TurnReward(NamedTuple):
    """Reward of one turn of the model.

    Attributes:
        reward: the reward.
        matched: whether the turn's action equals the recorded action; True if there is no recorded trajectory.
    """

    reward: float
    matched: bool = True


class RouteLocation(NamedTuple):
    """Location of a record with routes, which an engine wrote (rlsys/segments/route_records.py).

    Attributes:
        segment: name of the file, relative to RUN/segments.
        offset: offset of the record in bytes.
        length: length of the record in bytes.
        checksum: checksum of the record, which identifies it.
    """

    segment: str
    offset: int
    length: int
    checksum: int


@dataclass(slots=True)
class RouteSpan:
    """Experts that the engine selected at the positions [start, end) of prompt + response.

    At position p, the forward pass reads token p and predicts token p + 1, so a sequence of n tokens has n - 1
    positions.

    Attributes:
        experts: ids of the experts, unsigned little-endian integers `[end - start, layers, topk]`. They have one byte
            each if no id of the span exceeds 255, and two bytes otherwise. `layers` counts all layers of the model; a
            dense layer has zeros. Empty if `location` is set.
        location: record with the experts; None: `experts` has them.
    """

    start: int
    end: int
    experts: bytes
    location: RouteLocation | None = None


@dataclass(slots=True)
class TopLogprobs:
    """Request for the most probable ids at each token of a turn, and its result. It is not saved.

    Attributes:
        k: number of ids at each token.
        by_token: index of the response token -> (log-prob, id) pairs, the most probable first.
    """

    k: int
    by_token: dict[int, list[tuple[float, int]]] = field(default_factory=dict)


class Fork(NamedTuple):
    """Origin of a forked sample.

    Attributes:
        source: index in the group of the sample whose first tokens were copied.
        at: number of copied response tokens.
    """

    source: int
    at: int


class Piece(NamedTuple):
    """Location of a record with tokens of a sample (rlsys/segments/records.py).

    Attributes:
        segment: name of the file, relative to RUN/segments.
        offset: offset of the record in bytes.
        length: length of the record in bytes.
    """

    segment: str
    offset: int
    length: int
