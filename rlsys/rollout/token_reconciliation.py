"""TokenReconciliation: compares the tokens that engines sent with those in the ledger."""

from __future__ import annotations

from rlsys.core.errors import RunError
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.worker.worker_engines import WorkerEngines


class TokenReconciliation:
    """Compares token counts. Owns the number of lost tokens that it has added to the ledger."""

    def __init__(self, buffer: RolloutBuffer, engines: WorkerEngines) -> None:
        self._buffer = buffer
        self._engines = engines
        self._lost_reported = 0

    def reconcile(self) -> None:
        """Check that every received token is in the ledger, and add new lost tokens to the ledger's count.

        Call it after an interrupt.

        Raises:
            RunError: the number of saved tokens differs from the number of tokens that engines sent.
        """
        received, saved_tokens = self._engines.counts_at_save()
        if received != saved_tokens:
            raise RunError(f"ledger: engines sent {received} tokens of samples, but {saved_tokens} are saved")
        lost_tokens = int(self._engines.stats()["lost"])
        self._buffer.add_lost_tokens(max(0, lost_tokens - self._lost_reported))
        self._lost_reported = lost_tokens
