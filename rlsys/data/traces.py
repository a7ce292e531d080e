"""Sources of the traces of `rlsys sft`: the built-in names, and the generator of the quickstart's traces.

The quickstart's model first learns to solve a sum line by line, and then to prefer a direct guess. So it can solve
sums but rarely does, and reinforcement learning improves it within minutes.
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
    """Return the terms of a sum: [4, -1, -7] for `4-1-7`."""
    return [int(t) for t in sum_text.replace("-", "+-").lstrip("+").split("+")]


def working(sum_text: str) -> str:
    """Return the solution of a sum line by line: `4-1=3\\n3-7=-4` for `4-1-7`."""
    first, *other_terms = terms(sum_text)
    lines = []
    for term in other_terms:
        lines.append(f"{first}{term:+d}={first + term}")
        first += term
    return "\n".join(lines)


def response(sum_text: str, thought: str) -> str:
    """Return `thought`, the tag that closes it, and the right answer between tags.

    The chat template writes the tag that opens the thought.
    """
    return f"{thought}</think><answer>{sum(terms(sum_text))}</answer>"


class ChainSumTraceParams(Section):
    worked: Positive = 64
    """Traces per step that solve the sum line by line."""
    long_share: Part = 0.3
    """Share of worked traces that have more terms than a short problem."""
    ramp: Fraction = 0.4
    """Share of the steps during which the maximum number of terms of the long worked traces grows to the longest
    problem's."""
    guess_from: Part = 0.9
    """Share of the steps after which direct guesses are added."""
    guess_share: Annotated[float, Field(ge=0, lt=1)] = 0.75
    """Share of direct guesses in the later steps, in addition to the worked traces."""


class ChainSumTraces:
    """Traces of training problems of `chain_sum_tail`, with the numbers of terms of data.params."""

    def __init__(self, config: Config, tokenizer: Tokenizer, params: ChainSumTraceParams) -> None:
        self._tokenizer, self._params, self._steps = tokenizer, params, config.trainer.steps
        self._task = parse_params("data.params", ChainSumParams, config.data.params)
        self._seed = config.data.seed + config.run.seed
        self._sources: dict[int, ReasoningGymSource] = {}

    def batch(self, step: int) -> list[Trace]:
        """Return the traces of the 0-based `step`. They depend on the seeds and on `step` only."""
        params = self._params
        rng = Random(stable_hash("traces", self._seed, step))
        progress = step / self._steps
        batch = [
            self._random_trace(rng, self._ramp_terms(rng, progress), guess=False)
            for _ in range(params.worked)
        ]
        if progress >= params.guess_from:
            guesses = round(params.worked * params.guess_share / (1 - params.guess_share))
            batch += [self._random_trace(rng, self._problem_terms(rng), guess=True) for _ in range(guesses)]
        return batch

    def pairs(self, step: int) -> list[Trace]:
        """Return two traces of each of `worked` problems: one solves the sum line by line, one guesses.

        The one that solves the sum is liked.
        """
        rng = Random(stable_hash("pairs", self._seed, step))
        traces = []
        for pair in range(self._params.worked):
            n = self._problem_terms(rng)
            number = rng.randrange(2**31)
            for liked in (True, False):
                trace = self._trace(n, number, guess=not liked)
                trace.pair, trace.liked = pair, liked
                traces.append(trace)
        return traces

    def _ramp_terms(self, rng: Random, progress: float) -> int:
        """Draw the number of terms of a worked trace.

        Args:
            progress: share of the steps before this one.
        """
        low, middle = self._task.short
        top = self._task.long[1]
        if rng.random() >= self._params.long_share:
            return rng.randint(low, middle)
        ramp_progress = min(1.0, progress / self._params.ramp)
        return rng.randint(middle + 1, min(top, middle + 1 + int((top - middle) * ramp_progress)))

    def _problem_terms(self, rng: Random) -> int:
        """Draw the number of terms of a training problem."""
        is_long = rng.random() < self._task.long_share
        return rng.randint(*(self._task.long if is_long else self._task.short))

    def _random_trace(self, rng: Random, n: int, *, guess: bool) -> Trace:
        return self._trace(n, rng.randrange(2**31), guess=guess)

    def _trace(self, n: int, number: int, *, guess: bool) -> Trace:
        """Return the trace of problem `number` among the problems of `n` terms."""
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
    """Return an iterator over the batches of the steps `start` to trainer.steps - 1, 0-based.

    `sft.traces` names a function `(config, tokenizer, **sft.params)` that returns `batch(step) -> list[Trace]`.

    Raises:
        UserError: the name or a parameter is unknown.
    """
    writer = resolve("sft.traces", config.sft.traces, TRACES)
    batch = call("sft.params", writer, config, tokenizer, **config.sft.params)
    return (batch(step) for step in range(start, config.trainer.steps))
