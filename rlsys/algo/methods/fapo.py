"""FAPO: flawed-aware policy optimisation. Imports no torch, because it runs in the rollout process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlsys.algo.group_rewards import GroupReward, Judge, Response

VERDICT = re.compile(r"\\boxed\{\s*(-?\d+)\s*\}")


class Fapo(GroupReward):
    """Reward of 1 for a sound correct response, 1 - penalty for a flawed correct one, and -1 for a wrong one.

    A judge that knows the correct answer returns the index of the first wrong step of a correct response in
    \\boxed{}, or -1 if there is none. It does not judge wrong responses. If it fails, takes longer than
    `data.judge_timeout` or returns no index, the response has no verdict; the authors then treat it as sound.
    `data.reward: fapo_judge` trains a judge.
    """

    paper: ClassVar[str] = "FAPO: flawed-aware policy optimisation"
    evidence: ClassVar[str] = "R"
    penalty: Annotated[float, Field(ge=0)] = 1.0
    """Reward that is subtracted for a flaw."""
    correct: float = 0.5
    """A response is correct if its reward from `data.reward` is above this."""
    no_verdict: Literal["censor", "sound"] = "censor"
    """Treatment of a correct response without a verdict. censor: its group is censored. sound: it counts as sound."""
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
            raise ValueError("algo.group_reward fapo needs a judge, but data.judge is not set")
        return list(await asyncio.gather(*(self._score(prompt, r, judge) for r in responses)))

    async def _score(self, prompt: str, response: Response, judge: Judge) -> float | None:
        """Return the reward of a response; None if it cannot be judged."""
        if response.reward is None:
            return None
        if response.reward <= self.correct:
            return -1.0
        step = flaw(await judge(self._question(prompt, response)) or "")
        if step is None:
            return None if self.no_verdict == "censor" else 1.0
        return 1.0 if step == -1 else 1.0 - self.penalty

    def _question(self, prompt: str, response: Response) -> str:
        """Return the judge's prompt for a response.

        Raises:
            ValueError: the prompt needs a correct answer that the data does not have.
        """
        question = self.question
        if "{key}" in question and response.key is None:
            raise ValueError(
                "algo.group_reward fapo: question contains {key}, but the problem has no `answer` in the data; "
                "remove {key}"
            )
        values = {"{prompt}": prompt, "{key}": response.key or "", "{response}": response.text}
        return re.sub(r"\{(?:prompt|key|response)\}", lambda match: values[match[0]], question)


def flaw(verdict: str) -> int | None:
    """Return the last boxed index of a judge's response, where -1 means sound; None without a verdict."""
    steps = VERDICT.findall(verdict)
    return int(steps[-1]) if steps else None
