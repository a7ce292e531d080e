"""TokenReconciliation: compares the tokens that engines sent with those in the ledger."""

from __future__ import annotations

from collections.abc import Callable

from rlsys.core.errors import RunError
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.router.engines import Engines


class TokenReconciliation:
    """Owns the number of lost tokens that the ledger has counted.

    `counts_at_save` returns the received and the saved tokens of samples as of the last interrupt; None: this
    process has all tokens itself.
    """

    def __init__(
        self,
        buffer: RolloutBuffer,
        router: Engines,
        counts_at_save: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._counts_at_save = counts_at_save
        self._buffer = buffer
        self._router = router
        self._lost_reported = 0

    def reconcile(self) -> None:
        """Check that every received token is in the ledger, and count lost ones there. Call after an interrupt.

        Raises:
            RunError: the numbers differ.
        """
        stats = self._router.stats()
        if self._counts_at_save is None:
            received = int(stats["received_tokens"] - stats["evaluation_tokens"])
            saved_tokens = self._buffer.added_tokens
        else:
            received, saved_tokens = self._counts_at_save()
        if received != saved_tokens:
            raise RunError(f"received {received} tokens for samples, but {saved_tokens} are in the ledger")
        lost_tokens = int(stats["lost"])
        self._buffer.add_lost_tokens(max(0, lost_tokens - self._lost_reported))
        self._lost_reported = lost_tokens
