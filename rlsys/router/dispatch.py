"""Dispatcher: admits requests to engines, tracks them, and aborts or pauses them. Owns gate, queue and flights.

Requests are admitted by priority when the gate is open and an engine serves. A request is in flight while its `track`
context is active. It can be aborted alone, and paused or cancelled together with the other requests in its engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from rlsys.core.errors import error_text
from rlsys.core.types import TokenSequence
from rlsys.engine.wire import DeadEngine, EngineError
from rlsys.router.engine_state import NEVER, EngineState, Flight
from rlsys.router.pool import NoExplorationEngine, Pool
from rlsys.router.strategy import RoutingRequest, Strategy

EVALUATION = -1
"""Sample id and group id of requests outside the ledger."""
ABORT_AGAIN_SECONDS, ABORT_AGAIN_AT_MOST = 0.02, 0.5
"""Seconds before an abort is repeated, doubled up to the second value.

A sample starts whenever another one ends, so most interrupts overtake a request that is just being sent. Only a
repeated abort reaches such a request.
"""
ABORT_ANSWER_SECONDS = 10.0
"""Timeout of one abort. The abort is then repeated, because the engine may have recovered."""
INTERRUPT_SECONDS = 60.0
"""During an abort, an engine counts as dead if no request ends and no token arrives for this many seconds."""

Interruption = Literal["abort", "retract", "in_place"]
"""Treatment of running requests while weights change.

