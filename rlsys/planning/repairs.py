"""Repairs of failed responses by a process judge, as prefixes for additional samples of the group."""

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
    """Requests repairs from the process judge, which is user code and may fail or hang.

    Attributes:
        counts: Number of repairs, of failed requests, and of requests without a response in time, by metric.
    """

    def __init__(self, judge: ProcessJudge, tokenizer: Tokenizer, seconds: float, budget: int) -> None:
        """Create the service.

        Args:
            judge: function that returns the repair of a response.
            tokenizer: the tokenizer.
            seconds: time limit of all requests for a group.
            budget: largest number of tokens of a response.
        """
        self._judge, self._tokenizer, self._seconds, self._budget = judge, tokenizer, seconds, budget
        self.counts: dict[str, float] = {"repairs": 0, "repairs_failed": 0, "repairs_hung": 0}

    async def of(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Prefix]:
        """Return a prefix for each sample with a repair that leaves tokens for the rest of the response.

        Args:
            prompt: the group's prompt.
            samples: failed samples of the group, with their tokens in memory.
        """
        tasks = [asyncio.ensure_future(self._request(prompt, s)) for s in samples]
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._seconds)
        finally:
            for task in tasks:
                task.cancel()
        prefixes = []
        for sample, task in zip(samples, tasks, strict=True):
            if task not in done:
                self.counts["repairs_hung"] += 1
            elif (error := task.exception()) is not None:
                self.counts["repairs_failed"] += 1
                log.warning("data.process_judge: %s: %s", type(error).__name__, error)
            elif (repair := task.result()) is not None:
                prefix = self._prefix(sample, repair)
                if prefix.at + len(prefix.ids) < self._budget:
                    prefixes.append(prefix)
        self.counts["repairs"] += len(prefixes)
        return prefixes

    async def _request(self, prompt: Prompt, sample: Sample) -> Repair | None:
        """Return the judge's repair of a sample; None if the judge finds no wrong step.

        Raises:
            TypeError: the judge returned another value.
            Exception: any exception of the judge.
        """
        repair = await self._judge(prompt, self._tokenizer.decode(sample.response_ids))
        if repair is not None and not (isinstance(repair, Repair) and repair.at >= 0 and repair.text):
            raise TypeError(f"the judge returned {repair!r:.80}; expected a Repair with a text, or None")
        return None if repair is None else repair._replace(text=valid_text(repair.text))

    def _prefix(self, sample: Sample, repair: Repair) -> Prefix:
        """Return the prefix of a repair: whole tokens of the response up to the wrong step, then encoded text.

        The encoded text is the part of the response before the wrong step that ends within a token, and the repair.
        """
        text = ""
        count = 0
        for piece in self._tokenizer.pieces(sample.response_ids):
            if len(text) + len(piece) > repair.at:
                break
            text, count = text + piece, count + 1
        remainder = self._tokenizer.decode(sample.response_ids)[len(text) : repair.at]
        return Prefix(sample.index, count, tuple(self._tokenizer.encode(remainder + repair.text)))
