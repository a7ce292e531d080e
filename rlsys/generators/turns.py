"""Turns of the model: the functions that a generator calls to generate one."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from rlsys.config import Config
from rlsys.config.rollout import Truncation
from rlsys.core.spans import TopLogprobs
from rlsys.core.types import Status, TokenSequence
from rlsys.router.engines import Engines
from rlsys.router.router import Router


class GenerateTurn(Protocol):
    """Generates one turn: adds tokens until the model stops or the budget ends, across all interruptions.

    Args:
        max_tokens: limit of response tokens, including earlier turns; unset: the whole budget.
        stop_texts: texts that end it, in addition to those of rollout.stop.
    """

    def __call__(
        self, sample: TokenSequence, *, max_tokens: int | None = None, stop_texts: Sequence[str] = ()
    ) -> Awaitable[None]: ...


class GenerateWithTopLogprobs(Protocol):
    """Generates like GenerateTurn, in training, up to `max_tokens`, and stores top log-probs in `tops`.

    `greedy`: use the most probable ids instead of sampling; their `mu` is the log-prob at temperature 1.
    """

    def __call__(
        self, sample: TokenSequence, max_tokens: int, tops: TopLogprobs, *, greedy: bool
    ) -> Awaitable[object]: ...


def top_logprob_turns(config: Config, router: Router) -> GenerateWithTopLogprobs:
    r = config.rollout

    async def generate(sample: TokenSequence, max_tokens: int, tops: TopLogprobs, *, greedy: bool) -> None:
        limit = limit_tokens(r.max_response_tokens, max_tokens)
        temperature = 0.0 if greedy else r.temperature
        await router.generate(sample, max_response_tokens=limit, temperature=temperature, tops=tops)

    return generate


def sampling_turns(config: Config, router: Router, *, explorers: bool = False) -> GenerateTurn:
    """Return the function for training: sampled turns in the ledger.

    Args:
        explorers: use the engines for exploration, for samples outside the ledger.
    """
    r = config.rollout

    async def generate_turn(
        sample: TokenSequence, *, max_tokens: int | None = None, stop_texts: Sequence[str] = ()
    ) -> None:
        await router.generate(
            sample,
            max_response_tokens=limit_tokens(r.max_response_tokens, max_tokens),
            temperature=r.temperature,
            truncation=r.truncation,
            stop_texts=stop_texts,
            explorers=explorers,
        )

    return generate_turn


def greedy_turns(config: Config, router: Engines) -> GenerateTurn:
    """Return the function for evaluations: greedy turns outside the ledger."""
    return probing_turns(config, router, 0.0)


def probing_turns(
    config: Config, router: Engines, temperature: float, truncation: Truncation | None = None
) -> GenerateTurn:
    """Return the function for turns outside the ledger, each with its sample's seed; greedy at temperature 0."""

    async def generate_turn(
        sample: TokenSequence, *, max_tokens: int | None = None, stop_texts: Sequence[str] = ()
    ) -> None:
        budget = limit_tokens(config.rollout.max_response_tokens, max_tokens) - sample.tokens
        if budget > 0:
            ids = [*sample.prompt_ids, *sample.response_ids]
            segment = await router.probe(
                ids, budget, temperature, sample.seed, stop_texts, truncation=truncation, evaluation=True
            )
            sample.append(segment)
        finished = budget > 0 and segment.finish == "stop"
        sample.status = Status.FINISHED if finished else Status.TRUNCATED

    return generate_turn


def limit_tokens(budget: int, max_tokens: int | None) -> int:
    return budget if max_tokens is None else min(budget, max_tokens)
