"""From a response to its reward, or to the reason why it has none (invariant 5: that is never a 0)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.rewards import RewardFn
from rlsys.types import Prompt


@dataclass(frozen=True)
class Verdict:
    """A reward, or the reason for none: exactly one of the two. `named`: the parts that the reward is the sum of."""

    reward: float | None = None
    reason: str | None = None
    named: dict[str, float] | None = None
    answer: str | None = None

    @property
    def right(self) -> bool:
        """Full marks; of named rewards, in the first."""
        first = next(iter(self.named.values())) if self.named else self.reward
        return first is not None and first >= 1


class Scorer:
    """Runs the reward function with a time limit. `hung` counts calls that did not end in time.

    A reward function is user code: whatever it raises censors one sample, is counted and told, and hurts
    nobody else.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        decode: Callable[[Sequence[int]], str],
        timeout: float,
        answer: Callable[[str], str | None] = lambda text: None,
    ) -> None:
        self._reward_fn = reward_fn
        self._decode = decode
        self._answer = answer
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
        named = reward if isinstance(reward, dict) else None
        parts: list[Any] = list(named.values()) if named else [reward]
        if not all(isinstance(r, int | float) and math.isfinite(r) for r in parts):
            return Verdict(reason=f"reward is {reward!r}, not a finite number")
        return Verdict(reward=float(sum(parts)), named=named, answer=self._answer(text))
