"""The reward `reasoning_answer_consistency`: whether a response's reasoning leads to its answer (RAC).

Use it as the reward of a set in `eval.sets`: the accuracy of the set is then the share of responses whose answer
follows from their reasoning. A judge decides, without knowing the correct answer.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from rlsys.config import Config
from rlsys.config.plugins import call
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt, Response
from rlsys.data.tokenizer import Tokenizer
from rlsys.rewards.answer import final_answer, form_of
from rlsys.rewards.judges import find_judge
from rlsys.rewards.workers import RewardError

QUESTION = """Problem:
{problem}

Reasoning:
{reasoning}

Answer:
{answer}

Does this reasoning lead to this answer? Whether the answer is right does not matter. Reply with yes or no."""
_YES_OR_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


def reasoning_answer_consistency(config: Config) -> Callable[[Prompt, Response], Awaitable[float]]:
    """Score 1 if the judge replies yes. Score 0 if it replies no, or if the response has no answer or no reasoning.

    Raises:
        UserError: data.judge is unset or `engines`, which a reward cannot use.
    """
    if config.data.judge in (None, "engines"):
        raise UserError(
            f"data.reward = 'reasoning_answer_consistency' with data.judge = {config.data.judge!r}: expected a "
            "separate judge, http://HOST:PORT or path/to/file.py:function"
        )
    judge: Any = call("data.judge", find_judge(config.data.judge), config, _refuse)
    tokenizer = Tokenizer.of(config)

    async def score(prompt: Prompt, text: Response) -> float:
        answer = final_answer(text, form_of(prompt))
        head = text.rpartition("</think>")[0] or text.rpartition("<answer>")[0]
        reasoning = tokenizer.without_special(head).removeprefix("<think>").strip()
        if answer is None or not reasoning:
            return 0.0
        problem = prompt.question or prompt.text
        reply = await judge(QUESTION.format(problem=problem, reasoning=reasoning, answer=answer))
        match = _YES_OR_NO.search(reply or "")
        if match is None:
            raise RewardError(f"data.judge replied {reply!r:.80}; expected yes or no")
        return float(match[1].lower() == "yes")

    return score


async def _refuse(question: str) -> str:
    raise RewardError(
        "data.judge: the judge of a reward cannot use the run's engines; expected one with a URL"
    )
