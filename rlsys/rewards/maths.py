"""The reward `math`: whether two mathematical answers are equivalent, by math-verify.

The answer is the content of the last `<answer>` or `\\boxed{}` of a response, or the text after the last `Answer:`.
math-verify's time limits are disabled, because the process of the reward is killed at rollout.reward_timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlsys.config import Config
from rlsys.core.types import Prompt, Response
from rlsys.rewards.answer import FORMS

_HASHES = "####"
"""Text before the answer at the end of GSM8K's solutions."""


def math(config: Config, finished: bool = True) -> Callable[[Prompt, Response], float]:
    """Score 1 if the answer is equivalent to the row's `answer`, otherwise 0.

    Args:
        config: config of the run.
        finished: whether truncated responses score 0.
    """
    # Imported here, because the import takes a second, which no score may include.
    from math_verify import parse, verify

    def expressions(text: str) -> Any:
        return parse(f"\\boxed{{{text}}}", parsing_timeout=None) or parse(text, parsing_timeout=None)

    def score(prompt: Prompt, response: Response) -> float:
        solution = str(prompt.entry["answer"])
        answer = next((a for find in FORMS.values() if (a := find(response))), None)
        if answer is None or (finished and not response.finished):
            return 0.0
        solution = solution.rpartition(_HASHES)[2].strip()
        expected = FORMS["boxed"](solution) or solution
        return float(verify(expressions(expected), expressions(answer), timeout_seconds=None))

    return score
