"""RequestSender: sends one request of a sample to one engine, and updates the sample."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rlsys.config.rollout import Truncation
from rlsys.core.spans import TopLogprobs
from rlsys.core.types import Status, TokenSequence
from rlsys.engine_requests.sampling import MAX_STOPS
from rlsys.router.dispatch import EVALUATION, Dispatcher, Interruption
from rlsys.router.engine_state import EngineState, Flight
from rlsys.router.failure_policy import PoisonDetector, attempt
from rlsys.router.pool import Pool
from rlsys.router.response_handler import ResponseHandler
from rlsys.router.strategy import RoutingRequest
from rlsys.router.turn_ends import TurnEnds

TURNS = 64
"""Number of recent turns in the running mean of turn lengths."""


@dataclass(frozen=True)
class Turn:
    """The parameters of a sample's requests.

    Args:
        limit: tokens of its response over all requests.
        pinned: use the engine that is pinned for an evaluation.
        tops: collects top log-probs of its tokens.
        sampling: further sampling parameters, by SGLang's names.
        routes: request the routed experts of its tokens.
        admission_timeout: seconds that a request waits for an engine at most.
    """

    limit: int
    temperature: float
    truncation: Truncation | None
    ends: TurnEnds
    pinned: bool
    tops: TopLogprobs | None = None
    sampling: Mapping[str, object] = field(default_factory=dict)
    routes: bool = False
    admission_timeout: float | None = None

    def options(self) -> dict[str, Any]:
        """Return the rarer arguments of EngineClient.generate."""
        options: dict[str, Any] = {}
        if self.tops is not None:
            options["tops"] = self.tops.k
        sampling = {**self.sampling, "ignore_eos": True} if self.ends.ignores_eos else self.sampling
        if sampling:
            options["sampling"] = sampling
        if self.routes:
            options["store_routes"] = False
        return options

    def status(self, sample: TokenSequence, finish: str | None = None) -> Status:
        """Return the status before a request, or after one that ended with `finish`.

        SGLang checks a response's last token last: where it aborts a request, or the budget is used up, that
        token may be the one that ends the response. Continuing would write past the end, and a complete
        response would count as truncated.
        """
        if finish == "stop":
            return Status.FINISHED
        if not sample.observed_last and self.ends.is_ended(self.ends.turn_of(sample)):
            return Status.FINISHED
        full = finish == "length" or len(sample.response_ids) >= self.limit
        return Status.TRUNCATED if full else Status.PARKED


class RequestSender:
    """Sends requests, and remembers which engine has the prompt of a group in its cache.

    Args:
        routes: request the routed experts of each token.
        interruption: what happens to samples in flight during a push.
        reads_again: do not let interrupted samples reuse a cache of older weights.
    """

    def __init__(
        self,
        pool: Pool,
        dispatcher: Dispatcher,
        arrivals: ResponseHandler,
        suspects: PoisonDetector,
        *,
        routes: bool,
        interruption: Interruption,
        reads_again: bool,
    ) -> None:
        self._pool, self._dispatcher = pool, dispatcher
        self._response_handler, self._poison_detector = arrivals, suspects
        self._routes, self._interruption, self._reads_again = routes, interruption, reads_again
        self._order = itertools.count()
        self.run_id = uuid.uuid4().hex[:8]
        self._group_engine: dict[int, str] = {}
        self._turn_tokens: float | None = None
        """Running mean of the length of turns."""
        self.resumes = 0

    def id_for(self, sample_id: int) -> str:
        """Return the id of the next request.

        It ends with a point, so that it is not a prefix of another id, which SGLang would abort too.
        """
        return f"{self.run_id}-{sample_id}-{next(self._order)}."

    def routing_request(self, sample: TokenSequence, limit: int) -> RoutingRequest:
        """Describe a sample's next request to the routing strategy. `limit`: see Turn.

        A prefix stays in an engine's cache as long as the weights. A response of any length is expected to grow
        by the mean length of turns, up to its limit: a long response of a long-tailed distribution does not end
        sooner for being long.
        """
        version = sample.spans[-1].version if sample.spans else None
        last = None if sample.engine is None else self._pool.find(sample.engine)
        has_prefix = last is not None and last.version == version
        prefer = sample.engine if has_prefix else self._group_engine.get(sample.group_id)
        response_tokens = len(sample.response_ids)
        remaining = max(0, limit - response_tokens)
        write = remaining if self._turn_tokens is None else min(remaining, self._turn_tokens)
        return RoutingRequest(
            prefer, version, sample.seed, read=len(sample.prompt_ids) + response_tokens, write=write
        )

    def invalidate_caches(self, urls: Collection[str]) -> None:
        """Forget the cached prefixes of these engines, which get other weights."""
        self._group_engine = {g: url for g, url in self._group_engine.items() if url not in urls}

    async def send(self, engine: EngineState, sample: TokenSequence, turn: Turn) -> str:
        """Send one request. Afterwards the sample is terminal, or PARKED with every token that arrived.

        Returns:
            the message of the server error that ended it, or an empty string.
        """
        unread = 0 if self._has_prefix(engine, sample) else len(sample.prompt_ids) + len(sample.response_ids)
        if sample.sample_id != EVALUATION:
            self._group_engine[sample.group_id] = engine.url
            resumed = bool(sample.response_ids) and not sample.observed_last
            sample.resumes += resumed
            self.resumes += resumed
        rid = self.id_for(sample.sample_id)
        sample.engine, sample.status = engine.url, Status.IN_FLIGHT
        start, finish = len(sample.response_ids), None
        ids, subject = [*sample.prompt_ids, *sample.response_ids], f"sample {sample.sample_id}"
        flight = Flight(
            rid,
            sample,
            asyncio.timeout(None),
            pinned=turn.pinned,
            cache_source=_cache_source(engine, sample),
            unread=unread,
        )
        try:
            async with attempt(self._dispatcher, engine, flight, len(ids), subject) as result:
                stream = engine.client.generate(
                    ids,
                    rid=rid,
                    max_new_tokens=turn.limit - start,
                    temperature=turn.temperature,
                    seed=sample.seed,
                    stop_ids=sorted(turn.ends.ids),
                    stop_texts=turn.ends.texts[:MAX_STOPS],  # the router itself detects the others
                    routes_from=self._routes_from(sample) if self._routes or turn.routes else None,
                    cache_key=self._cache_key(engine, sample),
                    truncation=turn.truncation,
                    **turn.options(),
                )
                async with aclosing(stream):
                    async for segment in stream:
                        at = len(sample.response_ids)
                        finish = await self._response_handler.receive(engine, flight, segment, turn.ends)
                        if finish == "abort" and not segment.prompt_tokens:  # not in the engine's own count
                            engine.received -= flight.received_tokens
                        if turn.tops is not None:
                            tops = (segment.tops or [])[: len(sample.response_ids) - at]
                            turn.tops.by_token.update({at + i: top for i, top in enumerate(tops)})
            return self._poison_detector.record_end(result, engine, sample)
        finally:
            sample.status = turn.status(sample, finish)
            if sample.status.terminal and sample.sample_id != EVALUATION:
                self._record_turn_length(sample)

    def _record_turn_length(self, sample: TokenSequence) -> None:
        """Update the running mean of turn lengths."""
        tokens = len(sample.response_ids) - (sample.observed[-1].end if sample.observed else 0)
        mean = self._turn_tokens
        self._turn_tokens = tokens if mean is None else mean + (tokens - mean) / TURNS

    def _has_prefix(self, engine: EngineState, sample: TokenSequence) -> bool:
        own_prefix = (
            bool(sample.spans) and sample.engine == engine.url and sample.spans[-1].version == engine.version
        )
        return own_prefix or self._group_engine.get(sample.group_id) == engine.url

    def _routes_from(self, sample: TokenSequence) -> int | None:
        """Return the first position whose routes are requested.

        0 at first; later the last sampled token, which no pass has processed.
        """
        if sample.sample_id == EVALUATION:
            return None
        if not sample.response_ids:
            return 0
        unread = sample.observed[-1].end - sample.observed[-1].start if sample.observed_last else 0
        return len(sample.prompt_ids) + len(sample.response_ids) - 1 - unread

    def _cache_key(self, engine: EngineState, sample: TokenSequence) -> str | None:
        """Return the key that separates cached prefixes.

        Where caches outlive a push, only samples of the same first version may share them; with `reads_again`
        only samples of the same weights.
        """
        if self._interruption != "in_place":
            return None
        if self._reads_again:
            return str(engine.version)
        return str(sample.spans[0].version if sample.spans else engine.version)


def _cache_source(engine: EngineState, sample: TokenSequence) -> str:
    """Return why the sample's prefix may be in the engine's cache."""
    if not sample.response_ids:
        return "sibling"
    if sample.spans[-1].version != engine.version:
        return "update"
    return "turn" if sample.observed_last else "resume"
