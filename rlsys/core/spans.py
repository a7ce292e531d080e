"""Parts of a response, by their places: who sampled which tokens, what was only read, where experts lie."""

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


def before(spans: Iterable[S], end: int) -> list[S]:
    """What of them lies before token `end`."""
    return [replace(s, end=min(s.end, end)) for s in spans if s.start < end]


class TurnMark(NamedTuple):
    """What one turn of the model is worth. `matched`: it did as the trajectory that it follows (replayed ones)."""

    reward: float
    matched: bool = True


class RoutePlace(NamedTuple):
    """Where an engine has written routes: its segment file, and a record in it (rlsys/segments/route_records.py)."""

    segment: str
    offset: int
    length: int
    checksum: int
    """The record's, which tells it from any other."""


@dataclass(slots=True)
class RouteSpan:
    """The experts that the engine chose at sequence positions [start, end) of prompt + response.

    Position p is the forward pass that read token p and predicted token p + 1, so a whole sequence of n tokens has
    n - 1 of them. `experts`: unsigned little-endian integers `[end - start, layers, topk]`, of one byte where no id
    of the span exceeds 255 and of two elsewhere: the width is len(experts) / ((end - start) * layers * topk).
    `layers` counts all layers of the model; a dense one has zeros. Where `place` says where they lie, `experts` is
    empty.
    """

    start: int
    end: int
    experts: bytes
    place: RoutePlace | None = None


@dataclass(slots=True)
class Tops:
    """What a turn is to tell of its tokens: the `most` most probable ids in the place of each. In memory only."""

    most: int
    found: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """By response token: (log-prob, id), the most probable first."""


class Fork(NamedTuple):
    """A sample's first `at` response tokens are those of the sample at this `place` of its group."""

    place: int
    at: int


class Piece(NamedTuple):
    """Where some of a sample's tokens lie: a segment file of the run and bytes in it (rlsys/segments/records.py)."""

    segment: str
    offset: int
    length: int
