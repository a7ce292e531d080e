"""From a response to its reward, or to the reason why it has none (invariant 5: that is never a 0)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlsys.rewards import RewardFn
from rlsys.types import Prompt


@dataclass(frozen=True)
class Verdict:
    """A reward, or the reason for none: exactly one of the two."""

    reward: float | None = None
    reason: str | None = None


class Scorer:
    """Runs the reward function with a time limit. `hung` counts calls that did not end in time.

    A reward function is user code: whatever it raises censors one sample, is counted and told, and hurts
    nobody else.
    """

    def __init__(self, reward_fn: RewardFn, decode: Callable[[Sequence[int]], str], timeout: float) -> None:
        self._reward_fn = reward_fn
        self._decode = decode
        self._timeout = timeout
        self.hung = 0

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> Verdict:
        text = self._decode(response_ids)
        task = asyncio.ensure_future(self._reward_fn(prompt, text))
        try:
            # Not wait_for: that waits for the cancelled task to end, and a hung one may never do so.
            done, _ = await asyncio.wait({task}, timeout=self._timeout)
        finally:
            task.cancel()
        if not done:
            self.hung += 1
            return Verdict(reason=f"reward took longer than rollout.reward_timeout = {self._timeout:g} s")
        if task.cancelled():
            return Verdict(reason="reward was cancelled")
        if (error := task.exception()) is not None:
            return Verdict(reason=f"reward raised {type(error).__name__}: {error}")
        reward = task.result()
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            return Verdict(reason=f"reward is {reward!r}, not a finite number")
        return Verdict(reward=float(reward))
