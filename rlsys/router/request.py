"""One request of a sample to one engine: what goes into it, and what becomes of the sample."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import dataclass

from rlsys.config.rollout import Truncation
from rlsys.core.spans import TopLogprobs
from rlsys.core.types import Sample, Status
from rlsys.engine_requests.sampling import MOST_STOPS
from rlsys.router.arrivals import Arrivals
from rlsys.router.dispatch import EVALUATION, Dispatcher, Interruption
from rlsys.router.engine_state import EngineState, Flight
from rlsys.router.failures import Suspects, attempt
from rlsys.router.pool import Pool
from rlsys.router.strategy import Wish
from rlsys.router.turn_ends import TurnEnds

TURNS = 64
"""About so many of the last ones count for the mean length of a turn."""


@dataclass(frozen=True)
class Turn:
    """What a sample asks for until it has ended. `limit`: tokens of its response, over all requests. `pinned`: by the
    engine that is pinned for an evaluation. `tops`: what is to be told of its tokens beside."""

    limit: int
    temperature: float
    truncation: Truncation | None
    ends: TurnEnds
    pinned: bool
    tops: TopLogprobs | None = None

    def status(self, sample: Sample, finish: str | None = None) -> Status:
        """Before a request, and after one that ended with `finish`. SGLang looks at a response's last token last of
        all: where it aborts a request, or the budget is used up, that token may be the one that ends the response.
        Going on would write past the end, and a whole response would count as cut off.
        """
        if finish == "stop":
            return Status.FINISHED
        if not sample.observed_last and self.ends.ended(self.ends.turn_of(sample)):
            return Status.FINISHED
        full = finish == "length" or len(sample.response_ids) >= self.limit
        return Status.TRUNCATED if full else Status.PARKED


class Requests:
    """Sends them, and remembers which engine has the prompt of a group in its cache.

    `routes`: ask for the experts of each token. `interruption`: what becomes of samples in flight in a push.
    `reads_again`: whether a sample that was interrupted may find nothing of older weights.
    """

    def __init__(
        self,
        pool: Pool,
        dispatcher: Dispatcher,
        arrivals: Arrivals,
        suspects: Suspects,
        *,
        routes: bool,
        interruption: Interruption,
        reads_again: bool,
    ) -> None:
        self._pool, self._dispatcher = pool, dispatcher
        self._arrivals, self._suspects = arrivals, suspects
        self._routes, self._interruption, self._reads_again = routes, interruption, reads_again
        self._order = itertools.count()
        self.run_id = uuid.uuid4().hex[:8]
        self._group_engine: dict[int, str] = {}
        self._turn_tokens: float | None = None
        """Mean of the turns that ended, the recent ones first."""
        self.resumes = 0

    def id_for(self, sample_id: int) -> str:
        """Of the next request. It ends with a point: so it is not the beginning of another, which SGLang would abort
        with it."""
        return f"{self.run_id}-{sample_id}-{next(self._order)}."

    def wish(self, sample: Sample, limit: int) -> Wish:
        """A prefix lives in an engine's cache for as long as the weights do. `limit`: see Turn.

        However long a response is already, it is expected to get as many more tokens as others have in all, or as it
        may: long-tailed ones end no sooner for being long.
        """
        version = sample.spans[-1].version if sample.spans else None
        last = None if sample.engine is None else self._pool.find(sample.engine)
        has_prefix = last is not None and last.version == version
        prefer = sample.engine if has_prefix else self._group_engine.get(sample.group_id)
        begun = len(sample.response_ids)
        left = max(0, limit - begun)
        write = left if self._turn_tokens is None else min(left, self._turn_tokens)
        return Wish(prefer, version, sample.seed, read=len(sample.prompt_ids) + begun, write=write)

    def caches_end(self, urls: Collection[str]) -> None:
        """Of these engines, which get other weights."""
        self._group_engine = {g: url for g, url in self._group_engine.items() if url not in urls}

    async def send(self, engine: EngineState, sample: Sample, turn: Turn) -> str:
        """One request. Afterwards the sample is terminal, or PARKED with every token that arrived. Returns the server
        error that ended it, in words."""
        unread = 0 if self._has_prefix(engine, sample) else len(sample.prompt_ids) + len(sample.response_ids)
        if sample.sample_id != EVALUATION:
            self._group_engine[sample.group_id] = engine.url
            resumed = bool(sample.response_ids) and not sample.observed_last
            sample.resumes += resumed
            self.resumes += resumed
        rid = self.id_for(sample.sample_id)
        sample.engine, sample.status = engine.url, Status.IN_FLIGHT
        start, finish = len(sample.response_ids), None
        ids, what = [*sample.prompt_ids, *sample.response_ids], f"sample {sample.sample_id}"
        flight = Flight(
            rid,
            sample,
            asyncio.timeout(None),
            pinned=turn.pinned,
            why=_why(engine, sample),
            unread=unread,
        )
        try:
            async with attempt(self._dispatcher, engine, flight, len(ids), what) as made:
                stream = engine.client.generate(
                    ids,
                    rid=rid,
                    max_new_tokens=turn.limit - start,
                    temperature=turn.temperature,
                    seed=sample.seed,
                    stop_ids=sorted(turn.ends.ids),
                    stop_texts=turn.ends.texts[:MOST_STOPS],  # the others are looked for as tokens come
                    routes_from=self._routes_from(sample),
                    cache_key=self._cache_key(engine, sample),
                    truncation=turn.truncation,
                    **({} if turn.tops is None else {"tops": turn.tops.k}),
                )
                async with aclosing(stream):
                    async for segment in stream:
                        at = len(sample.response_ids)
                        finish = await self._arrivals.receive(engine, flight, segment, turn.ends)
                        if finish == "abort" and not segment.prompt_tokens:  # the engine did not count it
                            engine.received -= flight.arrived
                        if turn.tops is not None:
                            kept = (segment.tops or [])[: len(sample.response_ids) - at]
                            turn.tops.by_token |= {at + i: place for i, place in enumerate(kept)}
            return self._suspects.blame(made, engine, sample)
        finally:
            sample.status = turn.status(sample, finish)
            if sample.status.terminal and sample.sample_id != EVALUATION:
                self._remember(sample)

    def _remember(self, sample: Sample) -> None:
        """How long its turn was."""
        tokens = len(sample.response_ids) - (sample.observed[-1].end if sample.observed else 0)
        known = self._turn_tokens
        self._turn_tokens = tokens if known is None else known + (tokens - known) / TURNS

    def _has_prefix(self, engine: EngineState, sample: Sample) -> bool:
        own = (
            bool(sample.spans) and sample.engine == engine.url and sample.spans[-1].version == engine.version
        )
        return own or self._group_engine.get(sample.group_id) == engine.url

    def _routes_from(self, sample: Sample) -> int | None:
        """With the prompt at first; then from the seam: the last token that was sampled, which no pass has read."""
        if not self._routes or sample.sample_id == EVALUATION:
            return None
        if not sample.response_ids:
            return 0
        unread = sample.observed[-1].end - sample.observed[-1].start if sample.observed_last else 0
        return len(sample.prompt_ids) + len(sample.response_ids) - 1 - unread

    def _cache_key(self, engine: EngineState, sample: Sample) -> str | None:
        """Where caches outlive a push, only samples of the same first version may meet in them; and a prefix that is
        to be read again meets those of the same weights alone."""
        if self._interruption != "in_place":
            return None
        if self._reads_again:
            return str(engine.version)
        return str(sample.spans[0].version if sample.spans else engine.version)


def _why(engine: EngineState, sample: Sample) -> str:
    """What could have put its prefix into the engine's cache."""
    if not sample.response_ids:
        return "sibling"
    if sample.spans[-1].version != engine.version:
        return "update"
    return "turn" if sample.observed_last else "resume"
