"""The reward `math`: whether two mathematical answers are equivalent, by math-verify.

The answer is the content of the last `<answer>` or `\\boxed{}` of a response, or the text after the last `Answer:`.
math-verify's own alarms are disabled, because the process of the reward is killed at its time limit.
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

    `finished`: truncated responses score 0.
    """
    from math_verify import (
        parse,
        verify,
    )  # imported here: it takes a second that must not count for the first score

    def expressions(text: str) -> Any:
        return parse(f"\\boxed{{{text}}}", parsing_timeout=None) or parse(text, parsing_timeout=None)

    def score(prompt: Prompt, response: Response) -> float:
        gold = str(prompt.entry["answer"])
        answer = next((a for read in FORMS.values() if (a := read(response))), None)
        if answer is None or (finished and not response.finished):
            return 0.0
        gold = gold.rpartition(_HASHES)[2].strip()
        gold = FORMS["boxed"](gold) or gold
        return float(verify(expressions(gold), expressions(answer), timeout_seconds=None))

    return score
