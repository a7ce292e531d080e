"""Which engine a sample goes to. Pure: candidates in, one of them out; no clock, no server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

IMBALANCE = 1.25
SLACK = 16


@dataclass(frozen=True)
class Candidate:
    """An engine that may serve now. `load`: samples in flight on it."""

    url: str
    load: int


def least_loaded(candidates: Sequence[Candidate], prefer: str | None = None) -> Candidate:
    """Fewest samples in flight; the first of equals."""
    return min(candidates, key=lambda c: c.load)


def prefix_affinity(candidates: Sequence[Candidate], prefer: str | None = None) -> Candidate:
    """The engine that holds the sample's prefix (`prefer`), unless that one is a hot spot.

    Affinity gives way when its load exceeds IMBALANCE times the smallest load plus SLACK: recomputing a prefix
    costs less than waiting behind a queue.
    """
    least = least_loaded(candidates)
    kept = next((c for c in candidates if c.url == prefer), None)
    if kept is not None and kept.load <= IMBALANCE * least.load + SLACK:
        return kept
    return least
