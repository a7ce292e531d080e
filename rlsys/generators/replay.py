"""SavedTurns: replays the saved turns of a sample to a caller that restarts without state after a crash.

The caller (a function for slime, an agent) starts from the beginning and repeats all requests. Saved turns are
returned from the sample; only missing ones are generated. The ledger's sample is authoritative: a tool must
return what it returned before.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.core.types import Status, TokenSequence
from rlsys.generators.parser_client import ToolFailed
from rlsys.generators.turns import GenerateTurn
from rlsys.router.turn_ends import TurnEnds


class BudgetExhausted(BaseException):
    """Raised when the response has no room for more.

    Not an Exception: a user's function must not continue after it.
    """


class SavedTurns:
    """Owns how many response tokens were `delivered` in this conversation.

    `finish`: how the last delivered turn ended, `stop` or `length`; empty before the first.
    """

    def __init__(
        self, generate_turn: GenerateTurn, ends: TurnEnds, sample: TokenSequence, budget: int
    ) -> None:
        """Create the replay of a sample.

        Args:
            budget: response tokens over all turns and tool outputs.
        """
        self._generate_turn, self._ends, self._sample, self._budget = generate_turn, ends, sample, budget
        self.delivered = 0
        self.finish = ""

    def observe(self, ids: list[int]) -> None:
        """Add ids of a tool after the delivered tokens.

        Raises:
            ToolFailed: the saved sample has other ids there.
            BudgetExhausted: they leave no room for a turn.
        """
        s, end = self._sample, self.delivered + len(ids)
        if s.tokens > self.delivered:  # saved, before a restart
            if ids and ([*s.response_ids[self.delivered : end]] != ids or not self._is_observed(end)):
                raise ToolFailed("its tool returned another result after a restart")
        elif ids:
            if end >= self._budget:
                raise BudgetExhausted
            s.observe(ids)
        self.delivered = end

    def _is_observed(self, end: int) -> bool:
        return any(span.start == self.delivered and span.end == end for span in self._sample.observed)

    async def turn(self, max_tokens: int | None = None, stop_texts: Sequence[str] = ()) -> tuple[int, int]:
        """Deliver the model's next turn. Returns its response tokens [start, end).

        Args:
            max_tokens: limit of the turn.
            stop_texts: additional texts that end it.

        Raises:
            BudgetExhausted: there is no room for a token of it.
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
            s.status = Status.PARKED  # at once: the turn has ended, the sample has not
        if end == start:  # an engine's context ends before the budget
            raise BudgetExhausted
        self.delivered = end
        return start, end

    def _saved_end(self, start: int, limit: int, ends: TurnEnds) -> tuple[int, str]:
        """Return where the saved turn from `start` on ends, and how; an empty reason if it has not ended."""
        s = self._sample
        observed_start = min((o.start for o in s.observed if o.start >= start), default=None)
        turn = s.response_ids[start : min(limit, s.tokens if observed_start is None else observed_start)]
        turn_length = ends.first_end(turn)
        if turn_length is not None:
            return start + turn_length, "stop"
        if start + len(turn) >= limit:
            return limit, "length"
        return (observed_start, "stop") if observed_start is not None else (0, "")
