"""When the ledger is committed: at once for whoever tells somebody about a change, and soon after every other one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from rlsys.core.errors import RunError
from rlsys.core.types import Sample
from rlsys.ledger.buffer import RolloutBuffer

FLUSH_SECONDS = 0.2
"""Finished samples are committed together: at most this much work is done again after a crash."""


class Commits:
    """Owns the timer of a buffer's commits. `failed` is called with what a commit raised that nobody waits for."""

    def __init__(self, buffer: RolloutBuffer) -> None:
        self._buffer = buffer
        self._timer: asyncio.TimerHandle | None = None
        self._flushed: asyncio.Future[None] | None = None
        self.failed: Callable[[BaseException], None] = lambda error: None

    def save(self, samples: Iterable[Sample]) -> None:
        """Into the open transaction."""
        self._buffer.save(samples)

    def unsaved(self, sample: Sample) -> bool:
        """Whether it has tokens that `save` has not seen."""
        return self._buffer.unsaved(sample)

    def flush(self) -> None:
        """On disk when this returns."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._buffer.flush()
        if self._flushed is not None:
            self._flushed.set_result(None)
            self._flushed = None

    async def flushed(self) -> None:
        """Until the next commit, within FLUSH_SECONDS; for ever where it fails, which ends the run."""
        self.flush_soon()
        if self._flushed is None:
            self._flushed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._flushed)

    def flush_soon(self) -> None:
        """On disk within FLUSH_SECONDS."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush_now)

    def _flush_now(self) -> None:
        try:
            self.flush()
        except RunError as e:
            self.failed(e)
