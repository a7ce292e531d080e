"""Verifiers of a final answer between <answer> and </answer>.

A response that does not end with the end-of-sequence token never said that it was done: it scores 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rlsys.config import Config
from rlsys.data.tokenizer import Tokenizer
from rlsys.types import Prompt

_ANSWER = re.compile("<answer>.*?</answer>", re.DOTALL)

Score = Callable[[Prompt, str], float]


def final_answer(response_text: str, eos_token: str) -> str | None:
    """Text of the last <answer>...</answer> of a response that ended with `eos_token`, else None."""
    if not response_text.endswith(eos_token):
        return None
    _, opened, tail = response_text.rpartition("<answer>")
    answer, closed, _ = tail.partition("</answer>")
    return answer.strip() if opened and closed else None


def count_answers(text: str) -> int:
    """How many <answer>...</answer> it has."""
    return len(_ANSWER.findall(text))


def canonical_answer(response_text: str, eos_token: str) -> str | None:
    """The final answer as votes compare it: single blanks, no case; None where there is none."""
    answer = final_answer(response_text, eos_token)
    return " ".join(answer.casefold().split()) if answer else None


def reasoning_gym(config: Config) -> Score:
    """1 when the task's own verifier gives full marks, else 0.

    Some give part marks for an answer that merely contains the right one: policies learn to exploit
    that. Where part marks are wanted, `reasoning_gym_partial` passes them on.
    """
    partial = reasoning_gym_partial(config)
    return lambda prompt, response_text: float(partial(prompt, response_text) >= 1)


def reasoning_gym_partial(config: Config) -> Score:
    """What the task's own verifier gives, part marks included; an entry names its task."""
    eos_token = Tokenizer(config.model.path).eos_token

    def score(prompt: Prompt, response_text: str) -> float:
        answer = final_answer(response_text, eos_token)
        if answer is None:
            return 0.0
        return float(_verifier(prompt.entry["metadata"]["source_dataset"])(answer, prompt.entry))

    return score


@lru_cache
def _verifier(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn  # 1.5 s to import; only where a run needs it

    verifier: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(task)
    return verifier


def answer_and_format(config: Config) -> Callable[[Prompt, str], dict[str, float]]:
    """Two named rewards: `answer`, full marks of the task's verifier; `format`, 1 for a final answer at all."""
    right, eos_token = reasoning_gym(config), Tokenizer(config.model.path).eos_token

    def score(prompt: Prompt, response_text: str) -> dict[str, float]:
        found = final_answer(response_text, eos_token) is not None
        return {"answer": right(prompt, response_text), "format": float(found)}

    return score


def exact_answer(config: Config) -> Score:
    """1 when the answer is the entry's `answer`, letter by letter but for surrounding blanks."""
    eos_token = Tokenizer(config.model.path).eos_token

    def score(prompt: Prompt, response_text: str) -> float:
        return float(final_answer(response_text, eos_token) == str(prompt.entry["answer"]).strip())

    return score
