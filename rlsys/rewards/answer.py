"""Verifiers of a final answer: between <answer> and </answer>, or in the form that the prompt asks for.

A response that was cut off never said that it was done: it scores 0.
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
    found = _LINE.findall(text)
    return found[-1] if found else None


FORMS: dict[str, Callable[[str], str | None]] = {"tags": _tags, "boxed": _boxed, "line": _line}


def form_of(prompt: Prompt) -> str:
    """How this prompt asks for its final answer: algo.prompt may have put it so."""
    return str(prompt.entry.get("form", "tags"))


def format_share(prompt: Prompt, response: Response) -> float:
    """How well a response keeps to the format that its prompt asks for: the share of what it should have that it has.

    That is a final answer, and each of the marks of the prompt's template exactly once.
    """
    kept = [final_answer(response, form_of(prompt)) is not None]
    kept += [response.count(mark) == 1 for mark in prompt.entry.get("marks", ())]
    return sum(kept) / len(kept)


def count_answers(text: str) -> int:
    """How many <answer>...</answer> it has."""
    return len(_ANSWER.findall(text))


def canonical_answer(response: Response, form: str = "tags") -> str | None:
    """The final answer as votes compare it: single blanks, no case; None where there is none."""
    answer = final_answer(response, form)
    return " ".join(answer.casefold().split()) if answer else None


def reasoning_gym(config: Config) -> Score:
    """1 when the task's own verifier gives full marks, else 0.

    Some give part marks for an answer that merely contains the right one: policies learn to exploit
    that. Where part marks are wanted, `reasoning_gym_partial` passes them on.
    """
    partial = reasoning_gym_partial(config)
    return lambda prompt, response: float(partial(prompt, response) >= 1)


def reasoning_gym_partial(config: Config) -> Score:
    """What the task's own verifier gives, part marks included; an entry names its task."""
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
