"""A run's evaluations. The trainer waits for one, or it runs beside training on an engine of its own.

In the background (eval.background) an engine is pinned: it keeps the weights that it has, gets no push and no sample
of training, and is stale when the evaluation has ended. So all answers come from one weight version, and training
goes on with the other engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlsys.config import Config
from rlsys.data import PromptSource, Tokenizer
from rlsys.evaluation.eval_sets import AskedSet
from rlsys.evaluation.evaluation import answer_all, judge, probes, score_all
from rlsys.evaluation.results import EvalResult, Evaluated
from rlsys.generators.agent import AgentGenerator
from rlsys.generators.generator import build_generator
from rlsys.generators.turns import greedy_turns
from rlsys.router.engines import Engines
from rlsys.router.router import PinLost
from rlsys.worker.scoring import Scorer

Watched = Callable[[Awaitable[Any], str], Awaitable[Any]]

log = logging.getLogger("rlsys.rollout")


class Evaluator:
    """Owns the evaluation in the background and its pin; there is one at most. `sets`: somebody else's to close."""

    def __init__(
        self,
        config: Config,
        router: Engines,
        source: PromptSource,
        scorer: Scorer,
        tokenizer: Tokenizer | None,
        sets: Sequence[AskedSet],
    ) -> None:
        self.sets = sets
        self._count = config.eval.prompts
        self._router = router
        self._source = source
        self._scorer = scorer
        self._greedy = build_generator(config, tokenizer, greedy_turns(config, router))
        self._task: asyncio.Task[EvalResult] | None = None

    async def measure(self, watched: Watched, step: int) -> EvalResult:
        """Greedy on the held-out prompts, then the named sets; right is a full reward. What cannot be answered or
        judged is not among `prompts`. `watched`: ends a wait in which nothing gets further. `step`: train steps that
        the weights contain."""
        for answer in (self._greedy, *(one.answer for one in self.sets)):
            if isinstance(answer, AgentGenerator):
                answer.evaluated_step = step
        asked = probes(self._source, self._count)
        answered = await watched(answer_all(asked, self._greedy), "evaluation")
        result = judge(answered, await score_all(answered, self._scorer), len(asked))
        for one in self.sets:
            result.sets[one.name] = await watched(one.measure(), f"evaluation of {one.name}")
        return result

    def begin(self, step: int) -> bool:
        """Start one in the background. False: no engine can be spared, because no other one serves."""
        assert self._task is None, "one at a time"
        if not self._router.pin():
            return False
        self._task = asyncio.create_task(self.measure(unwatched, step), name="evaluation")
        self._task.add_done_callback(lambda _: self._router.unpin())
        return True

    async def ended(self, wait: bool, watched: Watched) -> Evaluated:
        """What became of the one that was begun. Raises what broke it, but for the loss of its engine: the weights
        are gone with that."""
        if self._task is None:  # given up, because the run leaves
            return Evaluated(done=True)
        if wait and not self._task.done():
            await watched(asyncio.wait([self._task]), "evaluation")
        if not self._task.done():
            return Evaluated(done=False)
        task, self._task = self._task, None
        try:
            return Evaluated(done=True, result=task.result())
        except PinLost as e:
            log.warning("evaluation is given up: %s", e)
            return Evaluated(done=True)

    async def stop(self) -> None:
        """End the one in the background, if there is one: nobody will ask for it."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


async def unwatched(work: Awaitable[Any], what: str) -> Any:
    return await work
