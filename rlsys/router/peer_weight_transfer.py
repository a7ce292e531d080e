"""PeerWeightTransfer: between pushes, an engine without weights copies them from a serving engine.

The trainer is not involved. The source pauses while it sends and keeps its requests. The target is attested as
after a push, against the trainer's checksums of this version. If a copy fails, the engine waits for the
trainer's next push.
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


class PeerWeightTransfer:
    """Copies weights between engines. Owns the current copy; there is at most one.

    Args:
        enabled: whether the engines can send their weights.
    """

    def __init__(self, dispatcher: Dispatcher, push: WeightPush, *, enabled: bool) -> None:
        self._dispatcher, self._push, self._enabled = dispatcher, push, enabled
        self._pool = dispatcher.pool
        self._task: asyncio.Task[None] | None = None

    def has_source(self, engine: EngineState) -> bool:
        """Return whether another engine can send its weights to this engine, without the trainer."""
        return self._source(engine) is not None

    def start_if_needed(self) -> None:
        """Start a copy if an engine needs one and none runs."""
        if self._task is not None:
            if not self._task.done():
                return
            self._task.result()
            self._task = None
        for target in self._pool.stale():
            if (source := self._source(target)) is not None:
                self._task = asyncio.create_task(self._copy(source, target))
                return

    async def wait(self) -> None:
        """Wait for the current copy, which a push would disturb."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _source(self, target: EngineState) -> EngineState | None:
        """Return the least busy engine of the target's size that can send its weights; None if there is none."""
        if not self._enabled or not self._push.attested or target.version != NEVER or target.copy_failed:
            return None
        candidates = [e for e in self._pool.serving() if e.client.tp == target.client.tp and e is not target]
        if target.loading:  # the copy to this engine is running
            candidates += [e for e in self._pool.engines if e.update_pending]
        return min(candidates, key=lambda e: e.tokens, default=None)

    async def _copy(self, source: EngineState, target: EngineState) -> None:
        target.loading = True
        try:
            async with asyncio.timeout(self._push.timeout_s):
                await target.start_counting()
                await target.client.begin_weight_update()
                if await self._dispatcher.attempt(source, self._send(source)):
                    await target.client.read_peer_weights()
                await self._push.attest(target)
        except (*DeadEngine, EngineError) as e:
            log.warning(
                "%s: copying the weights from %s failed: %s", target.url, source.url, e or type(e).__name__
            )
            target.mark_dead()
        finally:
            target.loading = False
            target.copy_failed = target.version == NEVER
        if target.version != NEVER:
            target.has_peer_copy = True
            log.info("%s: copied weight version %d from %s", target.url, target.version, source.url)
        elif target.quarantined is not None:
            log.warning(
                "%s: the weights copied from %s are wrong: %s", target.url, source.url, target.quarantined
            )
            target.quarantined = None
        self._dispatcher.wake()

    async def _send(self, source: EngineState) -> None:
        """Send the weights from a paused engine; otherwise SGLang would wait until its requests have ended."""
        source.update_pending = True
        try:
            await source.client.pause_generation("in_place")
            await source.client.begin_weight_update()
            try:
                await source.client.write_peer_weights()
            finally:
                with suppress(EngineError):
                    await source.client.end_weight_update()
        finally:
            source.update_pending = False
            source.reset_timing()
            await source.client.continue_generation()
