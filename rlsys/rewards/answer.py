"""Rewards that verify the final answer of a response, and functions that find this answer.

The final answer is between <answer> and </answer>, or in another form that the prompt requests (FORMS). A truncated
response has no final answer, and scores 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from rlsys.config import Config
from rlsys.core.types import Prompt, Response

_ANSWER = re.compile("<answer>.*?</answer>", re.DOTALL)
_LINE = re.compile(r"^Answer:[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_BOX = "\\boxed{"

Score = Callable[[Prompt, Response], float]


def final_answer(response: Response, form: str = "tags") -> str | None:
    """Return the final answer of a response; None if it has none, or was truncated.

    Args:
        response: the response.
        form: form of the answer:
            tags: the last <answer>...</answer>,
            boxed: the last \\boxed{...},
            line: the text after `Answer:` in the last line that starts with it.

    Raises:
        KeyError: the form is unknown.
    """
    return FORMS[form](response) if response.finished else None


def _tags(text: str) -> str | None:
    _, start_tag, tail = text.rpartition("<answer>")
    answer, end_tag, _ = tail.partition("</answer>")
    return answer.strip() if start_tag and end_tag else None


def _boxed(text: str) -> str | None:
    _, box, tail = text.rpartition(_BOX)
    depth = 1
    for i, character in enumerate(tail if box else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return tail[:i].strip()
    return None


def _line(text: str) -> str | None:
    answers = _LINE.findall(text)
    return answers[-1] if answers else None


FORMS: dict[str, Callable[[str], str | None]] = {"tags": _tags, "boxed": _boxed, "line": _line}


def form_of(prompt: Prompt) -> str:
    """Return the form of the final answer that the prompt requests, a key of FORMS.

    The plug-in of algo.prompt may set it in the entry; otherwise it is `tags`.
    """
    return str(prompt.entry.get("form", "tags"))


def format_share(prompt: Prompt, response: Response) -> float:
    """Return the share of the required format elements that a response has, in [0, 1].

    The elements are a final answer, and exactly one occurrence of each text of the entry's `marks`.
    """
    satisfied = [final_answer(response, form_of(prompt)) is not None]
    satisfied += [response.count(mark) == 1 for mark in prompt.entry.get("marks", ())]
    return sum(satisfied) / len(satisfied)


def count_answers(text: str) -> int:
    """Count the <answer>...</answer> blocks of a text."""
    return len(_ANSWER.findall(text))


def canonical_answer(response: Response, form: str = "tags") -> str | None:
    """Return the final answer in a form for comparisons, in lower case and with single spaces; None without one."""
    answer = final_answer(response, form)
    return " ".join(answer.casefold().split()) if answer else None


def reasoning_gym(config: Config) -> Score:
    """Score 1 if the task's verifier in reasoning-gym returns its full score, otherwise 0.

    Some verifiers return a partial score for an answer that contains the correct answer, which policies learn to
    exploit. `reasoning_gym_partial` returns partial scores.
    """
    partial = reasoning_gym_partial(config)
    return lambda prompt, response: float(partial(prompt, response) >= 1)


def reasoning_gym_partial(config: Config) -> Score:
    """Score with the task's verifier in reasoning-gym, including partial scores. The entry names the task."""
    from reasoning_gym import (
        get_score_answer_fn,
    )  # here, because it takes seconds, which no score may include

    verifier = lru_cache(get_score_answer_fn)

    def score(prompt: Prompt, response: Response) -> float:
        answer = final_answer(response, form_of(prompt))
        if answer is None:
            return 0.0
        return float(verifier(prompt.entry["metadata"]["source_dataset"])(answer, prompt.entry))

    return score


def answer_and_format(config: Config) -> Callable[[Prompt, Response], dict[str, float]]:
    """Score two named parts: `answer`, the score of `reasoning_gym`, and `format`, that of `format_share`."""
    full_score = reasoning_gym(config)

    def score(prompt: Prompt, response: Response) -> dict[str, float]:
        return {"answer": full_score(prompt, response), "format": format_share(prompt, response)}

    return score


def exact_answer(config: Config) -> Score:
    """Score 1 if the final answer equals the entry's `answer` without surrounding white space, otherwise 0."""

    def score(prompt: Prompt, response: Response) -> float:
        return float(final_answer(response, form_of(prompt)) == str(prompt.entry["answer"]).strip())

    return score
