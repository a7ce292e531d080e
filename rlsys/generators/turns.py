"""Turns of the model: create the functions that generators call to generate a turn."""

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
    """Generates one turn of the model, and sets the sequence's status to FINISHED or TRUNCATED.

    Continues after interruptions until the model stops or `max_tokens` is reached.

    Args:
        sample: the sequence, to which the tokens are appended.
        max_tokens: largest number of response tokens, including earlier turns; None:
            rollout.max_response_tokens.
        stop_texts: texts that end the turn, in addition to those of rollout.stop.
    """

    def __call__(
        self, sample: TokenSequence, *, max_tokens: int | None = None, stop_texts: Sequence[str] = ()
    ) -> Awaitable[None]: ...


class GenerateWithTopLogprobs(Protocol):
    """Generates a turn like GenerateTurn, and records the most probable ids of each token.

    Args:
        sample: the sequence, to which the tokens are appended.
        max_tokens: largest number of response tokens, including earlier turns.
        tops: gets the most probable ids and their log-probs.
        greedy: whether to take the most probable ids instead of sampling. `mu` then has their log-probs at
            temperature 1.
    """

    def __call__(
        self, sample: TokenSequence, max_tokens: int, tops: TopLogprobs, *, greedy: bool
    ) -> Awaitable[object]: ...


def top_logprob_turns(config: Config, router: Router) -> GenerateWithTopLogprobs:
    """Return the function that generates turns with top log-probs for samples of the ledger."""
    r = config.rollout

    async def generate(sample: TokenSequence, max_tokens: int, tops: TopLogprobs, *, greedy: bool) -> None:
        limit = limit_tokens(r.max_response_tokens, max_tokens)
        temperature = 0.0 if greedy else r.temperature
        await router.generate(sample, max_response_tokens=limit, temperature=temperature, tops=tops)

    return generate


def sampling_turns(config: Config, router: Router, *, explorers: bool = False) -> GenerateTurn:
    """Return the function that samples turns with the run's sampling parameters.

    Args:
        config: config of the run.
        router: the router.
        explorers: whether to use the engines for exploration, for samples outside the ledger.
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
    """Return the function that generates greedy turns for samples of an evaluation."""
    return probing_turns(config, router, 0.0)


def probing_turns(
    config: Config, router: Engines, temperature: float, truncation: Truncation | None = None
) -> GenerateTurn:
    """Return the function that generates turns for samples of an evaluation, which are not in the ledger.

    Args:
        config: config of the run.
        router: sends the requests.
        temperature: sampling temperature; 0: greedy.
        truncation: truncation of the sampling distribution; None: none.
    """

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
    """Return `max_tokens`, but at most `budget`. `max_tokens` None: no other limit."""
    return budget if max_tokens is None else min(budget, max_tokens)
