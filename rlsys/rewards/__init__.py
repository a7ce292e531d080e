"""Rewards: `build_reward(config)` gives `async reward_fn(prompt, response_text) -> Reward in [0, 1]`.

A reward function, built in or named by import path, is made as `function(config)` and may be async or plain;
a plain one runs in a thread, so that slow scoring never holds the event loop. It must not use signals (a
thread cannot) and cannot be interrupted: whoever calls it has the time limit and censors the sample.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from rlsys.config import Config
from rlsys.plugins import call, resolve
from rlsys.rewards.answer import (
    answer_and_format,
    canonical_answer,
    exact_answer,
    reasoning_gym,
    reasoning_gym_partial,
)
from rlsys.types import Prompt

Reward = float | dict[str, float]
"""One number, or named ones: advantages see their sum, `gdpo` each by itself."""
RewardFn = Callable[[Prompt, str], Awaitable[Reward]]

REWARDS: dict[str, Callable[[Config], Callable[[Prompt, str], Any]]] = {
    "reasoning_gym": reasoning_gym,
    "reasoning_gym_partial": reasoning_gym_partial,
    "exact_answer": exact_answer,
    "answer_and_format": answer_and_format,
}


def build_reward(config: Config) -> RewardFn:
    """The reward that `data.reward` names. Raises UserError for an unknown name.

    The function that comes back raises ValueError when a score is not a number in [0, 1].
    """
    score = call("data.reward", resolve("data.reward", config.data.reward, REWARDS), config)

    async def reward_fn(prompt: Prompt, response_text: str) -> Reward:
        if inspect.iscoroutinefunction(score):
            value = await score(prompt, response_text)
        else:
            value = await asyncio.to_thread(score, prompt, response_text)
        named = value if isinstance(value, dict) else {"reward": value}
        if not named or not all(0 <= float(v) <= 1 for v in named.values()):  # also false for NaN
            raise ValueError(f"{config.data.reward} gave {value!r} for prompt {prompt.index}: not in [0, 1]")
        marks = {name: float(v) for name, v in named.items()}
        return marks if isinstance(value, dict) else marks["reward"]

    return reward_fn


__all__ = ["REWARDS", "Reward", "RewardFn", "build_reward", "canonical_answer"]
