"""Rewards that are computed from all samples of a group, for example by votes or by a judge. No torch.

They run in the rollout process. `answers` are canonical strings, None for a response without an answer. A judge is an
async function from a text to a text, for example a generative reward model behind the same or a separate router.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rlsys.algo.plugin import Plugin

Judge = Callable[[str], Awaitable[str | None]]
"""Prompt of a judge model -> its response; None if it does not respond in time."""


@dataclass(frozen=True)
class Response:
    """One response of a group.

    `mu` are its tokens' log-probs; `reward` is the verifier's, if there is one; `key` the correct answer, if the
    problem's entry has one.
    """

    text: str
    answer: str | None
    mu: Sequence[float]
    reward: float | None = None
    key: str | None = None


class GroupReward(Plugin):
    """Map the responses of one complete group to rewards; None for a sample that cannot be judged (censored)."""

    async def __call__(
        self, prompt: str, responses: Sequence[Response], judge: Judge | None
    ) -> list[float | None]:
        raise NotImplementedError
