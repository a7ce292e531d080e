"""FlushScheduler: writes changes in batches, after a short delay. CommitScheduler: commits the ledger in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from rlsys.core.errors import RlsysError
from rlsys.core.types import Sample
from rlsys.ledger.buffer import RolloutBuffer

FLUSH_SECONDS = 0.2
"""Maximum delay between a change and its commit. Samples that finish within this time share one commit."""


class FlushScheduler:
    """Schedules flushes on the running event loop, and owns their timer."""

    def __init__(
        self,
        write: Callable[[], None],
        seconds: float,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Create a scheduler.

        Args:
            write: writes all changes.
            seconds: maximum delay between a call of `flush_soon` and the flush.
            on_failure: called with the error if a scheduled flush fails.
        """
        self._write, self._seconds = write, seconds
        self.on_failure = on_failure
        self._timer: asyncio.TimerHandle | None = None
        self._next_flush: asyncio.Future[None] | None = None

    def flush(self) -> None:
        """Write all changes now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._write()
        if self._next_flush is not None:
            self._next_flush.set_result(None)
            self._next_flush = None

    async def wait_for_commit(self) -> None:
        """Schedule a flush and wait for it.

        If the flush fails, the method does not return; `on_failure` gets the error, and must end the run.
        """
        self.flush_soon()
        if self._next_flush is None:
            self._next_flush = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_flush)

    def flush_soon(self) -> None:
        """Schedule a flush after the delay, unless one is scheduled."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._flush_now)

    def _flush_now(self) -> None:
        try:
            self.flush()
        except RlsysError as e:
            self.on_failure(e)


class CommitScheduler(FlushScheduler):
    """Saves samples in a buffer and schedules its commits: the SampleStore of streams in the coordinator."""

    def __init__(self, buffer: RolloutBuffer) -> None:
        super().__init__(lambda: buffer.flush(), FLUSH_SECONDS)
        self._buffer = buffer

    def save(self, samples: Iterable[Sample]) -> None:
        """Write the samples into the open transaction; the next flush commits it."""
        self._buffer.save(samples)

    def unsaved(self, sample: Sample) -> bool:
        """Return whether the sample has tokens that are not saved."""
        return self._buffer.unsaved(sample)
