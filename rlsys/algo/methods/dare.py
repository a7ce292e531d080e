"""DARE: distribution-aware reward estimation. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, ClassVar

from pydantic import Field

from rlsys.algo.group_rewards import GroupReward, Judge, Response


class Dare(GroupReward):
    """Reward from the whole distribution of answers, with confident answers and rare ones lifted.

    For an answer y given n of M times with mean token uncertainty u: mass ~ n / (u + eps), normalised; answers below
    `tau` drop out, mass and M are taken anew of the rest; reward = mass + alpha (1 - n / M) (1 - u). u is the mean of
    -mu over the answer's responses, an estimate of their entropy from the engine's own log-probs, cut at 1. alpha and
    tau were not found in the paper.
    """

    paper: ClassVar[str] = "DARE: distribution-aware reward estimation"
    evidence: ClassVar[str] = "P"
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Weight of the exploration bonus."""
    tau: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Smallest mass that counts."""
    eps: Annotated[float, Field(gt=0)] = 1e-2
    """Added to the uncertainty."""

    def needs(self) -> frozenset[str]:
        return frozenset({"answers"})

    def by_answer(self, responses: Sequence[Response]) -> dict[str, float]:
        """Reward of each distinct answer."""
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
