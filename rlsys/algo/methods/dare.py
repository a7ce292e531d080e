"""DARE: distribution-aware reward estimation. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, ClassVar

from pydantic import Field

from rlsys.algo.group_rewards import GroupReward, Judge, Response


class Dare(GroupReward):
    """Reward from the distribution of answers in a group, higher for confident and for rare answers.

    For an answer that occurs n of M times with mean token uncertainty u: mass ~ n / (u + eps), normalised; answers
    with a mass below `tau` get 0, and mass and M are recomputed for the rest; reward = mass + alpha (1 - n / M) (1 -
    u). u is the mean of -mu over the answer's responses, an estimate of their entropy from the engine's log-probs,
    at most 1. The paper does not state alpha and tau.
    """

    paper: ClassVar[str] = "DARE: distribution-aware reward estimation"
    evidence: ClassVar[str] = "P"
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Weight of the exploration bonus."""
    tau: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Smallest mass of a rewarded answer."""
    eps: Annotated[float, Field(gt=0)] = 1e-2
    """Added to the uncertainty."""

    def needs(self) -> frozenset[str]:
        return frozenset({"answers"})

    def by_answer(self, responses: Sequence[Response]) -> dict[str, float]:
        """Return the reward of each distinct answer."""
        count = Counter(r.answer for r in responses if r.answer is not None)
        doubt = {
            a: min(1.0, fmean(-fmean(r.mu) if r.mu else 0.0 for r in responses if r.answer == a))
            for a in count
        }
        mass = _normalised({a: n / (doubt[a] + self.eps) for a, n in count.items()})
        mass = _normalised({a: m for a, m in mass.items() if m >= self.tau})
        votes = sum(count[a] for a in mass)
        bonus = {a: self.alpha * (1 - count[a] / votes) * (1 - doubt[a]) for a in mass}
        return {a: mass[a] + bonus[a] if a in mass else 0.0 for a in count}

    async def __call__(
        self, prompt: str, responses: Sequence[Response], judge: Judge | None
    ) -> list[float | None]:
        rewards = self.by_answer(responses)
        return [0.0 if r.answer is None else rewards[r.answer] for r in responses]


def _normalised(mass: dict[str, float]) -> dict[str, float]:
    total = sum(mass.values())
    return {a: m / total for a, m in mass.items()}
