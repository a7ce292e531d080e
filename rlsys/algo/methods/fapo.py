"""FAPO: flawed-aware policy optimisation. No torch."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlsys.algo.group_rewards import GroupReward, Judge, Response

VERDICT = re.compile(r"\\boxed\{\s*(-?\d+)\s*\}")


class Fapo(GroupReward):
    """1 for a correct and sound response, 1 - penalty for a correct one with a flaw, -1 for a wrong one.

    A judge that sees the right answer returns the first wrong step of a correct response in \\boxed{}, or -1. Only
    correct responses are judged, concurrently. If the judge fails, takes longer than `data.judge_timeout` or returns
    no step, there is no verdict; the authors treat the response as sound. `data.reward: fapo_judge` trains a judge.
    """

    paper: ClassVar[str] = "FAPO: flawed-aware policy optimisation"
    evidence: ClassVar[str] = "R"
    penalty: Annotated[float, Field(ge=0)] = 1.0
    """Reward subtracted for a flaw."""
    correct: float = 0.5
    """A response is correct when its verified reward is above this."""
    no_verdict: Literal["censor", "sound"] = "censor"
    """Treatment of a correct response without a verdict: it is censored, with its group, or counts as sound."""
    question: Annotated[str, Field(pattern=r"\{response\}")] = (
        "Problem:\n{prompt}\n\nRight answer:\n{key}\n\nSolution:\n{response}\n\nThe solution comes to the right "
        "answer. Its paragraphs count from 0: name the first one that has an error, or -1 if none has, in \\boxed{}."
    )
    """Prompt of the judge; {prompt}, {key} (the problem's `answer`) and {response} are replaced."""

    def needs(self) -> frozenset[str]:
        return frozenset({"verdicts"})

    async def __call__(
        self, prompt: str, responses: Sequence[Response], judge: Judge | None
    ) -> list[float | None]:
        if judge is None:
            raise ValueError("algo.group_reward fapo needs a judge: data.judge is not set")
        return list(await asyncio.gather(*(self._score(prompt, r, judge) for r in responses)))

    async def _score(self, prompt: str, response: Response, judge: Judge) -> float | None:
        if response.reward is None:
            return None
        if response.reward <= self.correct:
            return -1.0
        step = flaw(await judge(self._question(prompt, response)) or "")
        if step is None:
            return None if self.no_verdict == "censor" else 1.0
        return 1.0 if step == -1 else 1.0 - self.penalty

    def _question(self, prompt: str, response: Response) -> str:
        question = self.question
        if "{key}" in question and response.key is None:
            raise ValueError(
                "algo.group_reward fapo: question contains {key}, but the problem's entry has no `answer`; remove "
                "{key}"
            )
        values = {"{prompt}": prompt, "{key}": response.key or "", "{response}": response.text}
        return re.sub(r"\{(?:prompt|key|response)\}", lambda match: values[match[0]], question)


def flaw(verdict: str) -> int | None:
    """Return the last boxed step of a judge's response; -1: sound; None: no verdict."""
    steps = VERDICT.findall(verdict)
    return int(steps[-1]) if steps else None
