"""Weights for an engine that has none from one that serves, while no push goes on: the trainer is not needed for it.

The one that gives pauses for as long as it writes, and keeps what is in it. The one that takes is attested as after a
push, against what the trainer said of this version. When a copy fails, the engine waits for the trainer's push.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from rlsys.engine.client import DeadEngine, EngineError
from rlsys.router.dispatch import Dispatcher
from rlsys.router.engine_state import NEVER, EngineState
from rlsys.router.push import WeightPush

log = logging.getLogger("rlsys.router")


class Copies:
    """Owns the copy under way: one at a time. `able`: whether engines know how to pass on their weights."""

    def __init__(self, dispatcher: Dispatcher, push: WeightPush, *, able: bool) -> None:
        self._dispatcher, self._push, self._able = dispatcher, push, able
        self._pool = dispatcher.pool
        self._task: asyncio.Task[None] | None = None

    def will_bring(self, engine: EngineState) -> bool:
        """Whether this engine without weights gets them so: the trainer need not come for it."""
        return self._giver(engine) is not None

    def look(self) -> None:
        """Begin a copy if there is one to be made."""
        if self._task is not None:
            if not self._task.done():
                return
            self._task.result()
            self._task = None
        for taker in self._pool.stale():
            if (giver := self._giver(taker)) is not None:
                self._task = asyncio.create_task(self._copy(giver, taker))
                return

    async def settle(self) -> None:
        """Wait for the one under way: a push would get in its way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _giver(self, taker: EngineState) -> EngineState | None:
        if not self._able or not self._push.attested or taker.version != NEVER or taker.uncopied:
            return None
        able = [e for e in self._pool.serving() if e.client.tp == taker.client.tp and e is not taker]
        if taker.loading:  # the copy to this one is under way
            able += [e for e in self._pool.engines if e.resting]
        return min(able, key=lambda e: e.tokens, default=None)

    async def _copy(self, giver: EngineState, taker: EngineState) -> None:
        taker.loading = True
        try:
            async with asyncio.timeout(self._push.patience):
                await taker.start_counting()
                await taker.client.begin_weight_update()
                if await self._dispatcher.attempt(giver, self._give(giver)):
                    await taker.client.take_weights()
                await self._push.attest(taker)
        except (*DeadEngine, EngineError) as e:
            log.warning("%s: no copy of the weights of %s: %s", taker.url, giver.url, e or type(e).__name__)
            taker.died()
        finally:
            taker.loading = False
            taker.uncopied = taker.version == NEVER
        if taker.version != NEVER:
            taker.copied = True
            log.info("%s has weight version %d from %s", taker.url, taker.version, giver.url)
        elif taker.quarantined is not None:
            log.warning("%s: the weights of %s did not arrive: %s", taker.url, giver.url, taker.quarantined)
            taker.quarantined = None
        self._dispatcher.wake()

    async def _give(self, giver: EngineState) -> None:
        """Its requests keep their place; SGLang would otherwise wait until they have ended."""
        giver.resting = True
        try:
            await giver.client.pause_generation("in_place")
            await giver.client.begin_weight_update()
            try:
                await giver.client.give_weights()
            finally:
                with suppress(EngineError):
                    await giver.client.end_weight_update()
        finally:
            giver.resting = False
            giver.rested()
            await giver.client.continue_generation()
