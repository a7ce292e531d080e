"""SavedTurns: replays the saved turns of a sample to user code that starts again after a crash.

The user code (a function for slime, an agent) starts from its beginning, without state, and repeats all requests. It
gets the turns that are saved in the ledger, and then new turns. Its tools must return the saved results.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.core.types import Status, TokenSequence
from rlsys.generators.parser_client import ToolFailed
from rlsys.generators.turns import GenerateTurn
from rlsys.router.turn_ends import TurnEnds


class BudgetExhausted(BaseException):
    """Raised when a response has reached its limit of tokens.

    It is not a subclass of Exception, so that a user's function does not catch it and continue.
    """


class SavedTurns:
    """Delivers the turns of a sequence, saved or new, in order.

    Attributes:
        delivered: number of response tokens that were delivered.
        finish: finish reason of the last delivered turn, `stop` or `length`; empty before the first turn.
    """

    def __init__(
        self, generate_turn: GenerateTurn, ends: TurnEnds, sample: TokenSequence, budget: int
    ) -> None:
        """Create the replay of a sample.

        Args:
            generate_turn: generates a turn.
            ends: token ids and texts that end a turn.
            sample: the sequence.
            budget: largest number of response tokens, of turns and tools together.
        """
        self._generate_turn = generate_turn
        self._ends = ends
        self._sample = sample
        self._budget = budget
        self.delivered = 0
        self.finish = ""

    def observe(self, ids: list[int]) -> None:
        """Add the ids of a tool's result after the delivered tokens. If they are saved, only compare them.

        Raises:
            ToolFailed: the saved ids differ.
            BudgetExhausted: no token is left for another turn.
        """
        s, end = self._sample, self.delivered + len(ids)
        if s.tokens > self.delivered:  # saved before a restart
            if ids and ([*s.response_ids[self.delivered : end]] != ids or not self._is_observed(end)):
                raise ToolFailed("a tool returned another result after a restart than before")
        elif ids:
            if end >= self._budget:
                raise BudgetExhausted
            s.observe(ids)
        self.delivered = end

    def _is_observed(self, end: int) -> bool:
        """Return whether the tokens from the delivered ones up to `end` are the result of one tool call."""
        return any(span.start == self.delivered and span.end == end for span in self._sample.observed)

    async def turn(self, max_tokens: int | None = None, stop_texts: Sequence[str] = ()) -> tuple[int, int]:
        """Deliver the model's next turn.

        Args:
            max_tokens: largest number of tokens of the turn; None: the remaining budget.
            stop_texts: additional texts that end the turn.

        Returns:
            The positions [start, end) of the turn's tokens in the response.

        Raises:
            BudgetExhausted: no token is left for the turn.
        """
        s, start = self._sample, self.delivered
        ends = self._ends.with_texts(stop_texts)
        limit = self._budget if max_tokens is None else min(self._budget, start + max_tokens)
        if start >= limit:
            raise BudgetExhausted
        end, self.finish = self._saved_end(start, limit, ends)
        if not self.finish:
            s.status = Status.PARKED
            await self._generate_turn(s, max_tokens=limit, stop_texts=ends.texts)
            end, self.finish = s.tokens, "stop" if s.status is Status.FINISHED else "length"
            s.status = Status.PARKED  # the turn has ended, the sample has not
        if end == start:  # the engine's context ends before the budget
            raise BudgetExhausted
        self.delivered = end
        return start, end

    def _saved_end(self, start: int, limit: int, ends: TurnEnds) -> tuple[int, str]:
        """Find the end of the saved turn from token `start` on.

        Args:
            start: first token of the turn.
            limit: number of response tokens at which the turn is truncated.
            ends: token ids and texts that end the turn.

        Returns:
            The end of the turn, and its finish reason; (0, "") if the saved turn has not ended.
        """
        s = self._sample
        observed_start = min((o.start for o in s.observed if o.start >= start), default=None)
        turn = s.response_ids[start : min(limit, s.tokens if observed_start is None else observed_start)]
        turn_length = ends.first_end(turn)
        if turn_length is not None:
            return start + turn_length, "stop"
        if start + len(turn) >= limit:
            return limit, "length"
        return (observed_start, "stop") if observed_start is not None else (0, "")
