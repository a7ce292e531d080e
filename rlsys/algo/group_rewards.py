"""Rewards that are computed from all samples of a group, for example by majority vote or by a judge.

Imports no torch, because it runs in the rollout process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rlsys.algo.plugin import Plugin

Judge = Callable[[str], Awaitable[str | None]]
"""Async function: prompt of a judge model -> its response; None if it does not respond in time.

The model may be a generative reward model behind the run's router or another one.
"""


@dataclass(frozen=True)
class Response:
    """One response of a group.

    Attributes:
        text: Decoded response.
        answer: Canonical final answer; None if the response has none.
        mu: The engine's log-prob of each token.
        reward: Reward from `data.reward`; None if there is none.
        key: Correct answer of the problem; None if the data has none.
    """

    text: str
    answer: str | None
    mu: Sequence[float]
    reward: float | None = None
    key: str | None = None


class GroupReward(Plugin):
    """Base of group rewards: map the responses of one complete group to a reward for each response."""

    async def __call__(
        self, prompt: str, responses: Sequence[Response], judge: Judge | None
    ) -> list[float | None]:
        """Return the reward of each response; None for a response that cannot be judged, which censors the group.

        Args:
            prompt: text of the group's prompt.
            responses: the responses of the group.
            judge: judge of `data.judge`; None if it is not set.
        """
        raise NotImplementedError
