"""How a judge is trained: the reward of a verdict on a solution whose first wrong step is known (FAPO's GenRM)."""

from __future__ import annotations

from collections.abc import Callable

from rlsys.config import Config
from rlsys.core.types import Prompt, Response
from rlsys.rewards.answer import final_answer


def judge_reward(said: int | None, truth: int, steps: int) -> float:
    """In [-1, 1]: +-1 for seeing whether there is a flaw, less how far off its place is (FAPO, section 3.2).

    `said` and `truth` are steps, counted from 0, -1 for a sound solution; `steps`: how many there are. When both name
    a step: 1 - |said - truth| / steps. No verdict (None), and a step that there is not, are as wrong as can be.
    """
    if said is None or not -1 <= said < steps or (said < 0) != (truth < 0):
        return -1.0
    return 1.0 if truth < 0 else 1.0 - abs(said - truth) / steps


def verdict(response: Response) -> int | None:
    """The step in the last \\boxed{} of a response that has ended, or else in its <answer>; None where neither is a
    number."""
    for form in ("boxed", "tags"):
        if (found := final_answer(response, form)) is not None:
            return int(found) if found.removeprefix("-").isdecimal() else None
    return None


def fapo_judge(config: Config) -> Callable[[Prompt, Response], float]:
    """(1 + judge_reward) / 2, a reward in [0, 1]. An entry has `step`, the first wrong one or -1, and `steps`.

    Full marks are for the exact step. Advantages over groups are the same as those of judge_reward itself.
    """

    def score(prompt: Prompt, response: Response) -> float:
        if missing := {"step", "steps"} - prompt.entry.keys():
            raise ValueError(f"the problem's entry has no {' and no '.join(sorted(missing))}")
        said = verdict(response)
        return (1 + judge_reward(said, int(prompt.entry["step"]), int(prompt.entry["steps"]))) / 2

    return score
