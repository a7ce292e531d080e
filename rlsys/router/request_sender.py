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
        ends: stop condition of the turn.
        pinned: use the engine that is pinned for an evaluation.
        tops: collects the most probable ids at each token; None: do not request them.
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
        """Return the arguments of EngineClient.generate that differ from its defaults for this turn."""
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
        """Return the status of a sample whose request has ended, or has not been sent.

        The last token is checked here, because SGLang does not check it if a request is aborted or its budget is used
        up. Otherwise the sample would continue past its end, or a complete response would count as truncated.

        Args:
            finish: finish reason of the request; None: no request has ended since the last call.
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

        The id ends with a dot, so that it is no prefix of another id: SGLang aborts all requests whose id starts with
        the given one.
        """
        return f"{self.run_id}-{sample_id}-{next(self._order)}."

    def routing_request(self, sample: TokenSequence, limit: int) -> RoutingRequest:
        """Return the properties of a sample's next request for the routing strategy.

        The expected number of tokens is the mean length of turns for a response of any length, up to `limit`: in a
        long-tailed distribution, long responses have no fewer tokens ahead than short ones.

        Args:
            limit: largest number of response tokens over all requests.
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
        """Record that these engines have no cached prefix. Call it before they get other weights."""
        self._group_engine = {g: url for g, url in self._group_engine.items() if url not in urls}

    async def send(self, engine: EngineState, sample: TokenSequence, turn: Turn) -> str:
        """Send one request. When it has ended, the sample is terminal, or PARKED with every token that arrived.

        Returns:
            the message of the server error that ended the request, or an empty string.
        """
        flight = self._new_flight(engine, sample, pinned=turn.pinned)
        self._assign(engine, sample)
        finish: str | None = None
        ids = [*sample.prompt_ids, *sample.response_ids]
        subject = f"sample {sample.sample_id}"
        try:
            async with attempt(self._dispatcher, engine, flight, len(ids), subject) as result:
                stream = engine.client.generate(
                    ids,
                    rid=flight.rid,
                    max_new_tokens=turn.limit - len(sample.response_ids),
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
                        start = len(sample.response_ids)
                        finish = await self._response_handler.receive(engine, flight, segment, turn.ends)
                        # The engine's count lacks the tokens of a request that was aborted in its queue.
                        if finish == "abort" and not segment.prompt_tokens:
                            engine.received -= flight.received_tokens
                        if turn.tops is not None:
                            tops = (segment.tops or [])[: len(sample.response_ids) - start]
                            turn.tops.by_token.update({start + i: top for i, top in enumerate(tops)})
            return self._poison_detector.record_end(result, engine, sample)
        finally:
            sample.status = turn.status(sample, finish)
            if sample.status.terminal and sample.sample_id != EVALUATION:
                self._record_turn_length(sample)

    def _new_flight(self, engine: EngineState, sample: TokenSequence, *, pinned: bool) -> Flight:
        """Return the flight of a sample's next request, before the sample is assigned to the engine."""
        tokens = len(sample.prompt_ids) + len(sample.response_ids)
        return Flight(
            self.id_for(sample.sample_id),
            sample,
            asyncio.timeout(None),
            pinned=pinned,
            cache_source=_cache_source(engine, sample),
            pending_prefill=0 if self._has_prefix(engine, sample) else tokens,
        )

    def _assign(self, engine: EngineState, sample: TokenSequence) -> None:
        """Mark the sample as in flight in the engine, and count a resumed sample."""
        if sample.sample_id != EVALUATION:
            self._group_engine[sample.group_id] = engine.url
            resumed = bool(sample.response_ids) and not sample.observed_last
            sample.resumes += resumed
            self.resumes += resumed
        sample.engine = engine.url
        sample.status = Status.IN_FLIGHT

    def _record_turn_length(self, sample: TokenSequence) -> None:
        """Update the running mean of turn lengths."""
        tokens = len(sample.response_ids) - (sample.observed[-1].end if sample.observed else 0)
        mean = self._turn_tokens
        self._turn_tokens = tokens if mean is None else mean + (tokens - mean) / TURNS

    def _has_prefix(self, engine: EngineState, sample: TokenSequence) -> bool:
        """Return whether the engine probably has the sample's prefix in its cache."""
        continues_here = (
            bool(sample.spans) and sample.engine == engine.url and sample.spans[-1].version == engine.version
        )
        return continues_here or self._group_engine.get(sample.group_id) == engine.url

    def _routes_from(self, sample: TokenSequence) -> int | None:
        """Return the position of the first token whose routed experts are requested; None for an evaluation.

        The position is 0 in the first request of a sample. In later ones it is that of the last sampled token, the
        first token that no forward pass has processed.
        """
        if sample.sample_id == EVALUATION:
            return None
        if not sample.response_ids:
            return 0
        unprocessed = sample.observed[-1].end - sample.observed[-1].start if sample.observed_last else 0
        return len(sample.prompt_ids) + len(sample.response_ids) - 1 - unprocessed

    def _cache_key(self, engine: EngineState, sample: TokenSequence) -> str | None:
        """Return the key of the sample's cached prefixes. Requests share a prefix only if they have the same key.

        - A push empties the caches: None.
        - Caches outlive a push: the weight version under which the sample started.
        - The same with `recompute_prefix`: the weight version of the engine.
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
