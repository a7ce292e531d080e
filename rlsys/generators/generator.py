"""Generators: how one response comes about. A single turn of the model, or turns with tools between them.

A generator is made as `function(config, tokenizer, speak, **rollout.generator_params)` and called with a sample and
its prompt until the sample is terminal. `speak(sample)` is a turn of the model (turns.py). What a generator adds
itself, by `sample.observe`, is never trained. Functions written for slime are called as slime does it
(slime_generator.py); programs that speak to an OpenAI endpoint are agents (agent.py); an
environment is a process of its own (environment.py).

A generator keeps no state of its own about a sample: after a crash it is called again with the tokens that were
saved, in the middle of a turn or between two, and finds out from them what comes next.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rlsys.config import Config
from rlsys.config.plugins import call, expect_function
from rlsys.core.errors import UserError
from rlsys.core.imports import resolve
from rlsys.core.types import Prompt, Sample
from rlsys.data import Tokenizer
from rlsys.generators.agent import agent
from rlsys.generators.censoring import Censored, boundary
from rlsys.generators.echo import echo
from rlsys.generators.environment import environment
from rlsys.generators.functions import functions
from rlsys.generators.latr import latr
from rlsys.generators.slime_generator import SlimeGenerator, is_slimes
from rlsys.generators.tools import calculator
from rlsys.generators.trajectory import replayed
from rlsys.generators.turns import Speak
from rlsys.rewards.slime_names import install
from rlsys.router.turn_ends import turn_ends

Generator = Callable[[Sample, Prompt], Awaitable[None]]


def single_turn(config: Config, tokenizer: Tokenizer | None, speak: Speak) -> Generator:
    async def generate(sample: Sample, prompt: Prompt) -> None:
        await speak(sample)

    return generate


GENERATORS: dict[str, Callable[..., Generator]] = {
    "single_turn": single_turn,
    "calculator": calculator,
    "functions": functions,
    "agent": agent,
    "environment": environment,
    "replayed": replayed,
    "latr": latr,
    "echo": echo,
}


def find_generator(name: str) -> Callable[..., Any]:
    """What `rollout.generator` names. Raises UserError for an unknown name."""
    install()
    return resolve("rollout.generator", name, GENERATORS)


def build_generator(config: Config, tokenizer: Tokenizer | None, speak: Speak) -> Generator:
    """The generator that `rollout.generator` names. Raises UserError for an unknown name or wrong parameters."""
    r = config.rollout
    factory = find_generator(r.generator)
    if is_slimes(factory):
        if tokenizer is None:
            raise UserError(f"rollout.generator = {r.generator!r}: written for slime, it needs a tokenizer")
        ends = turn_ends(config, tokenizer)
        return SlimeGenerator(factory, config, tokenizer, speak, ends, r.generator_params)
    made: Generator = call(
        "rollout.generator_params", factory, config, tokenizer, speak, **r.generator_params
    )
    field, expected = f"rollout.generator = {r.generator!r}", "an async function of (sample, prompt)"
    expect_function(field, factory, made, "config, tokenizer, speak", expected)
    return made


async def respond(generate: Generator, sample: Sample, prompt: Prompt, name: str) -> Censored | None:
    """Make the whole response, within the boundary of a sample (censoring.py). Why there is none; None: there is one.
    `name`: of the sample, for messages."""
    if prompt.refusal:
        return Censored(prompt.refusal_cause, prompt.refusal)
    with boundary(name) as item:
        await generate(sample, prompt)
    return item.censored
