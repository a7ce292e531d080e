"""The turns of one sample, told to somebody who leads the conversation and remembers nothing from before a restart.

Who leads it (a function of slime's, an agent) begins anew after a crash, and says and asks everything once more.
Turns that were saved are told from the sample; only what is missing is sampled. The ledger's sample is the truth:
what a tool says must be what it said before.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.core.types import Sample, Status
from rlsys.generators.parser_client import ToolFailed
from rlsys.generators.turns import Speak
from rlsys.router.turn_ends import TurnEnds


class Full(BaseException):
    """The response has no room for more. Not an Exception: a user's function must not go on behind it."""


class SavedTurns:
    """Owns how much of the sample has been `heard`: response tokens that were told, or said, in this conversation.

    `finish`: how the last turn that was told has ended, `stop` or `length`; empty before the first.
    """

    def __init__(self, speak: Speak, ends: TurnEnds, sample: Sample, budget: int) -> None:
        """`budget`: of response tokens, over all turns and what tools say between them."""
        self._speak, self._ends, self._sample, self._budget = speak, ends, sample, budget
        self.heard = 0
        self.finish = ""

    def observe(self, said: list[int]) -> None:
        """Ids that a tool says behind what was heard. Raises ToolFailed when the saved sample has others there, Full
        when they leave no room for a turn."""
        s, end = self._sample, self.heard + len(said)
        if s.tokens > self.heard:  # saved, before a restart
            if said and ([*s.response_ids[self.heard : end]] != said or not self._is_observed(end)):
                raise ToolFailed("its tool said something else after a restart than before")
        elif said:
            if end >= self._budget:
                raise Full
            s.observe(said)
        self.heard = end

    def _is_observed(self, end: int) -> bool:
        return any(span.start == self.heard and span.end == end for span in self._sample.observed)

    async def turn(self, most: int | None = None, stop_texts: Sequence[str] = ()) -> tuple[int, int]:
        """The model's next turn, of at most `most` tokens, and `stop_texts` end it too: response tokens [start, end).

        Raises Full when there is no room for a token of it, and what `speak` raises.
        """
        s, start = self._sample, self.heard
        ends = self._ends.with_texts(stop_texts)
        limit = self._budget if most is None else min(self._budget, start + most)
        if start >= limit:
            raise Full
        end, self.finish = self._saved(start, limit, ends)
        if not self.finish:
            s.status = Status.PARKED
            await self._speak(s, most=limit, stop_texts=ends.texts)
            end, self.finish = s.tokens, "stop" if s.status is Status.FINISHED else "length"
            s.status = Status.PARKED  # at once: the turn has ended, the sample has not
        if end == start:  # an engine's context ends before the budget
            raise Full
        self.heard = end
        return start, end

    def _saved(self, start: int, limit: int, ends: TurnEnds) -> tuple[int, str]:
        """Where the turn from `start` on has ended already, and how; no way: it has not."""
        s = self._sample
        said = min((o.start for o in s.observed if o.start >= start), default=None)
        turn = s.response_ids[start : min(limit, s.tokens if said is None else said)]
        ended = ends.first_end(turn)
        if ended is not None:
            return start + ended, "stop"
        if start + len(turn) >= limit:
            return limit, "length"
        return (said, "stop") if said is not None else (0, "")
