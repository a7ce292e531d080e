"""Verifiers of a final answer: between <answer> and </answer>, or in the form that the prompt asks for.

A response that was cut off has no final answer: it scores 0.
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
    """The final answer of a response that the model has finished; None when there is none, or it was cut off.

    `form`: how the prompt asks for it. tags: the last <answer>...</answer>; boxed: the last \\boxed{...}; line: what
    follows `Answer:` on the last line that begins so. Raises KeyError for another form.
    """
    return FORMS[form](response) if response.finished else None


def _tags(text: str) -> str | None:
    _, opened, tail = text.rpartition("<answer>")
    answer, closed, _ = tail.partition("</answer>")
    return answer.strip() if opened and closed else None


def _boxed(text: str) -> str | None:
    _, opened, tail = text.rpartition(_BOX)
    depth = 1
    for i, character in enumerate(tail if opened else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return tail[:i].strip()
    return None


def _line(text: str) -> str | None:
    answers = _LINE.findall(text)
    return answers[-1] if answers else None


FORMS: dict[str, Callable[[str], str | None]] = {"tags": _tags, "boxed": _boxed, "line": _line}


def form_of(prompt: Prompt) -> str:
    """Return the form in which the prompt asks for its final answer: the plug-in of algo.prompt may set it."""
    return str(prompt.entry.get("form", "tags"))


def format_share(prompt: Prompt, response: Response) -> float:
    """Return the share of the required format elements that a response has.

    The elements are a final answer, and each of the marks of the prompt's template exactly once.
    """
    satisfied = [final_answer(response, form_of(prompt)) is not None]
    satisfied += [response.count(mark) == 1 for mark in prompt.entry.get("marks", ())]
    return sum(satisfied) / len(satisfied)


def count_answers(text: str) -> int:
    """Count the <answer>...</answer> blocks of a text."""
    return len(_ANSWER.findall(text))


def canonical_answer(response: Response, form: str = "tags") -> str | None:
    """Return the final answer in the form that votes compare: single blanks, no case; None without an answer."""
    answer = final_answer(response, form)
    return " ".join(answer.casefold().split()) if answer else None


def reasoning_gym(config: Config) -> Score:
    """Return 1 when the task's own verifier gives full marks, else 0.

    Some verifiers give part marks for an answer that merely contains the right one, which policies learn to exploit.
    `reasoning_gym_partial` returns part marks.
    """
    partial = reasoning_gym_partial(config)
    return lambda prompt, response: float(partial(prompt, response) >= 1)


def reasoning_gym_partial(config: Config) -> Score:
    """Return the score of the task's own verifier, part marks included; an entry names its task."""
    from reasoning_gym import (
        get_score_answer_fn,  # some seconds: here, and not in the first score's time limit
    )

    verifier = lru_cache(get_score_answer_fn)

    def score(prompt: Prompt, response: Response) -> float:
        answer = final_answer(response, form_of(prompt))
        if answer is None:
            return 0.0
        return float(verifier(prompt.entry["metadata"]["source_dataset"])(answer, prompt.entry))

    return score


def answer_and_format(config: Config) -> Callable[[Prompt, Response], dict[str, float]]:
    """Two named rewards: `answer`, full marks of the task's verifier; `format`, how well the response keeps to the
    format that its prompt asks for (format_share)."""
    right = reasoning_gym(config)

    def score(prompt: Prompt, response: Response) -> dict[str, float]:
        return {"answer": right(prompt, response), "format": format_share(prompt, response)}

    return score


def exact_answer(config: Config) -> Score:
    """1 when the answer is the entry's `answer`, letter by letter but for surrounding blanks."""

    def score(prompt: Prompt, response: Response) -> float:
        return float(final_answer(response, form_of(prompt)) == str(prompt.entry["answer"]).strip())

    return score
