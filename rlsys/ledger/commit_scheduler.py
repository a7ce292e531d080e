"""CommitScheduler: the ledger is committed before a change is reported, and otherwise soon after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from rlsys.core.errors import RunError
from rlsys.core.types import Sample
from rlsys.ledger.buffer import RolloutBuffer

FLUSH_SECONDS = 0.2
"""Longest time between a change and its commit: finished samples are committed together, and a crash repeats no more.
"""


class CommitScheduler:
    """Owns the timer of a buffer's commits. `on_failure` receives the error of a commit in the background."""

    def __init__(self, buffer: RolloutBuffer) -> None:
        self._buffer = buffer
        self._timer: asyncio.TimerHandle | None = None
        self._next_commit: asyncio.Future[None] | None = None
        self.on_failure: Callable[[BaseException], None] = lambda error: None

    def save(self, samples: Iterable[Sample]) -> None:
        """Write the samples into the open transaction."""
        self._buffer.save(samples)

    def unsaved(self, sample: Sample) -> bool:
        """Return whether the sample has tokens that are not saved."""
        return self._buffer.unsaved(sample)

    def flush(self) -> None:
        """Commit now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._buffer.flush()
        if self._next_commit is not None:
            self._next_commit.set_result(None)
            self._next_commit = None

    async def wait_for_commit(self) -> None:
        """Wait for the next commit, at most FLUSH_SECONDS. Never returns if it fails, which ends the run."""
        self.flush_soon()
        if self._next_commit is None:
            self._next_commit = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_commit)

    def flush_soon(self) -> None:
        """Schedule a commit within FLUSH_SECONDS."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush_now)

    def _flush_now(self) -> None:
        try:
            self.flush()
        except RunError as e:
            self.on_failure(e)
