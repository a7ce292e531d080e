"""Routing strategies: choose an engine for a request. Pure functions without clock, randomness or server.

A strategy is named in the config (`router.strategy`):

    prefix_affinity    the engine with the cached prefix, unless it is a hot spot
    least_tokens       the fewest tokens in flight: a long sample weighs more than a short one
    power_of_two       the less loaded of two engines selected by the request's key
    version_aware      engines with the weights of the sample's last token, if there are any
    hardware_affinity  the engine where it costs all requests the least time in total, by measured speed

Candidates have different weights only during a rolling push (`weights.rolling`). version_aware then keeps a resumed
sample on its weights, which may cost another interruption. The other strategies send it to the engines that were
just updated, because these are empty.
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

SLACK lets up to 16 siblings start together on an idle engine. IMBALANCE tolerates random differences of large loads.
"""


class Candidate(Protocol):
    """An engine that may serve now.

    Attributes:
        load: number of requests in the engine.
        tokens: number of prompt and response tokens of these requests.
        version: weight version of the engine.
        pending_prefill: number of prompt tokens that the engine has not processed yet.
        slots: number of requests that the engine decodes concurrently.
        prefill_seconds: see Speed.prefill.
        decode_seconds: see Speed.decode.
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
    def pending_prefill(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def prefill_seconds(self) -> float | None: ...
    @property
    def decode_seconds(self) -> tuple[float, float] | None: ...


Engine = TypeVar("Engine", bound=Candidate)


@dataclass(frozen=True)
class RoutingRequest:
    """Properties of a request that matter for routing.

    Attributes:
        prefer: URL of the engine that has the prefix in its cache; None: unknown.
        version: weight version of the sample's last token; None: it has no token.
        key: a number that stays the same for a sample.
        avoid: URLs of the engines that failed on the request. They are excluded unless no other engine serves.
        prompt_tokens: number of tokens of the prompt and of the response so far.
        expected_tokens: number of tokens that the request is expected to generate.
    """

    prefer: str | None = None
    version: int | None = None
    key: int = 0
    avoid: frozenset[str] = frozenset()
    prompt_tokens: int = 0
    expected_tokens: float = 0.0


class Strategy(Protocol):
    """A routing strategy: chooses one of at least one candidate."""

    def __call__(self, candidates: Sequence[Engine], request: RoutingRequest) -> Engine: ...


_LOAD = attrgetter("load")


def least_loaded(candidates: Sequence[Engine]) -> Engine:
    """Return the engine with the fewest requests, the first one among equals."""
    return min(candidates, key=_LOAD)


def is_hot(candidate: Candidate, candidates: Sequence[Candidate]) -> bool:
    """Return whether the candidate's load exceeds IMBALANCE times the smallest load plus SLACK.

    If it does, recomputing a prefix on another engine costs less than waiting.
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
    """Apply prefix affinity to the engines with the sample's weight version. A new sample has the newest version.

    If there is no such engine, or the chosen one is a hot spot, apply prefix affinity to all engines.
    """
    newest = max(c.version for c in candidates)
    version = newest if request.version is None else request.version
    same_version = [c for c in candidates if c.version == version]
    if same_version:
        engine = prefix_affinity(same_version, request)
        if not is_hot(engine, candidates):
            return engine
    return prefix_affinity(candidates, request)


_DEFAULT_PREFILL, _DEFAULT_DECODE = 0.01, (0.5, 0.5)
"""Speeds before any engine is measured; only their ratios matter."""


def hardware_affinity(candidates: Sequence[Engine], request: RoutingRequest) -> Engine:
    """Return the engine where the request adds the least time to all requests in total, the first one among equals.

    While an engine prefills the prompt, its other requests wait; while it decodes the response, each of their passes
    takes slightly longer. Long prompts therefore go to engines with fast prefill and few requests, long responses to
    engines with fast decoding. An engine without measurements counts as average. RollArt (row 34 of docs/seeds.md)
    assigns hardware by task; this strategy uses measured speeds.
    """
    prefill_times = [c.prefill_seconds for c in candidates if c.prefill_seconds is not None]
    mean_prefill = fmean(prefill_times) if prefill_times else _DEFAULT_PREFILL
    lines = [c.decode_seconds for c in candidates if c.decode_seconds is not None]
    mean_decode = (fmean(a for a, _ in lines), fmean(b for _, b in lines)) if lines else _DEFAULT_DECODE

    def seconds(c: Candidate) -> float:
        seconds_per_prompt_token = mean_prefill if c.prefill_seconds is None else c.prefill_seconds
        base, per_request = c.decode_seconds or mean_decode
        prompt_tokens = 0 if c.url == request.prefer else request.prompt_tokens
        # The request waits for earlier prompts; all other requests wait for its prompt.
        prefill = c.pending_prefill + prompt_tokens * (1 + c.load)
        # Its own passes with load + 1 requests, and the delay of the `load` other requests.
        decode = base + per_request * (1 + 2 * c.load)
        oversubscription = max(1.0, (1 + c.load) / c.slots)
        return seconds_per_prompt_token * prefill + decode * request.expected_tokens * oversubscription

    return min(candidates, key=seconds)


STRATEGIES: dict[str, Strategy] = {
    "prefix_affinity": prefix_affinity,
    "least_tokens": least_tokens,
    "power_of_two": power_of_two,
    "version_aware": version_aware,
    "hardware_affinity": hardware_affinity,
}
