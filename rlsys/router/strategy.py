"""Which engine a request goes to. Pure: candidates and a wish in, one of them out; no clock, no dice, no server.

A strategy is named in the config (`router.strategy`):

    prefix_affinity    the engine that holds the prefix, unless it is a hot spot
    least_tokens       the fewest tokens in flight: a long sample weighs more than a short one
    power_of_two       the better of two engines that the request's key picks: no herd when figures are late
    version_aware      the weights that made the sample's last token, as long as some candidate has them
    hardware_affinity  where it costs all requests together the least time, by the measured speed of the engines

Candidates have different weights while a rolling push goes round (`weights.rolling`), and only then: version_aware
keeps a resumed sample to the weights that it began with, and may be interrupted once more for it; the others fill the
engines that have just been updated, and are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Protocol, TypeVar

IMBALANCE = 1.25
SLACK = 16
"""When a prefix's engine is too busy for it: more than IMBALANCE times the least busy one's requests, plus SLACK.
SLACK lets up to 16 siblings start together on an idle engine; IMBALANCE lets loads of hundreds differ by chance."""


class Candidate(Protocol):
    """An engine that may serve now. `load`: requests in it; `tokens`: what they hold, prompts and responses;
    `unread`: tokens of prompts that it has still to read; `slots`: requests that it decodes at once.
    `seconds_to_read`, `seconds_to_write`: see speed.py; None: not known."""

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
class Wish:
    """What a request would like. `prefer`: the engine that holds its prefix; `version`: the weights that made its
    last token, None for a fresh one; `key`: any number that stays the same over its life; `avoid`: engines that
    failed it, to be left out as long as there are others; `read`: tokens of its prompt; `write`: tokens that it is
    expected to make.
    """

    prefer: str | None = None
    version: int | None = None
    key: int = 0
    avoid: frozenset[str] = frozenset()
    read: int = 0
    write: float = 0.0


class Strategy(Protocol):
    def __call__(self, candidates: Sequence[Engine], wish: Wish) -> Engine: ...


_LOAD = attrgetter("load")


def least_loaded(candidates: Sequence[Engine]) -> Engine:
    """Fewest requests; the first of equals."""
    return min(candidates, key=_LOAD)


def is_hot(candidate: Candidate, candidates: Sequence[Candidate]) -> bool:
    """Whether its load exceeds IMBALANCE times the smallest load plus SLACK: recomputing a prefix costs less than
    waiting behind such a queue.
    """
    return candidate.load > SLACK and candidate.load > IMBALANCE * min(map(_LOAD, candidates)) + SLACK


def prefix_affinity(candidates: Sequence[Engine], wish: Wish) -> Engine:
    """The engine that holds the prefix unless it is hot, else the least loaded."""
    if wish.prefer is not None:
        kept = next((c for c in candidates if c.url == wish.prefer), None)
        if kept is not None and not is_hot(kept, candidates):
            return kept
    return least_loaded(candidates)


def least_tokens(candidates: Sequence[Engine], wish: Wish) -> Engine:
    """Fewest tokens in flight, then fewest requests."""
    return min(candidates, key=lambda c: (c.tokens, c.load))


def power_of_two(candidates: Sequence[Engine], wish: Wish) -> Engine:
    """The less loaded of two different engines that the key picks (Mitzenmacher 2001)."""
    n = len(candidates)
    if n == 1:
        return candidates[0]
    first, step = wish.key % n, wish.key // n % (n - 1)
    pair = candidates[first], candidates[(first + 1 + step) % n]
    return min(pair, key=lambda c: (c.load, c.tokens))


def version_aware(candidates: Sequence[Engine], wish: Wish) -> Engine:
    """Engines with the sample's own weights, for a fresh one the newest; prefix affinity among them.

    Gives way to all engines where the choice would be a hot spot among all.
    """
    newest = max(c.version for c in candidates)
    own = [c for c in candidates if c.version == (newest if wish.version is None else wish.version)]
    if own:
        chosen = prefix_affinity(own, wish)
        if not is_hot(chosen, candidates):
            return chosen
    return prefix_affinity(candidates, wish)


_GUESSED_READ, _GUESSED_WRITE = 0.01, (0.5, 0.5)
"""Of engines before anything is known of any; only their ratios matter."""


def hardware_affinity(candidates: Sequence[Engine], wish: Wish) -> Engine:
    """The engine where the request costs all requests together the least time; the first of equals.

    While an engine reads its prompt, the others in it wait; while it writes, each of their passes takes a little
    longer. So long prompts go where they disturb least, and to engines that read fast; long responses go to those
    that write fast. An engine of which nothing is known counts as the average. RollArt (row 34 of docs/seeds.md) says
    by task which hardware it belongs to; here the engines' measured speeds say it.
    """
    known = [c.seconds_to_read for c in candidates if c.seconds_to_read is not None]
    usual_read = fmean(known) if known else _GUESSED_READ
    lines = [c.seconds_to_write for c in candidates if c.seconds_to_write is not None]
    usual_write = (fmean(a for a, _ in lines), fmean(b for _, b in lines)) if lines else _GUESSED_WRITE

    def seconds(c: Candidate) -> float:
        read = usual_read if c.seconds_to_read is None else c.seconds_to_read
        alone, further = c.seconds_to_write or usual_write
        unread = 0 if c.url == wish.prefer else wish.read
        reading = c.unread + unread * (1 + c.load)  # it waits for what is there; what is there waits for it
        writing = alone + further * (
            1 + 2 * c.load
        )  # its own passes with load + 1; and `load` others, each longer
        return read * reading + writing * wish.write * max(1.0, (1 + c.load) / c.slots)

    return min(candidates, key=seconds)


STRATEGIES: dict[str, Strategy] = {
    "prefix_affinity": prefix_affinity,
    "least_tokens": least_tokens,
    "power_of_two": power_of_two,
    "version_aware": version_aware,
    "hardware_affinity": hardware_affinity,
}
UNMEASURED = tuple(name for name in STRATEGIES if name != "hardware_affinity")
"""Those that need no figures of the engines' speed: a router that passes bytes on counts no tokens."""
