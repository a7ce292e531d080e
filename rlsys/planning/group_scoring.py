"""Calls of the group reward (`algo.group_reward`), which is user code and may fail or hang (invariant 5)."""

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
    """Runs the group reward with a time limit. A failure or a timeout affects only its group.

    Attributes:
        timeouts: Number of groups without rewards within the time limit.
        failures: Number of groups for which the group reward raised an exception or returned invalid rewards.
    """

    def __init__(self, name: str, reward: GroupReward, timeout: float) -> None:
        """Create a scorer.

        Args:
            name: name of the group reward, for messages.
            reward: the group reward.
            timeout: time limit in seconds, without the time of judge calls, which have their own limit.
        """
        self._name = f"algo.group_reward {name}"
        self._reward = reward
        self._timeout = timeout
        self.timeouts = self.failures = 0

    async def score(
        self, prompt: str, responses: Sequence[Response], judge: JudgeWithTimeout | None
    ) -> list[float] | str:
        """Return a finite reward for each response, or the reason why the group has no rewards.

        Args:
            prompt: text of the group's prompt.
            responses: the responses.
            judge: the judge of `data.judge`; None without one.
        """
        open_questions = 0

        async def judge_text(text: str) -> str | None:
            """Ask the judge, and count the open question, during which the time limit does not run."""
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
        """Return the rewards of a finished task, or the reason why they are invalid.

        Args:
            task: the task.
            count: expected number of rewards.
        """
        if task.cancelled():
            return f"{self._name} was cancelled"
        if (error := task.exception()) is not None:
            return f"{self._name} raised {type(error).__name__}: {error_text(error)}{source_location(error)}"
        rewards = task.result()
        if not isinstance(rewards, list | tuple) or len(rewards) != count:
            return f"{self._name} returned {repr(rewards)[:200]}; expected a list of {count} rewards"
        invalid = [r for r in rewards if not is_reward(r)]
        if invalid:
            return f"{self._name} returned the reward {invalid[0]!r}; expected a finite number"
        return [float(r) for r in rewards]


def _unjudged(rewards: Any) -> int:
    """Return the number of responses for which the group reward returned None."""
    return sum(r is None for r in rewards) if isinstance(rewards, list | tuple) else 0
