"""Evaluations of a run: the trainer waits for them, or they run in the background on a reserved engine.

For an evaluation in the background (eval.background), an engine is pinned: it keeps its weights, and gets no weight
update and no training samples. So all responses come from one weight version, and training continues on the other
engines. After the evaluation the engine needs a weight update before it serves samples.
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
"""Function that awaits its first argument, and raises if there is no progress; the second argument names the wait."""

log = logging.getLogger("rlsys.rollout")


class Evaluator:
    """Owner of the background evaluation and its pinned engine, of which there is at most one.

    Attributes:
        sets: runners of the named sets, which the caller closes.
    """

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
        """Evaluate on the held-out prompts with greedy responses, then on the named sets.

        Args:
            watched: awaits the parts of the evaluation, and raises if there is no progress.
            step: number of train steps that the weights contain.

        Raises:
            RunError: no response has a reward, or the responses come from several weight versions.
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
        """Start an evaluation in the background.

        Args:
            step: number of train steps that the weights contain.

        Returns:
            whether it was started; False if no engine can be pinned, because no other one serves.
        """
        assert self._task is None, "one at a time"
        if not self._router.pin():
            return False
        self._task = asyncio.create_task(self.measure(unwatched, step), name="evaluation")
        self._task.add_done_callback(lambda _: self._router.unpin())
        return True

    async def poll(self, wait: bool, watched: Watched) -> EvalStatus:
        """Return the state of the background evaluation.

        If its engine died, the evaluation is abandoned, because the evaluated weights are lost.

        Args:
            wait: whether to wait for the end of the evaluation.
            watched: awaits the end, and raises if there is no progress.

        Raises:
            RunError: the evaluation failed.
        """
        if self._task is None:  # `stop` has cancelled it
            return EvalStatus(done=True)
        if wait and not self._task.done():
            await watched(asyncio.wait([self._task]), "evaluation")
        if not self._task.done():
            return EvalStatus(done=False)
        task, self._task = self._task, None
        try:
            return EvalStatus(done=True, result=task.result())
        except PinLost as e:
            log.warning("the background evaluation is abandoned: %s", e)
            return EvalStatus(done=True)

    async def stop(self) -> None:
        """Cancel the background evaluation, if there is one."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


async def unwatched(work: Awaitable[Any], description: str) -> Any:
    """Await `work` without a check of progress."""
    return await work
