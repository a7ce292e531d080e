"""What a process judge says of failed responses, in tokens: where a further sample of the group begins."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rlsys.algo.planners import Prefix
from rlsys.core.texts import valid_text
from rlsys.core.types import Prompt, Sample
from rlsys.data import Tokenizer
from rlsys.rewards.repairs import ProcessJudge, Repair

log = logging.getLogger("rlsys.rollout")


class Repairs:
    """Asks the judge. It is user code: what it does not say in `seconds`, or fails to say, is no repair, and counted.
    `budget`: tokens of a response."""

    def __init__(self, judge: ProcessJudge, tokenizer: Tokenizer, seconds: float, budget: int) -> None:
        self._judge, self._tokenizer, self._seconds, self._budget = judge, tokenizer, seconds, budget
        self.counts: dict[str, float] = {"repairs": 0, "repairs_failed": 0, "repairs_hung": 0}

    async def of(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Prefix]:
        """For those samples, with their tokens, for which there is one that leaves room for an answer."""
        asked = [asyncio.ensure_future(self._asked(prompt, s)) for s in samples]
        try:
            done, _ = await asyncio.wait(asked, timeout=self._seconds)
        finally:
            for task in asked:
                task.cancel()
        found = []
        for sample, task in zip(samples, asked, strict=True):
            if task not in done:
                self.counts["repairs_hung"] += 1
            elif (error := task.exception()) is not None:
                self.counts["repairs_failed"] += 1
                log.warning("data.process_judge: %s: %s", type(error).__name__, error)
            elif (repair := task.result()) is not None:
                prefix = self._prefix(sample, repair)
                found += [prefix] if prefix.at + len(prefix.ids) < self._budget else []
        self.counts["repairs"] += len(found)
        return found

    async def _asked(self, prompt: Prompt, sample: Sample) -> Repair | None:
        found = await self._judge(prompt, self._tokenizer.decode(sample.response_ids))
        if found is not None and not (isinstance(found, Repair) and found.at >= 0 and found.text):
            raise TypeError(f"gave {found!r:.80}, expected a Repair with a text, or None")
        return None if found is None else found._replace(text=valid_text(found.text))

    def _prefix(self, sample: Sample, repair: Repair) -> Prefix:
        """Whole tokens of the response; what is right of the next one is said again."""
        said = ""
        kept = 0
        for piece in self._tokenizer.pieces(sample.response_ids):
            if len(said) + len(piece) > repair.at:
                break
            said, kept = said + piece, kept + 1
        rest = self._tokenizer.decode(sample.response_ids)[len(said) : repair.at]
        return Prefix(sample.index, kept, tuple(self._tokenizer.encode(rest + repair.text)))