- abort: they return to the router.
- retract: the engine keeps them without their KV cache.
- in_place: the engine keeps them with the cache, so later tokens use keys and values of older weights.
"""

Priority = Callable[[], tuple[int, ...]]
Keep = Callable[[TokenSequence], bool]

log = logging.getLogger("rlsys.router")


class Dispatcher:
    """Admits and tracks the requests of one event loop. The gate is initially closed."""

    def __init__(self, pool: Pool, strategy: Strategy) -> None:
        self.pool = pool
        self._strategy = strategy
        self._waiting: list[tuple[Priority, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._background: set[asyncio.Task[None]] = set()
        self.open = False
        self.interrupted = True
        """Whether the gate is closed for evaluation requests too."""
        self.interrupts = 0
        """Number of interrupts. If a request is aborted without one, another client aborted it."""

    # -- one request --------------------------------------------------------------------------------------------

    async def admit(
        self,
        priority: Priority,
        routing_request: Callable[[], RoutingRequest],
        *,
        evaluation: bool = False,
        explorers: bool = False,
    ) -> EngineState:
        """Wait until the gate is open and an engine serves, and choose the engine.

        `priority` and `routing_request` are called on admission, because their values change during the wait: a push
        may empty the caches, and siblings may end.

        Args:
            priority: returns the sort key; lower keys go first, equal ones in order of arrival.
            routing_request: returns the input of the routing strategy.
            evaluation: whether it is an evaluation request, which passes a gate that is closed for samples only.
            explorers: choose among the engines for exploration.

        Raises:
            NoExplorationEngine: `explorers` is set, and all engines for exploration are dead.
        """
        while not (
            (self.open or (evaluation and not self.interrupted))
            and (serving := self.pool.serving(explorers=explorers))
        ):
            if explorers and not self.pool.explorable:
                raise NoExplorationEngine("no engine for exploration is alive")
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((priority, next(self._order), waiter))
            await waiter
        request = routing_request()
        preferred = [e for e in serving if e.url not in request.avoid] if request.avoid else serving
        return self._strategy(preferred or serving, request)

    @contextmanager
    def track(self, engine: EngineState, flight: Flight, tokens: int) -> Iterator[Flight]:
        """Register a request as in flight in the engine while the context is active.

        If the caller is cancelled, for example because the trainer dies during an evaluation, the engine's own
        count of tokens becomes unusable until the next push, because it includes tokens that never arrived.

        Args:
            tokens: number of prompt tokens.
        """
        engine.flights[flight.rid] = flight
        engine.uncounted = True
        engine.pending_prefill += flight.pending_prefill
        flight.last_token_at = asyncio.get_running_loop().time() if engine.load <= engine.slots else None
        self.add_tokens(engine, flight, tokens)
        try:
            yield flight
        except asyncio.CancelledError:
            engine.counting = False
            raise
        finally:
            del engine.flights[flight.rid]
            engine.tokens -= flight.tokens
            engine.pending_prefill -= flight.pending_prefill
            engine.flight_ended.set()
            if self._waiting and engine.breaker.failures:  # on trial: admit the next request
                self.wake()

    def add_tokens(self, engine: EngineState, flight: Flight, tokens: int) -> None:
        """Add tokens to the counts of a flight and its engine."""
        flight.tokens += tokens
        engine.tokens += tokens

    def record_success(self, engine: EngineState) -> None:
        """Close the engine's breaker after a response, and let waiting requests use the engine."""
        if engine.breaker.failures:
            engine.breaker.record_success()
            self.wake()

    @property
    def waiting(self) -> int:
        return sum(not w.done() for _, _, w in self._waiting)

    def wake(self) -> None:
        """Let waiting requests check for an engine again, in the order of their priorities."""
        waiting, self._waiting = [w for w in self._waiting if not w[2].done()], []
        for _, _, waiter in sorted(waiting, key=lambda w: (w[0](), w[1])):
            waiter.set_result(None)

    # -- all requests -------------------------------------------------------------------------------------------

    async def abort_all(self, keep: Keep | None = None) -> None:
        """Close the gate, abort flights, and wait until they have ended.

        Evaluation requests on a pinned engine are not aborted. An abort that overtakes its request has no effect, so
        aborts are repeated until every request has ended.

        Args:
            keep: returns whether the requests of a sample continue; None: abort the requests of all samples.
        """
        self.open, self.interrupted = False, True
        self.interrupts += 1
        await asyncio.gather(*(self._abort_flights(e, keep) for e in self.pool.engines))

    async def abort_engines(self, engines: Sequence[EngineState]) -> None:
        """Abort all flights of these engines. The samples continue on other engines.

        The caller ensures that the engines get no new requests.
        """
        self.interrupts += 1
        await asyncio.gather(*(self._abort_flights(e, None) for e in engines))

    async def _abort_flights(self, engine: EngineState, keep: Keep | None) -> None:
        """Repeat aborts until the flights have ended; mark an engine without progress dead."""
        loop = asyncio.get_running_loop()
        delay = ABORT_AGAIN_SECONDS
        progress = -1, -1
        while rids := _flights_to_abort(engine, keep):
            engine.flight_ended.clear()
            current = len(rids), engine.received
            if current != progress:
                progress = current
                deadline = loop.time() + INTERRUPT_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_ANSWER_SECONDS):
                    abort_everything = keep is None and not engine.pinned
                    await self.attempt(engine, self._abort(engine, None if abort_everything else rids))
            try:
                async with asyncio.timeout(delay):
                    await _wait_aborted(engine, keep)
            except TimeoutError:
                delay = min(2 * delay, ABORT_AGAIN_AT_MOST)
                if loop.time() > deadline:
                    log.warning(
                        "%s: counts as dead: no request ended and no token arrived for %g s after an abort",
                        engine.url,
                        INTERRUPT_SECONDS,
                    )
                    engine.mark_dead()

    async def _abort(self, engine: EngineState, rids: list[str] | None) -> None:
        """Abort these requests once; None: all requests in the engine."""
        if rids is None:
            await engine.client.abort(None)
        else:
            await asyncio.gather(*(engine.client.abort(rid) for rid in rids))
        if engine.paused:  # a paused request ends only after it continues
            await self._continue(engine)

    async def pause(self, mode: Interruption, engines: Sequence[EngineState]) -> None:
        """Suspend generation in these engines until `unpause`. The engines keep their requests.

        Args:
            mode: `retract` or `in_place`.
        """
        busy = [e for e in engines if e.alive and e.flights and not e.paused and not e.pinned]
        await asyncio.gather(*(self.attempt(e, self._pause(e, mode)) for e in busy))

    async def _pause(self, engine: EngineState, mode: Interruption) -> None:
        await engine.client.pause_generation(mode)
        engine.paused = True

    async def _continue(self, engine: EngineState) -> None:
        engine.paused = False
        engine.reset_timing()
        await engine.client.continue_generation()

    async def unpause(self, engine: EngineState) -> None:
        """Continue generation in the engine if it is paused."""
        if engine.paused:
            await self._continue(engine)

    def resume(self) -> None:
        """Open the gate and continue paused requests, except on engines that are receiving weights."""
        self.open, self.interrupted = True, False
        for engine in self.pool.engines:
            if engine.paused and engine.version != NEVER:
                task = asyncio.create_task(self._unpause_soon(engine))
                self._background.add(task)
                task.add_done_callback(self._background.discard)
        self.wake()

    async def _unpause_soon(self, engine: EngineState) -> None:
        if await self.attempt(engine, self.unpause(engine)):
            self.wake()

    async def attempt(self, engine: EngineState, call: Coroutine[Any, Any, None]) -> bool:
        """Run a call to an engine, and return whether it succeeded.

        If the call fails, the engine counts as dead until it answers a probe.
        """
        try:
            await call
        except (*DeadEngine, EngineError) as e:
            engine.failure = error_text(e)
            log.warning("%s: %s", engine.url, engine.failure)
            engine.mark_dead()
            return False
        return True


async def _wait_aborted(engine: EngineState, keep: Keep | None) -> None:
    while _flights_to_abort(engine, keep):
        await engine.flight_ended.wait()
        engine.flight_ended.clear()


def _flights_to_abort(engine: EngineState, keep: Keep | None) -> list[str]:
    """Return the request ids of the flights to abort; see Dispatcher.abort_all for `keep`."""
    candidates = {rid: f.sample for rid, f in engine.flights.items() if not f.pinned}
    if keep is None or engine.pinned:  # training samples do not stay in an engine that gets no push
        return list(candidates)
    return [rid for rid, sample in candidates.items() if sample is not None and not keep(sample)]
