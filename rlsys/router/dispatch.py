"""Who may go to which engine and when; what is in the engines; how it comes back. Owns gate, queue and flights.

A request is `admitted` when the gate is open and an engine serves, the oldest first; it is in flight inside
`flying`, and every flight can be aborted, paused with its engine, or cut off with it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from rlsys.core.types import Sample
from rlsys.engine.wire import DeadEngine, EngineError
from rlsys.router.engine_state import NEVER, EngineState, Flight
from rlsys.router.pool import NobodyExplores, Pool
from rlsys.router.strategy import Strategy, Wish

EVALUATION = -1
"""Id of samples and groups outside the ledger."""
ABORT_AGAIN_SECONDS, ABORT_AGAIN_AT_MOST = 0.02, 0.5
"""Until the first repetition of an abort; twice as long from one to the next. A sample starts whenever one ends, so
most interrupts overtake some request, and then this is what they wait for."""
ABORT_ANSWER_SECONDS = 10.0
"""An abort without an answer is repeated after so long: the engine may have come to itself since."""
INTERRUPT_SECONDS = 60.0
"""An engine that gives nothing back for so long, and makes no token either, counts as dead."""

Interruption = Literal["abort", "retract", "in_place"]
"""What an engine does with its requests while weights change: gives them back, keeps them without their KV cache, or
keeps them with it (then tokens are predicted from keys and values of older weights).
"""

Priority = Callable[[], tuple[int, ...]]
Keep = Callable[[Sample], bool]

log = logging.getLogger("rlsys.router")


class Dispatcher:
    """Belongs to one event loop. Starts with the gate closed."""

    def __init__(self, pool: Pool, strategy: Strategy) -> None:
        self.pool = pool
        self._strategy = strategy
        self._waiting: list[tuple[Priority, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._background: set[asyncio.Task[None]] = set()
        self.open = False
        self.interrupted = True
        """Not even evaluation may go on."""
        self.interrupts = 0
        """How often requests were asked back: an abort without one is somebody else's."""

    # -- one request --------------------------------------------------------------------------------------------

    async def admit(
        self,
        priority: Priority,
        wish: Callable[[], Wish],
        *,
        evaluation: bool = False,
        explorers: bool = False,
    ) -> EngineState:
        """Wait until the gate is open and an engine serves; lower priorities first, then in order of arrival.
        `explorers`: one of those that try prompts out. Raises NobodyExplores when all of them are dead.

        Both are asked for at the last moment: a prefix lives in a cache for as long as the weights do, and siblings
        may have ended while this one waited.
        """
        while not (self._may_pass(evaluation) and (serving := self.pool.serving(explorers=explorers))):
            if explorers and not self.pool.explorable:
                raise NobodyExplores("no engine that explores is there")
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((priority, next(self._order), waiter))
            await waiter
        wished = wish()
        others = [e for e in serving if e.url not in wished.avoid] if wished.avoid else serving
        return self._strategy(others or serving, wished)

    def _may_pass(self, evaluation: bool) -> bool:
        return self.open or (evaluation and not self.interrupted)

    @contextmanager
    def flying(self, engine: EngineState, flight: Flight, tokens: int) -> Iterator[Flight]:
        """The request of `flight`, with so many tokens of prompt, is in the engine for as long as this lasts.

        Who asked may go away (a trainer that dies in an evaluation): the engine then counts tokens that nobody takes.
        """
        engine.flights[flight.rid] = flight
        engine.unread += flight.unread
        flight.since = asyncio.get_running_loop().time() if engine.load <= engine.slots else None
        self.grow(engine, flight, tokens)
        try:
            yield flight
        except asyncio.CancelledError:
            engine.counting = False
            raise
        finally:
            del engine.flights[flight.rid]
            engine.tokens -= flight.tokens
            engine.unread -= flight.unread
            engine.landed.set()
            if self._waiting and engine.breaker.failures:  # on trial: the next one may try
                self.wake()

    def grow(self, engine: EngineState, flight: Flight, tokens: int) -> None:
        flight.tokens += tokens
        engine.tokens += tokens

    def works(self, engine: EngineState) -> None:
        """It has just answered a request: no longer on trial, so that others may go to it as well."""
        if engine.breaker.failures:
            engine.breaker.succeeded()
            self.wake()

    @property
    def waiting(self) -> int:
        return sum(not w.done() for _, _, w in self._waiting)

    def wake(self) -> None:
        """Waiters look again, in the order of their priorities."""
        waiting, self._waiting = [w for w in self._waiting if not w[2].done()], []
        for _, _, waiter in sorted(waiting, key=lambda w: (w[0](), w[1])):
            waiter.set_result(None)

    # -- all requests -------------------------------------------------------------------------------------------

    async def bring_back(self, keep: Keep | None = None) -> None:
        """Close the gate and abort all flights but those of samples to `keep`; afterwards none of them is left. What
        a pinned engine answers for an evaluation stays in it.

        An abort that overtakes its request is lost, so it is repeated until each request has answered.
        """
        self.open, self.interrupted = False, True
        self.interrupts += 1
        await asyncio.gather(*(self._empty(e, keep) for e in self.pool.engines))

    async def empty(self, engines: Sequence[EngineState]) -> None:
        """Abort all flights of engines that get no others; they go on elsewhere at once."""
        self.interrupts += 1
        await asyncio.gather(*(self._empty(e, None) for e in engines))

    async def _empty(self, engine: EngineState, keep: Keep | None) -> None:
        loop, patience, seen = asyncio.get_running_loop(), ABORT_AGAIN_SECONDS, (-1, -1)
        while leaving := _leaving(engine, keep):
            engine.landed.clear()
            if (now := (len(leaving), engine.received)) != seen:
                seen, deadline = now, loop.time() + INTERRUPT_SECONDS
            for flight in [engine.flights[rid] for rid in leaving]:
                if flight.blocked and not flight.scope.expired():  # its end waits for somebody's client
                    flight.scope.reschedule(loop.time())
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_ANSWER_SECONDS):
                    everything = keep is None and not engine.pinned
                    await self.attempt(engine, self._abort(engine, None if everything else leaving))
            try:
                async with asyncio.timeout(patience):
                    while _leaving(engine, keep):
                        await engine.landed.wait()
                        engine.landed.clear()
            except TimeoutError:
                patience = min(2 * patience, ABORT_AGAIN_AT_MOST)
                if loop.time() > deadline:
                    log.warning("%s: gives nothing back in %g s", engine.url, INTERRUPT_SECONDS)
                    engine.died()

    async def _abort(self, engine: EngineState, rids: list[str] | None) -> None:
        if rids is None:
            await engine.client.abort(None)
        else:
            await asyncio.gather(*(engine.client.abort(rid) for rid in rids))
        if engine.paused:  # a request that is kept in place answers only when it may go on
            await self._continue(engine)

    async def pause(self, mode: Interruption, engines: Sequence[EngineState]) -> None:
        """They keep what is in them and make no more tokens, until `unpause`."""
        busy = [e for e in engines if e.alive and e.flights and not e.paused and not e.pinned]
        await asyncio.gather(*(self.attempt(e, self._pause(e, mode)) for e in busy))

    async def _pause(self, engine: EngineState, mode: Interruption) -> None:
        await engine.client.pause_generation(mode)
        engine.paused = True

    async def _continue(self, engine: EngineState) -> None:
        engine.paused = False
        engine.rested()
        await engine.client.continue_generation()

    async def unpause(self, engine: EngineState) -> None:
        if engine.paused:
            await self._continue(engine)

    def resume(self) -> None:
        """Open the gate; what was interrupted goes on. Not what an engine keeps that gets new weights just now."""
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
        """Whether the engine did it. If not, it counts as dead until it answers a probe, and as without weights."""
        try:
            await call
        except (*DeadEngine, EngineError) as e:
            engine.failure = str(e) or type(e).__name__
            log.warning("%s: %s", engine.url, engine.failure)
            engine.died()
            return False
        return True


def _leaving(engine: EngineState, keep: Keep | None) -> list[str]:
    """Ids of its flights that must end."""
    leaving = {rid: f.sample for rid, f in engine.flights.items() if not f.pinned}
    if keep is None or engine.pinned:  # nothing of training stays in an engine that gets no push
        return list(leaving)
    return [rid for rid, sample in leaving.items() if sample is not None and not keep(sample)]
