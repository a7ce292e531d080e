"""Evaluations of a run: the trainer waits for them, or they run in the background on a reserved engine.

In the background (eval.background) an engine is pinned: it keeps its weights, gets no weight update and no
training samples, and is stale after the evaluation. So all responses come from one weight version, and training
continues on the other engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlsys.config import Config
from rlsys.data import PromptSource, Tokenizer
from rlsys.evaluation.eval_sets import EvalSetRunner
from rlsys.evaluation.evaluation import answered_items, eval_items, judge, score_all
from rlsys.evaluation.results import EvalResult, EvalStatus
from rlsys.generators.agent import AgentGenerator
from rlsys.generators.generator import build_generator
from rlsys.generators.turns import greedy_turns
from rlsys.router.engines import Engines
from rlsys.router.router import PinLost
from rlsys.worker.scoring import Scorer

Watched = Callable[[Awaitable[Any], str], Awaitable[Any]]

log = logging.getLogger("rlsys.rollout")


class Evaluator:
    """Owns the background evaluation and its pinned engine; there is at most one. The caller closes `sets`."""

    def __init__(
        self,
        config: Config,
        router: Engines,
        source: PromptSource,
        scorer: Scorer,
        tokenizer: Tokenizer | None,
        sets: Sequence[EvalSetRunner],
    ) -> None:
        self.sets = sets
        self._count = config.eval.prompts
        self._router = router
        self._source = source
        self._scorer = scorer
        self._greedy = build_generator(config, tokenizer, greedy_turns(config, router))
        self._task: asyncio.Task[EvalResult] | None = None

    async def measure(self, watched: Watched, step: int) -> EvalResult:
        """Evaluate greedily on the held-out prompts, then on the named sets. A full reward is correct.

        Args:
            watched: wrapper that ends a wait without progress.
            step: number of train steps in the weights.
        """
        for generator in (self._greedy, *(eval_set.generator for eval_set in self.sets)):
            if isinstance(generator, AgentGenerator):
                generator.evaluated_step = step
        items = eval_items(self._source, self._count)
        judged_items = await watched(answered_items(items, self._greedy), "evaluation")
        result = judge(judged_items, await score_all(judged_items, self._scorer), len(items))
        for eval_set in self.sets:
            result.sets[eval_set.name] = await watched(eval_set.measure(), f"evaluation of {eval_set.name}")
        return result

    def begin(self, step: int) -> bool:
        """Start an evaluation in the background. False: no engine can be spared, because no other one serves."""
        assert self._task is None, "one at a time"
        if not self._router.pin():
            return False
        self._task = asyncio.create_task(self.measure(unwatched, step), name="evaluation")
        self._task.add_done_callback(lambda _: self._router.unpin())
        return True

    async def poll(self, wait: bool, watched: Watched) -> EvalStatus:
        """Return the state of the background evaluation. `wait`: wait for its end first.

        An error of the evaluation is raised. If its engine died, the evaluation is abandoned instead, because the
        evaluated weights are lost.
        """
        if self._task is None:  # cancelled, because the run ends
            return EvalStatus(done=True)
        if wait and not self._task.done():
            await watched(asyncio.wait([self._task]), "evaluation")
        if not self._task.done():
            return EvalStatus(done=False)
        task, self._task = self._task, None
        try:
            return EvalStatus(done=True, result=task.result())
        except PinLost as e:
            log.warning("the background evaluation was abandoned: %s", e)
            return EvalStatus(done=True)

    async def stop(self) -> None:
        """Cancel the background evaluation, if there is one."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


async def unwatched(work: Awaitable[Any], description: str) -> Any:
    """Wait without a stall check."""
    return await work
