"""Rewards that need all samples of a group: votes instead of a key, verdicts of a judge. No torch.

For the rollout process. `answers` are canonical strings, None for a response without an answer; a judge is any async
function from a text to a text: a generative reward model behind the same router, or behind a separate one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rlsys.algo.plugin import Plugin

Judge = Callable[[str], Awaitable[str | None]]
"""Text for a judge model -> its response; None when it gave none in time."""


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
    """Responses of one complete group -> their rewards, None for a sample that cannot be judged (censored)."""

    async def __call__(
        self, prompt: str, responses: Sequence[Response], judge: Judge | None
    ) -> list[float | None]:
        raise NotImplementedError
