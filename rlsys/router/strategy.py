"""Routing strategies: choose an engine for a request. Pure functions without clock, randomness or server.

A strategy is named in the config (`router.strategy`):

    prefix_affinity    the engine with the cached prefix, unless it is a hot spot
    least_tokens       the fewest tokens in flight: a long sample weighs more than a short one
    power_of_two       the better of two engines selected by the request's key: no herding on outdated loads
    version_aware      engines with the weights of the sample's last token, if there are any
    hardware_affinity  the engine where it costs all requests the least time in total, by measured speed

Candidates have different weights during a rolling push (`weights.rolling`) only. version_aware then keeps a
resumed sample on the weights it started with, and may be interrupted once more for it; the others fill the
engines that were just updated, and are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Protocol, TypeVar

IMBALANCE = 1.25
SLACK = 16
"""A prefix's engine is too busy with more than IMBALANCE times the smallest number of requests plus SLACK.

SLACK lets up to 16 siblings start together on an idle engine; IMBALANCE tolerates random differences of large
loads.
"""


class Candidate(Protocol):
    """An engine that may serve now.

    `load`: requests in it; `tokens`: their prompt and response tokens; `unread`: prompt tokens still to be
    processed; `slots`: requests that it decodes concurrently. `seconds_to_read`, `seconds_to_write`: see
    speed.py; None: unknown.
    """

    @property
    def url(self) -> str: ...
    @property
    def load(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def unread(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def seconds_to_read(self) -> float | None: ...
    @property
    def seconds_to_write(self) -> tuple[float, float] | None: ...


Engine = TypeVar("Engine", bound=Candidate)


@dataclass(frozen=True)
class RoutingRequest:
    """Properties of a request that matter for routing.

    `prefer`: the engine with its cached prefix; `version`: the weights of its last token, None for a fresh one;
    `key`: any number that is constant over its life; `avoid`: engines that failed on it, excluded while there
    are others; `read`: its prompt tokens; `write`: the number of tokens it is expected to generate.
    """

    prefer: str | None = None
    version: int | None = None
    key: int = 0
    avoid: frozenset[str] = frozenset()
    read: int = 0
    write: float = 0.0


class Strategy(Protocol):
    """Chooses one of the candidates, of which there is at least one."""

    def __call__(self, candidates: Sequence[Engine], request: RoutingRequest) -> Engine: ...


_LOAD = attrgetter("load")


def least_loaded(candidates: Sequence[Engine]) -> Engine:
    """Return the engine with the fewest requests, the first of equals."""
    return min(candidates, key=_LOAD)


def is_hot(candidate: Candidate, candidates: Sequence[Candidate]) -> bool:
    """Return whether the load exceeds IMBALANCE times the smallest load plus SLACK.

    Recomputing a prefix then costs less than waiting.
    """
    return candidate.load > SLACK and candidate.load > IMBALANCE * min(map(_LOAD, candidates)) + SLACK


def prefix_affinity(candidates: Sequence[Engine], request: RoutingRequest) -> Engine:
    """Return the engine with the cached prefix unless it is hot, otherwise the least loaded."""
    if request.prefer is not None:
        preferred = next((c for c in candidates if c.url == request.prefer), None)
        if preferred is not None and not is_hot(preferred, candidates):
            return preferred
    return least_loaded(candidates)


def least_tokens(candidates: Sequence[Engine], request: RoutingRequest) -> Engine:
    """Return the engine with the fewest tokens in flight, then the fewest requests."""
    return min(candidates, key=lambda c: (c.tokens, c.load))


def power_of_two(candidates: Sequence[Engine], request: RoutingRequest) -> Engine:
    """Return the less loaded of two different engines selected by the key (Mitzenmacher 2001)."""
    n = len(candidates)
    if n == 1:
        return candidates[0]
    first, step = request.key % n, request.key // n % (n - 1)
    pair = candidates[first], candidates[(first + 1 + step) % n]
    return min(pair, key=lambda c: (c.load, c.tokens))


def version_aware(candidates: Sequence[Engine], request: RoutingRequest) -> Engine:
    """Prefer engines with the sample's own weights, for a fresh one the newest, with prefix affinity among them.

    Falls back to all engines if the choice would be a hot spot among all.
    """
    newest = max(c.version for c in candidates)
    same_version = [
        c for c in candidates if c.version == (newest if request.version is None else request.version)
    ]
    if same_version:
        engine = prefix_affinity(same_version, request)
        if not is_hot(engine, candidates):
            return engine
    return prefix_affinity(candidates, request)


_GUESSED_READ, _GUESSED_WRITE = 0.01, (0.5, 0.5)
"""Defaults while no engine has been measured; only their ratios matter."""


def hardware_affinity(candidates: Sequence[Engine], request: RoutingRequest) -> Engine:
    """Return the engine where the request costs all requests the least time in total, the first of equals.

    While an engine processes the prompt, its other requests wait; while it decodes, each of their passes takes
    slightly longer. Long prompts thus go where they disturb least and to engines with fast prefill, long
    responses to those with fast decoding. An engine without measurements counts as the average. RollArt (row 34
    of docs/seeds.md) assigns hardware by task; here the measured speeds decide.
    """
    read_times = [c.seconds_to_read for c in candidates if c.seconds_to_read is not None]
    usual_read = fmean(read_times) if read_times else _GUESSED_READ
    lines = [c.seconds_to_write for c in candidates if c.seconds_to_write is not None]
    usual_write = (fmean(a for a, _ in lines), fmean(b for _, b in lines)) if lines else _GUESSED_WRITE

    def seconds(c: Candidate) -> float:
        read = usual_read if c.seconds_to_read is None else c.seconds_to_read
        base, per_request = c.seconds_to_write or usual_write
        unread = 0 if c.url == request.prefer else request.read
        reading = c.unread + unread * (1 + c.load)  # it waits for earlier prompts, the others wait for it
        writing = base + per_request * (
            1 + 2 * c.load
        )  # its own passes at load + 1, and the delay of `load` others
        return read * reading + writing * request.write * max(1.0, (1 + c.load) / c.slots)

    return min(candidates, key=seconds)


STRATEGIES: dict[str, Strategy] = {
    "prefix_affinity": prefix_affinity,
    "least_tokens": least_tokens,
    "power_of_two": power_of_two,
    "version_aware": version_aware,
    "hardware_affinity": hardware_affinity,
}
