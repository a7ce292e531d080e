"""The reward `math`: whether two mathematical answers are equivalent, by math-verify.

The answer is the content of the last `\\boxed{}` or `<answer>` of a response, or the text after the last `Answer:`.
The reward's own process is killed at its time limit; so math-verify's alarms stay off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlsys.config import Config
from rlsys.core.types import Prompt, Response
from rlsys.rewards.answer import FORMS

_HASHES = "####"
"""GSM8K's solutions end with it and the answer."""


def math(config: Config, finished: bool = True) -> Callable[[Prompt, Response], float]:
    """Return 1 when the answer equals the right one, else 0. `finished`: a response that was cut off scores 0."""
    from math_verify import parse, verify  # a second: here, and not in the first score's time limit

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
