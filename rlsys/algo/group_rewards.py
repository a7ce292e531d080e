"""Rewards that need all samples of a group: votes instead of a key, verdicts of a judge. No torch.

For the rollout process. `answers` are canonical strings, None where a response has none; a judge is any async
function from a text to a text: a generative reward model behind the same router, or behind one of its own.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlsys.algo.plugin import Plugin

Judge = Callable[[str], Awaitable[str | None]]
"""Text for a judge model -> its response; None when it gave none in time."""


@dataclass(frozen=True)
class Response:
    """One response of a group. `mu` are its tokens' log-probs; `reward` is the verifier's, if there is one; `key` the
    right answer, where the problem's entry has one."""

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


def majority(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer; of several, the one that came first. None when there is no answer at all."""
    counts = Counter(a for a in answers if a is not None)
    return max(counts, key=lambda a: counts[a]) if counts else None


class Ttrl(GroupReward):
    """1 for agreeing with the majority of the group's answers, 0 else: learning without a key."""

    paper: ClassVar[str] = "TTRL: test-time reinforcement learning"
    evidence: ClassVar[str] = "R"

    def needs(self) -> frozenset[str]:
        return frozenset({"answers"})

    async def __call__(
        self, prompt: str, responses: Sequence[Response], judge: Judge | None
    ) -> list[float | None]:
        winner = majority([r.answer for r in responses])
        return [float(r.answer is not None and r.answer == winner) for r in responses]


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


VERDICT = re.compile(r"\\boxed\{\s*(-?\d+)\s*\}")


class Fapo(GroupReward):
    """1 for a correct and sound response, 1 - penalty for a correct one with a flaw, -1 for a wrong one.

    A judge that is shown the right answer names the first wrong step of a correct response in \\boxed{}, -1 for none.
    Only correct responses are judged, all at once. One that fails, takes longer than `data.judge_timeout`, or names
    no step gives no verdict; the authors take that for sound. `data.reward: fapo_judge` trains a judge.
    """

    paper: ClassVar[str] = "FAPO: flawed-aware policy optimisation"
    evidence: ClassVar[str] = "R"
    penalty: Annotated[float, Field(ge=0)] = 1.0
    """What a flaw costs."""
    correct: float = 0.5
    """A response is correct when its verified reward is above this."""
    no_verdict: Literal["censor", "sound"] = "censor"
    """What a correct response without a verdict is: censored, with its group, or taken as sound."""
    question: Annotated[str, Field(pattern=r"\{response\}")] = (
        "Problem:\n{prompt}\n\nRight answer:\n{key}\n\nSolution:\n{response}\n\nThe solution comes to the right "
        "answer. Its paragraphs count from 0: name the first one that has an error, or -1 if none has, in \\boxed{}."
    )
    """What the judge is asked; {prompt}, {key} (the problem's `answer`) and {response} are replaced."""

    def needs(self) -> frozenset[str]:
        return frozenset({"verdicts"})

    async def __call__(
        self, prompt: str, responses: Sequence[Response], judge: Judge | None
    ) -> list[float | None]:
        if judge is None:
            raise ValueError("fapo needs a judge")
        return list(await asyncio.gather(*(self._one(prompt, r, judge) for r in responses)))

    async def _one(self, prompt: str, response: Response, judge: Judge) -> float | None:
        if response.reward is None:
            return None
        if response.reward <= self.correct:
            return -1.0
        step = flaw(await judge(self._asked(prompt, response)) or "")
        if step is None:
            return None if self.no_verdict == "censor" else 1.0
        return 1.0 if step == -1 else 1.0 - self.penalty

    def _asked(self, prompt: str, response: Response) -> str:
        asked = self.question
        if "{key}" in asked and response.key is None:
            raise ValueError(
                "the judge is shown the key, but the problem's entry has no `answer`; leave out {key}"
            )
        values = {"{prompt}": prompt, "{key}": response.key or "", "{response}": response.text}
        return re.sub(r"\{(?:prompt|key|response)\}", lambda found: values[found[0]], asked)


def flaw(verdict: str) -> int | None:
    """The last boxed step of a judge's response; -1: sound; None: no verdict."""
    found = VERDICT.findall(verdict)
    return int(found[-1]) if found else None
