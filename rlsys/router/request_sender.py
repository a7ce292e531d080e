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
        limit: largest number of response tokens over all requests.
        ends: what ends the turn.
        pinned: use the engine that is pinned for an evaluation.
        tops: collects top log-probs of the tokens.
        sampling: additional sampling parameters, by SGLang's names.
        routes: request the routed experts of the tokens.
        admission_timeout: seconds for which a request may wait for an engine; None: unlimited.
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
        """Return those arguments of EngineClient.generate that most requests do not need."""
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

        If SGLang aborts a request, or the budget is used up, it does not check whether the last token ends the
        response. Without a check here, the sample would continue past its end, or a complete response would
        count as truncated.
        """
        if finish == "stop":
            return Status.FINISHED
        if not sample.observed_last and self.ends.is_ended(self.ends.turn_of(sample)):
            return Status.FINISHED
        at_limit = finish == "length" or len(sample.response_ids) >= self.limit
        return Status.TRUNCATED if at_limit else Status.PARKED


class RequestSender:
    """Sends requests, and remembers which engine has a group's prompt in its cache.

    Args:
        routes: request the routed experts of each token.
        interruption: treatment of samples in flight during a push.
        recompute_prefix: interrupted samples may not reuse a cache of older weights.
    """

    def __init__(
        self,
        pool: Pool,
        dispatcher: Dispatcher,
        response_handler: ResponseHandler,
        poison_detector: PoisonDetector,
        *,
        routes: bool,
        interruption: Interruption,
        recompute_prefix: bool,
    ) -> None:
        self._pool, self._dispatcher = pool, dispatcher
        self._response_handler, self._poison_detector = response_handler, poison_detector
        self._routes, self._interruption, self._recompute_prefix = routes, interruption, recompute_prefix
        self._order = itertools.count()
        self.run_id = uuid.uuid4().hex[:8]
        self._group_engine: dict[int, str] = {}
        self._turn_tokens: float | None = None
        """Running mean of the length of turns."""
        self.resumes = 0

    def id_for(self, sample_id: int) -> str:
        """Return the id of the next request.

        It ends with a dot, so that it is not a prefix of another id: SGLang aborts all ids with a prefix.
        """
        return f"{self.run_id}-{sample_id}-{next(self._order)}."

    def routing_request(self, sample: TokenSequence, limit: int) -> RoutingRequest:
        """Describe a sample's next request to the routing strategy. `limit`: see Turn.

        A response of any length is expected to grow by the mean length of turns, up to its limit: in a long-tailed
        distribution, long responses have no fewer tokens ahead than short ones.
        """
        version = sample.spans[-1].version if sample.spans else None
        last = None if sample.engine is None else self._pool.find(sample.engine)
        has_prefix = last is not None and last.version == version
        prefer = sample.engine if has_prefix else self._group_engine.get(sample.group_id)
        response_tokens = len(sample.response_ids)
        remaining = max(0, limit - response_tokens)
        expected_tokens = remaining if self._turn_tokens is None else min(remaining, self._turn_tokens)
        return RoutingRequest(
            prefer,
            version,
            sample.seed,
            prompt_tokens=len(sample.prompt_ids) + response_tokens,
            expected_tokens=expected_tokens,
        )

    def invalidate_caches(self, urls: Collection[str]) -> None:
        """Forget which prefixes these engines have cached. Called before they get other weights."""
        self._group_engine = {g: url for g, url in self._group_engine.items() if url not in urls}

    async def send(self, engine: EngineState, sample: TokenSequence, turn: Turn) -> str:
        """Send one request. Afterwards the sample is terminal, or PARKED with every token that arrived.

        Returns:
            the message of the server error that ended it, or an empty string.
        """
        pending_prefill = (
            0 if self._has_prefix(engine, sample) else len(sample.prompt_ids) + len(sample.response_ids)
        )
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
            pending_prefill=pending_prefill,
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
                        start_token = len(sample.response_ids)
                        finish = await self._response_handler.receive(engine, flight, segment, turn.ends)
                        if (
                            finish == "abort" and not segment.prompt_tokens
                        ):  # the engine's count lacks its tokens
                            engine.received -= flight.received_tokens
                        if turn.tops is not None:
                            tops = (segment.tops or [])[: len(sample.response_ids) - start_token]
                            turn.tops.by_token.update({start_token + i: top for i, top in enumerate(tops)})
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
        """Return whether the engine probably has the sample's prefix in its cache."""
        own_prefix = (
            bool(sample.spans) and sample.engine == engine.url and sample.spans[-1].version == engine.version
        )
        return own_prefix or self._group_engine.get(sample.group_id) == engine.url

    def _routes_from(self, sample: TokenSequence) -> int | None:
        """Return the first position of which routes are requested; None: request none.

        Position 0 in the first request, later the last sampled token, which no forward pass has processed.
        """
        if sample.sample_id == EVALUATION:
            return None
        if not sample.response_ids:
            return 0
        unprocessed = sample.observed[-1].end - sample.observed[-1].start if sample.observed_last else 0
        return len(sample.prompt_ids) + len(sample.response_ids) - 1 - unprocessed

    def _cache_key(self, engine: EngineState, sample: TokenSequence) -> str | None:
        """Return the key that separates cached prefixes; None if a push empties the cache.

        If caches outlive a push, samples share prefixes only if they started under the same weight version; with
        `recompute_prefix` only if they run under the same version.
        """
        if self._interruption != "in_place":
            return None
        if self._recompute_prefix:
            return str(engine.version)
        return str(sample.spans[0].version if sample.spans else engine.version)


def _cache_source(engine: EngineState, sample: TokenSequence) -> str:
    """Return the reason why the sample's prefix may be in the engine's cache, see Router.stats."""
    if not sample.response_ids:
        return "sibling"
    if sample.spans[-1].version != engine.version:
        return "update"
    return "turn" if sample.observed_last else "resume"
