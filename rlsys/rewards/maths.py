"""The reward `math`: whether two mathematical answers mean the same, by math-verify.

The answer is what the last `\\boxed{}` or `<answer>` of a response holds, or what follows a last `Answer:`. It runs
in the reward's own process, where what takes too long is killed; so math-verify's own alarms stay off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlsys.config import Config
from rlsys.data.tokenizer import Tokenizer
from rlsys.rewards.answer import FORMS, final_answer
from rlsys.types import Prompt

_HASHES = "####"
"""GSM8K's solutions end with it and the answer."""


def math(config: Config, finished: bool = True) -> Callable[[Prompt, str], float]:
    """1 when the answer equals the right one, else 0. `finished`: a response that was cut off scores 0."""
    from math_verify import parse, verify  # a second: here, and not in the first score's time limit

    tokenizer = Tokenizer(config.model.path)

    def expressions(text: str) -> Any:
        return parse(f"\\boxed{{{text}}}", parsing_timeout=None) or parse(text, parsing_timeout=None)

    def score(prompt: Prompt, text: str) -> float:
        gold = str(prompt.entry["answer"])
        if not text.endswith(tokenizer.eos_token):
            if finished:
                return 0.0
            text += tokenizer.eos_token
        found = next((a for form in FORMS if (a := final_answer(text, tokenizer.eos_token, form))), None)
        if found is None:
            return 0.0
        gold = gold.rpartition(_HASHES)[2].strip()
        gold = FORMS["boxed"](gold) or gold
        return float(verify(expressions(gold), expressions(found), timeout_seconds=None))

    return score
