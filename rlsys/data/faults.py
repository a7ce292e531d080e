"""`data.source: chain_sum_faults`: solutions of sums with at most one wrong line, to train a judge that finds it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Annotated, Any

from pydantic import Field

from rlsys.config import Config
from rlsys.config.plugins import parse_params
from rlsys.core.seeds import stable_hash
from rlsys.core.types import Prompt
from rlsys.data.chain_sum import ChainSumParams, expression
from rlsys.data.source import Entry, PromptSource
from rlsys.data.tokenizer import Tokenizer
from rlsys.data.traces import terms, working


class FaultParams(ChainSumParams):
    flawed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of solutions with a wrong line."""
    question: Annotated[str, Field(pattern=r"\{response\}")] = (
        "Problem:\n{prompt}\n\nRight answer:\n{key}\n\nSolution:\n{response}\n\nThe solution comes to the right "
        "answer. Its paragraphs count from 0: name the first one that has an error, or -1 if none has, in \\boxed{}."
    )
    """Prompt of the judge, as in fapo; {prompt}, {key} and {response} are replaced."""


class ChainSumFaults:
    """Prompts that ask a judge for the wrong line of a solution.

    A flawed solution has a wrong result in one line. Its next line continues with the right result, so the final
    answer is right. The entry of a prompt has two more keys:
        step: 0-based number of the wrong line; -1: no line is wrong.
        steps: number of lines.
    """

    def __init__(self, sums: PromptSource, tokenizer: Tokenizer, params: FaultParams, seed: int) -> None:
        self._sums, self._tokenizer, self._params, self._seed = sums, tokenizer, params, seed

    def train(self, index: int) -> Prompt:
        return self._judge_prompt(self._sums.train(index), "train")

    def heldout(self, n: int) -> list[Prompt]:
        return [self._judge_prompt(prompt, "heldout") for prompt in self._sums.heldout(n)]

    def _judge_prompt(self, prompt: Prompt, split: str) -> Prompt:
        """Return the judge's prompt about a solution of `prompt`'s sum.

        A share `flawed` of the prompts has a solution with one wrong line.

        Args:
            prompt: the sum.
            split: "train" or "heldout".
        """
        rng = Random(stable_hash("faults", self._seed, split, prompt.index))
        sum_expression = expression(prompt.entry)
        lines = working(sum_expression).split("\n")
        step = _with_fault(lines, rng, self._params.flawed)
        replacements = {
            "{prompt}": sum_expression + "=",
            "{key}": str(sum(terms(sum_expression))),
            "{response}": "\n".join(lines),
        }
        question = self._params.question
        for name, value in replacements.items():
            question = question.replace(name, value)
        entry: Entry = {"question": question, "answer": str(step), "step": step, "steps": len(lines)}
        text = self._tokenizer.apply_chat([{"role": "user", "content": question}])
        ids = self._tokenizer.encode(text)
        return replace(prompt, text=text, ids=ids, entry=entry, question=question)


def _with_fault(lines: list[str], rng: Random, share: float) -> int:
    """Change the result in one random line with probability `share`.

    Args:
        lines: the lines `SUM=RESULT` of a solution, which are changed in place.
        rng: random generator.
        share: probability of a wrong line, in [0, 1].

    Returns:
        0-based number of the wrong line; -1: no line is wrong.
    """
    if rng.random() >= share:
        return -1
    step = rng.randrange(len(lines))
    sum_text, _, result = lines[step].partition("=")
    lines[step] = f"{sum_text}={int(result) + rng.choice((-2, -1, 1, 2))}"
    return step


def chain_sum_faults(config: Config, tokenizer: Tokenizer, **params: Any) -> ChainSumFaults:
    """Build the prompt source from `params` (FaultParams)."""
    p = parse_params("data.params", FaultParams, params)
    seed = config.data.seed + config.run.seed
    return ChainSumFaults(p.source(tokenizer, seed, config.eval.seed), tokenizer, p, seed)
