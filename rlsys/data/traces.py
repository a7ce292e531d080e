"""What writes the traces of `rlsys sft`, and those of the quickstart: responses written by a rule.

The quickstart's model is first taught to work a sum out line by line, then to prefer a direct guess: it is
able but unwilling, so that reinforcement learning has something to find within minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Annotated, Any

from pydantic import Field

from rlsys.config import Config
from rlsys.config.plugins import call, parse_params
from rlsys.config.section import Fraction, Positive, Section
from rlsys.core.imports import resolve
from rlsys.core.seeds import stable_hash
from rlsys.data.chain_sum import ChainSumParams, expression
from rlsys.data.chats import chats, labels, pairs
from rlsys.data.source import ReasoningGymSource
from rlsys.data.tokenizer import Tokenizer
from rlsys.data.trace import Trace

Part = Annotated[float, Field(ge=0, le=1)]


def terms(sum_text: str) -> list[int]:
    """`4-1-7` -> [4, -1, -7]."""
    return [int(t) for t in sum_text.replace("-", "+-").lstrip("+").split("+")]


def working(sum_text: str) -> str:
    """The sum line by line: `4-1-7` -> `4-1=3\\n3-7=-4`."""
    first, *rest = terms(sum_text)
    lines = []
    for term in rest:
        lines.append(f"{first}{term:+d}={first + term}")
        first += term
    return "\n".join(lines)


def response(sum_text: str, thought: str) -> str:
    """What follows the opened thought, up to the answer (right in every trace, guessed or worked out)."""
    return f"{thought}</think><answer>{sum(terms(sum_text))}</answer>"


class ChainSumTraceParams(Section):
    worked: Positive = 64
    """Traces per step that work the sum out."""
    long_share: Part = 0.3
    """Share of these with more terms than a short problem has."""
    ramp: Fraction = 0.4
    """Part of the steps over which their most terms grow to the longest problem's."""
    guess_from: Part = 0.9
    """Part of the steps after which direct guesses are mixed in."""
    guess_share: Annotated[float, Field(ge=0, lt=1)] = 0.75
    """Share of direct guesses from then on; they come on top of the worked traces."""


class ChainSumTraces:
    """Traces on the training side of `chain_sum_tail`; data.params gives the ranges of terms."""

    def __init__(self, config: Config, tokenizer: Tokenizer, params: ChainSumTraceParams) -> None:
        self._tokenizer, self._params, self._steps = tokenizer, params, config.trainer.steps
        self._task = parse_params("data.params", ChainSumParams, config.data.params)
        self._seed = config.data.seed + config.run.seed
        self._sources: dict[int, ReasoningGymSource] = {}

    def batch(self, step: int) -> list[Trace]:
        """Traces of the 0-based `step`, always the same ones."""
        p, rng = self._params, Random(stable_hash("traces", self._seed, step))
        done = step / self._steps
        batch = [self._trace(rng, self._long_terms(rng, done), guess=False) for _ in range(p.worked)]
        if done >= p.guess_from:
            guesses = round(p.worked * p.guess_share / (1 - p.guess_share))
            batch += [self._trace(rng, self._problem_terms(rng), guess=True) for _ in range(guesses)]
        return batch

    def pairs(self, step: int) -> list[Trace]:
        """Two answers to each of `worked` problems: the better one works the sum out, the other guesses."""
        rng, out = Random(stable_hash("pairs", self._seed, step)), []
        for pair in range(self._params.worked):
            n, number = self._problem_terms(rng), rng.randrange(2**31)
            for liked in (True, False):
                trace = self._written(n, number, guess=not liked)
                trace.pair, trace.liked = pair, liked
                out.append(trace)
        return out

    def _long_terms(self, rng: Random, done: float) -> int:
        (low, middle), top = self._task.short, self._task.long[1]
        if rng.random() >= self._params.long_share:
            return rng.randint(low, middle)
        grown = min(1.0, done / self._params.ramp)
        return rng.randint(middle + 1, min(top, middle + 1 + int((top - middle) * grown)))

    def _problem_terms(self, rng: Random) -> int:
        return rng.randint(*(self._task.long if rng.random() < self._task.long_share else self._task.short))

    def _trace(self, rng: Random, n: int, *, guess: bool) -> Trace:
        return self._written(n, rng.randrange(2**31), guess=guess)

    def _written(self, n: int, number: int, *, guess: bool) -> Trace:
        sum_text = expression(self._source(n).entry(number))
        prompt = self._tokenizer.apply_chat([{"role": "user", "content": sum_text + "="}])
        text = response(sum_text, "" if guess else working(sum_text))
        ids = self._tokenizer.encode(text)
        return Trace(self._tokenizer.encode(prompt), [*ids, self._tokenizer.turn_end_id])

    def _source(self, n: int) -> ReasoningGymSource:
        if n not in self._sources:
            task = self._task.model_copy(update={"short": (n, n), "long_share": 0.0}).tasks()
            self._sources[n] = ReasoningGymSource(task, expression, self._tokenizer, self._seed, 0)
        return self._sources[n]


def chain_sum(config: Config, tokenizer: Tokenizer, **params: Any) -> Callable[[int], list[Trace]]:
    return ChainSumTraces(config, tokenizer, parse_params("sft.params", ChainSumTraceParams, params)).batch


def chain_sum_pairs(config: Config, tokenizer: Tokenizer, **params: Any) -> Callable[[int], list[Trace]]:
    return ChainSumTraces(config, tokenizer, parse_params("sft.params", ChainSumTraceParams, params)).pairs


TRACES: dict[str, Callable[..., Callable[[int], list[Trace]]]] = {
    "chain_sum": chain_sum,
    "chain_sum_pairs": chain_sum_pairs,
    "chats": chats,
    "pairs": pairs,
    "labels": labels,
}


def trace_batches(config: Config, tokenizer: Tokenizer, start: int = 0) -> Iterator[list[Trace]]:
    """One batch for each of config.trainer.steps steps, from the 0-based step `start` on.

    `sft.traces` names what writes them: a function `(config, tokenizer, **sft.params)` that returns
    `batch(step) -> list[Trace]`. Raises UserError for an unknown name or parameter.
    """
    writer = resolve("sft.traces", config.sft.traces, TRACES)
    batch = call("sft.params", writer, config, tokenizer, **config.sft.params)
    return (batch(step) for step in range(start, config.trainer.steps))
