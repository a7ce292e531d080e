"""DARE: distribution-aware reward estimation. Imports no torch, because it runs in the rollout process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, ClassVar

from pydantic import Field

from rlsys.algo.group_rewards import GroupReward, Judge, Response


class Dare(GroupReward):
    """Reward from the distribution of answers in a group, with a bonus for rare and confident answers.

    1. The mass of an answer that n responses give is n / (u + eps), normalised over the answers. The uncertainty u is
       the mean of -mu over the answer's responses, at most 1, as an estimate of their entropy.
    2. Answers with a mass below `tau` get reward 0, and the masses of the others are normalised again.
    3. Each remaining answer gets reward mass + alpha (1 - n / M) (1 - u), where M is the number of responses with a
       remaining answer.

    The paper does not state alpha and tau.
    """

    paper: ClassVar[str] = "DARE: distribution-aware reward estimation"
    evidence: ClassVar[str] = "P"
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Weight of the exploration bonus."""
    tau: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Smallest mass of an answer with a reward."""
    eps: Annotated[float, Field(gt=0)] = 1e-2
    """Added to the uncertainty."""

    def needs(self) -> frozenset[str]:
        return frozenset({"answers"})

    def by_answer(self, responses: Sequence[Response]) -> dict[str, float]:
        """Return the reward of each distinct answer."""
        counts = Counter(r.answer for r in responses if r.answer is not None)
        uncertainty = {
            answer: min(1.0, fmean(-fmean(r.mu) if r.mu else 0.0 for r in responses if r.answer == answer))
            for answer in counts
        }
        mass = _normalised({answer: n / (uncertainty[answer] + self.eps) for answer, n in counts.items()})
        mass = _normalised({answer: m for answer, m in mass.items() if m >= self.tau})
        votes = sum(counts[answer] for answer in mass)
        rewards = dict.fromkeys(counts, 0.0)
        for answer, m in mass.items():
            rewards[answer] = m + self.alpha * (1 - counts[answer] / votes) * (1 - uncertainty[answer])
        return rewards

    async def __call__(
        self, prompt: str, responses: Sequence[Response], judge: Judge | None
    ) -> list[float | None]:
        rewards = self.by_answer(responses)
        return [0.0 if r.answer is None else rewards[r.answer] for r in responses]


def _normalised(mass: dict[str, float]) -> dict[str, float]:
    """Return the masses divided by their sum."""
    total = sum(mass.values())
    return {answer: m / total for answer, m in mass.items()}
