"""Group rewards: computation of rewards from the responses of a whole group, or the reason of a failure (invariant
5)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rlsys.algo.group_rewards import GroupReward, Response
from rlsys.core.imports import source_location
from rlsys.core.texts import error_text
from rlsys.core.types import is_reward
from rlsys.rewards.judges import JudgeWithTimeout, wait_for_work
from rlsys.rewards.workers import contained


class GroupScorer:
    """Runs the group reward, which is user code: a failure affects one group, and is counted and reported.

    `timeouts` counts groups without rewards within `timeout` seconds, excluding the time of judge calls (the judge
    has its own limit); `failures` those for which it raised or gave no usable rewards.
    """

    def __init__(self, name: str, reward: GroupReward, timeout: float) -> None:
        self._name = f"algo.group_reward {name}"
        self._reward = reward
        self._timeout = timeout
        self.timeouts = self.failures = 0

    async def score(
        self, prompt: str, responses: Sequence[Response], judge: JudgeWithTimeout | None
    ) -> list[float] | str:
        """Return a finite reward for each response, or the reason why there are none."""
        open_questions = 0

        async def judge_text(text: str) -> str | None:
            nonlocal open_questions
            assert judge is not None
            open_questions += 1
            try:
                return await judge(text)
            finally:
                open_questions -= 1

        async def score() -> Any:  # also catches a function that is not a coroutine function
            return await self._reward(prompt, responses, None if judge is None else judge_text)

        task = asyncio.ensure_future(contained(score()))
        try:
            await wait_for_work(task, self._timeout, lambda: not open_questions)
        finally:
            task.cancel()
        if not task.done():
            self.timeouts += 1
            return f"{self._name} took longer than rollout.reward_timeout = {self._timeout:g} s"
        if not task.cancelled() and task.exception() is None and (unjudged := _unjudged(task.result())):
            detail = f"; {judge.last}" if judge is not None and judge.last else ""
            return f"{self._name} could not judge {unjudged} samples of the group{detail}"
        result = self._validate(task, len(responses))
        self.failures += isinstance(result, str)
        return result

    def _validate(self, task: asyncio.Future[Any], count: int) -> list[float] | str:
        """Validate the result of a finished task."""
        if task.cancelled():
            return f"{self._name} was cancelled"
        if (error := task.exception()) is not None:
            return f"{self._name} raised {type(error).__name__}: {error_text(error)}{source_location(error)}"
        rewards = task.result()
        if not isinstance(rewards, list | tuple) or len(rewards) != count:
            return f"{self._name} gave {repr(rewards)[:200]}, expected a list of {count} rewards"
        bad = [r for r in rewards if not is_reward(r)]
        return f"{self._name} gave {bad[0]!r}, not a finite number" if bad else [float(r) for r in rewards]


def _unjudged(rewards: Any) -> int:
    """Return the number of samples for which the group reward returned None."""
    return sum(r is None for r in rewards) if isinstance(rewards, list | tuple) else 0
