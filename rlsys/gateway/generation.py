"""Generation: one response to a client, which is one call of `Router.generate`.

The router continues it after interruptions and engine deaths. Its sample buffers the tokens, so that a slow
client does not delay an engine.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from rlsys.core.spans import TopLogprobs
from rlsys.core.types import Sample, Status, TokenSequence
from rlsys.engine_requests import DEATHS_POISONOUS
from rlsys.gateway.api_requests import ApiRequest, GenerationRequest
from rlsys.gateway.served_model import ServedModel
from rlsys.router.failure_policy import PoisonLimits, PoisonRequest
from rlsys.router.router import Router
from rlsys.router.turn_ends import TurnEnds

POISON = PoisonLimits(suspect_deaths=1, deaths=DEATHS_POISONOUS, faults=2, reset_by_tokens=False)
"""Limits of a client's request. They are stricter than those of a run's samples: validation may miss something."""
GROUPS = 65536
"""Number of group ids, to which the keys of shared caches are hashed."""
MOST_SUSPECTS = 4096
"""Largest number of requests whose engine deaths are stored."""
SUSPECT_SECONDS = 600.0
"""Seconds after the last death during which a repeated request counts as the same."""


class Unavailable(Exception):
    """Raised when no engine can serve a request."""


class DeathHistory:
    """Stores which engines died during which request. Each death counts once, even with several equal requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[bytes, tuple[set[tuple[str, int]], float]] = OrderedDict()

    def count(self, identity: bytes) -> int:
        """Return the number of recent deaths during a request."""
        deaths, last = self._deaths.get(identity, (set(), 0.0))
        return len(deaths) if self._clock() - last < SUSPECT_SECONDS else 0

    def record(self, identity: bytes, url: str, death: int) -> None:
        """Record a death of an engine. `death`: the engine's number of deaths."""
        deaths = self._deaths[identity][0] if self.count(identity) else set()
        self._deaths[identity] = deaths | {(url, death)}, self._clock()
        self._deaths.move_to_end(identity)
        if len(self._deaths) > MOST_SUSPECTS:
            self._deaths.popitem(last=False)

    def clear(self, identity: bytes) -> None:
        """Remove the deaths of a request. Called when it was answered."""
        self._deaths.pop(identity, None)


class Generation:
    """One response. `identity`: equal for repetitions of the same request."""

    def __init__(self, request: GenerationRequest, sample: Sample, identity: bytes) -> None:
        self.request, self.sample, self.identity = request, sample, identity
        self.tops = TopLogprobs(request.top_logprobs) if request.top_logprobs else None
        self.arrival = asyncio.Event()
        self.recorded_deaths = 0
        """Number of engine deaths during equal requests, as in the history."""
        self.task: asyncio.Task[None]

    @property
    def is_stopped(self) -> bool:
        """Whether a stop token or a stop text ended the response."""
        return self.sample.status is Status.FINISHED

    @property
    def ids(self) -> Sequence[int]:
        return self.sample.response_ids

    async def arrivals(self) -> AsyncIterator[bool]:
        """Yield False after new tokens, and True at the end.

        Raises:
            Unavailable: no engine could serve the request in time.
            PoisonRequest: engines died or failed on the request.
        """
        while not self.task.done():
            await self.arrival.wait()
            self.arrival.clear()
            if not self.task.done():
                yield False
        self.task.result()
        yield True


class Generations:
    """Generates responses. Owns those in flight.

    Args:
        router: the router.
        concurrency: largest number of responses in engines.
        queue_seconds: seconds for which a request may wait for an engine.
    """

    def __init__(self, router: Router, concurrency: int, queue_seconds: float) -> None:
        self._router, self._queue_seconds = router, queue_seconds
        self._slots = asyncio.Semaphore(concurrency)
        self._by_sample: dict[int, Generation] = {}
        self._numbers = itertools.count()
        self._history = DeathHistory()
        router.on_tokens = lambda sample, tokens: self._by_sample[sample.sample_id].arrival.set()
        router.on_failure = self._on_failure

    @asynccontextmanager
    async def running(
        self, request: ApiRequest, model: ServedModel, identity: bytes
    ) -> AsyncIterator[list[Generation]]:
        """Generate the responses of a request while the context is active. On exit, cancel unfinished ones."""
        generations = []
        for number, response in enumerate(request.generations):
            group = zlib.crc32(response.group.encode(errors="surrogatepass")) % GROUPS
            sample = Sample(next(self._numbers), group, number, response.prompt_ids, seed=response.seed)
            generation = Generation(response, sample, b"%d %s" % (number, identity))
            sample.deaths = generation.recorded_deaths = self._history.count(generation.identity)
            self._by_sample[sample.sample_id] = generation
            generation.task = asyncio.create_task(self._generate(generation, model))
            generation.task.add_done_callback(lambda _, arrival=generation.arrival: arrival.set())  # type: ignore[misc]
            generations.append(generation)
        try:
            yield generations
        finally:
            tasks = [generation.task for generation in generations]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for generation in generations:
                del self._by_sample[generation.sample.sample_id]

    async def _generate(self, generation: Generation, model: ServedModel) -> None:
        request, sample = generation.request, generation.sample
        async with self._slots:
            try:
                await self._router.generate(
                    sample,
                    max_response_tokens=request.max_new_tokens,
                    temperature=request.temperature,
                    stop_texts=request.stop_texts,
                    tops=generation.tops,
                    ends=TurnEnds(request.stop_ids, (), model.decode),
                    sampling=request.sampling,
                    routes=request.routes,
                    admission_timeout=self._queue_seconds,
                )
            except TimeoutError:
                message = f"no engine could accept the request within {self._queue_seconds:g} s"
                raise Unavailable(message) from None
            except PoisonRequest as e:
                if sample.deaths < DEATHS_POISONOUS:
                    raise Unavailable(str(e)) from None
                raise PoisonRequest(
                    f"refused: {e}; the request may be sent again after {SUSPECT_SECONDS:g} s"
                ) from None
        self._history.clear(generation.identity)

    def _on_failure(self, sample: TokenSequence) -> None:
        """Count the death of an engine for all equal requests. A server error does not count."""
        generation = self._by_sample[sample.sample_id]
        engine = self._router.pool.find(sample.engine or "")
        if sample.deaths == generation.recorded_deaths or engine is None:
            return
        self._history.record(generation.identity, engine.url, engine.deaths)
        deaths = self._history.count(generation.identity)
        for equal in self._by_sample.values():
            if equal.identity == generation.identity:
                equal.sample.deaths = equal.recorded_deaths = deaths
