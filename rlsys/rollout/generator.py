"""Generators: how one response comes about. A single turn of the model, or turns with tools between them.

A generator is made as `function(config, tokenizer, speak, **rollout.generator_params)` and called with a sample and
its prompt until the sample is terminal. `speak(sample)` is a turn of the model: it adds tokens until the model stops
or the budget ends, over all interruptions. What a generator adds itself, by `sample.observe`, is never trained.

A generator keeps no state of its own about a sample: after a crash it is called again with the tokens that were
saved, in the middle of a turn or between two, and finds out from them what comes next.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rlsys.config import Config
from rlsys.data import Tokenizer
from rlsys.plugins import call, expect_function, resolve
from rlsys.rollout.tools import calculator
from rlsys.router.router import Router
from rlsys.types import Prompt, Sample, Status

Speak = Callable[[Sample], Awaitable[None]]
Generator = Callable[[Sample, Prompt], Awaitable[None]]


def single_turn(config: Config, tokenizer: Tokenizer | None, speak: Speak) -> Generator:
    async def generate(sample: Sample, prompt: Prompt) -> None:
        await speak(sample)

    return generate


GENERATORS: dict[str, Callable[..., Generator]] = {"single_turn": single_turn, "calculator": calculator}


def build_generator(config: Config, tokenizer: Tokenizer | None, speak: Speak) -> Generator:
    """The generator that `rollout.generator` names. Raises UserError for an unknown name or wrong parameters."""
    r = config.rollout
    factory = resolve("rollout.generator", r.generator, GENERATORS)
    made: Generator = call(
        "rollout.generator_params", factory, config, tokenizer, speak, **r.generator_params
    )
    field, expected = f"rollout.generator = {r.generator!r}", "an async function of (sample, prompt)"
    expect_function(field, factory, made, "config, tokenizer, speak", expected)
    return made


def sampling_turns(config: Config, router: Router) -> Speak:
    """Turns of training: sampled, in the ledger."""
    r = config.rollout

    async def speak(sample: Sample) -> None:
        await router.generate(sample, max_response_tokens=r.max_response_tokens, temperature=r.temperature)

    return speak


def greedy_turns(config: Config, router: Router) -> Speak:
    """Turns of an evaluation: greedy, outside the ledger."""
    return probing_turns(config, router, 0.0)


def probing_turns(config: Config, router: Router, temperature: float) -> Speak:
    """Turns outside the ledger, each with its sample's seed; greedy at temperature 0."""

    async def speak(sample: Sample) -> None:
        budget = config.rollout.max_response_tokens - sample.tokens
        if budget > 0:
            ids = sample.prompt_ids + sample.response_ids
            segment = await router.probe(ids, budget, temperature, sample.seed, evaluation=True)
            sample.append(segment)
        ended = budget > 0 and segment.finish == "stop"
        sample.status = Status.FINISHED if ended else Status.TRUNCATED

    return speak
