"""Training of a judge: rewards of verdicts on solutions whose first wrong step is known (FAPO's GenRM)."""

from __future__ import annotations

from collections.abc import Callable

from rlsys.config import Config
from rlsys.core.types import Prompt, Response
from rlsys.rewards.answer import final_answer


def judge_reward(predicted: int | None, target: int, steps: int) -> float:
    """Return the reward of a verdict, in [-1, 1] (FAPO, section 3.2).

    The reward is -1 if the verdict is wrong about whether there is an error, 1 if it is right that there is none, and
    otherwise 1 - |predicted - target| / steps.

    Args:
        predicted: first wrong step of the verdict, from 0; -1: the solution is correct. None and a step out of range
            score -1.
        target: the first wrong step, from 0; -1: the solution is correct.
        steps: number of steps.
    """
    if predicted is None or not -1 <= predicted < steps or (predicted < 0) != (target < 0):
        return -1.0
    return 1.0 if target < 0 else 1.0 - abs(predicted - target) / steps


def verdict(response: Response) -> int | None:
    """Return the step in the last \\boxed{}, or else in <answer>, of a finished response; None if there is none."""
    for form in ("boxed", "tags"):
        if (answer := final_answer(response, form)) is not None:
            return int(answer) if answer.removeprefix("-").isdecimal() else None
    return None


def fapo_judge(config: Config) -> Callable[[Prompt, Response], float]:
    """Score (1 + judge_reward) / 2, in [0, 1]. An entry has `step`, the first wrong step or -1, and `steps`.

    Only the exact step scores 1. Group advantages equal those of judge_reward.
    """

    def score(prompt: Prompt, response: Response) -> float:
        if missing := {"step", "steps"} - prompt.entry.keys():
            raise ValueError(f"the row has no {' and no '.join(sorted(missing))}; expected step and steps")
        predicted = verdict(response)
        return (1 + judge_reward(predicted, int(prompt.entry["step"]), int(prompt.entry["steps"]))) / 2

    return score
