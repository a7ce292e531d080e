"""Rewards: `reward_fn(prompt, response_text) -> Reward in [0, 1]`.

A reward function, built in or named by import path, is made as `function(config)` and may be async or plain. An
async one runs in the event loop and must not hold it: a loop that stands still for rollout.stall_timeout ends the
run. A plain one runs in processes of its own, each of which makes
the function for itself: one that hangs can be killed there. Whoever calls has the time limit and censors the sample.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from rlsys.config import Config
from rlsys.plugins import call, resolve
from rlsys.rewards.answer import (
    answer_and_format,
    exact_answer,
    reasoning_gym,
    reasoning_gym_partial,
)
from rlsys.rewards.judge_training import fapo_judge
from rlsys.rewards.workers import RewardWorkers
from rlsys.types import Prompt

Reward = float | dict[str, float]
"""One number, or named ones: advantages see their sum, `gdpo` each by itself."""
RewardFn = Callable[[Prompt, str], Awaitable[Reward]]

REWARDS: dict[str, Callable[[Config], Callable[[Prompt, str], Any]]] = {
    "reasoning_gym": reasoning_gym,
    "reasoning_gym_partial": reasoning_gym_partial,
    "exact_answer": exact_answer,
    "answer_and_format": answer_and_format,
    "fapo_judge": fapo_judge,
}


def make_score(config: Config) -> Callable[[Prompt, str], Any]:
    """The function that `data.reward` names. Raises UserError for an unknown name."""
    score: Callable[[Prompt, str], Any] = call(
        "data.reward", resolve("data.reward", config.data.reward, REWARDS), config
    )
    return score


def check_reward(name: str, prompt: Prompt, value: Any) -> Reward:
    """What a reward function gave, as numbers. Raises ValueError when they are not in [0, 1]."""
    named = value if isinstance(value, dict) else {"reward": value}
    if not named or not all(0 <= float(v) <= 1 for v in named.values()):  # also false for NaN
        raise ValueError(f"{name} gave {value!r} for prompt {prompt.index}: not in [0, 1]")
    marks = {key: float(v) for key, v in named.items()}
    return marks if isinstance(value, dict) else marks["reward"]


def _is_async(score: Callable[..., Any]) -> bool:
    """A function, a method, or an object that is called like one."""
    return inspect.iscoroutinefunction(score) or inspect.iscoroutinefunction(type(score).__call__)


class Rewards:
    """The reward function of a run. Raises UserError for an unknown name."""

    def __init__(self, config: Config) -> None:
        self._name = config.data.reward
        score = make_score(config)
        self._async_score = score if _is_async(score) else None
        self._workers = RewardWorkers(config)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RewardFn]:
        """For one score. A plain function's process is killed when the score has not come by the end."""
        own = nullcontext(self._async_score) if self._async_score else self._workers.worker()
        async with own as score:

            async def reward_fn(prompt: Prompt, response_text: str) -> Reward:
                return check_reward(self._name, prompt, await score(prompt, response_text))

            yield reward_fn

    async def close(self) -> None:
        await self._workers.close()


__all__ = ["REWARDS", "Reward", "RewardFn", "Rewards", "check_reward", "make_score"]
