"""Compares what engines sent with what the ledger has of it."""

from __future__ import annotations

from collections.abc import Callable

from rlsys.core.errors import RunError
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.router.engines import Engines


class Received:
    """Owns how many of the lost tokens the ledger has been told about. `settled`: tokens that came for samples, and
    those of them that are saved, as of the last interrupt; None: this process has them all in hand."""

    def __init__(
        self, buffer: RolloutBuffer, router: Engines, settled: Callable[[], tuple[int, int]] | None = None
    ) -> None:
        self._settled = settled
        self._buffer = buffer
        self._router = router
        self._lost_seen = 0

    def settle(self) -> None:
        """After an interrupt. Every token that came is in the ledger, else RunError; those that got lost on their way
        are counted there."""
        stats = self._router.stats()
        if self._settled is None:
            received = int(stats["received_tokens"] - stats["evaluation_tokens"])
            saved = self._buffer.added_tokens
        else:
            received, saved = self._settled()
        if received != saved:
            raise RunError(f"{received} tokens came for samples, {saved} are in the ledger")
        lost = int(stats["lost"])
        self._buffer.add_lost_tokens(max(0, lost - self._lost_seen))
        self._lost_seen = lost
