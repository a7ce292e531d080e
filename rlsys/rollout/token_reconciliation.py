"""TokenReconciliation: compares the tokens that engines sent with those in the ledger."""

from __future__ import annotations

from rlsys.core.errors import RunError
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.worker.worker_engines import WorkerEngines


class TokenReconciliation:
    """Owns the number of lost tokens that the ledger has counted."""

    def __init__(self, buffer: RolloutBuffer, engines: WorkerEngines) -> None:
        self._buffer = buffer
        self._engines = engines
        self._lost_reported = 0

    def reconcile(self) -> None:
        """Check that every received token is in the ledger, and count lost ones there. Call after an interrupt.

        Raises:
            RunError: the numbers differ.
        """
        received, saved_tokens = self._engines.counts_at_save()
        if received != saved_tokens:
            raise RunError(f"received {received} tokens for samples, but {saved_tokens} are in the ledger")
        lost_tokens = int(self._engines.stats()["lost"])
        self._buffer.add_lost_tokens(max(0, lost_tokens - self._lost_reported))
        self._lost_reported = lost_tokens
