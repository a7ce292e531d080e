"""The reward `fapo_judge`: scores verdicts on solutions whose first wrong step is known, to train a judge (FAPO)."""

from __future__ import annotations

from collections.abc import Callable

from rlsys.config import Config
from rlsys.core.types import Prompt, Response
from rlsys.rewards.answer import final_answer


def judge_reward(predicted: int | None, target: int, steps: int) -> float:
    """Return the reward of a verdict, in [-1, 1] (FAPO, section 3.2).

        solution   verdict     reward
        correct    correct     1
        wrong      step p      1 - |p - target| / steps
        otherwise              -1

    Args:
        predicted: first wrong step of the verdict, from 0; -1: the solution is correct; None: no verdict.
        target: the first wrong step, from 0; -1: the solution is correct.
        steps: number of steps. A `predicted` below -1, or of `steps` and more, scores -1.
    """
    if predicted is None or not -1 <= predicted < steps or (predicted < 0) != (target < 0):
        return -1.0
    return 1.0 if target < 0 else 1.0 - abs(predicted - target) / steps


def verdict(response: Response) -> int | None:
    """Return the step in the last \\boxed{} of a finished response, or else in its last <answer>.

    None if the response is truncated, or has no integer there.
    """
    for form in ("boxed", "tags"):
        if (answer := final_answer(response, form)) is not None:
            return int(answer) if answer.removeprefix("-").isdecimal() else None
    return None


def fapo_judge(config: Config) -> Callable[[Prompt, Response], float]:
    """Score (1 + judge_reward) / 2, in [0, 1].

    An entry must have `step`, the first wrong step or -1, and `steps`. Only the exact step scores 1. Normalised group
    advantages are the same as with judge_reward.
    """

    def score(prompt: Prompt, response: Response) -> float:
        if missing := {"step", "steps"} - prompt.entry.keys():
            raise ValueError(
                f"the row has no {' and no '.join(sorted(missing))}; expected `step` and `steps`"
            )
        predicted = verdict(response)
        return (1 + judge_reward(predicted, int(prompt.entry["step"]), int(prompt.entry["steps"]))) / 2

    return score
