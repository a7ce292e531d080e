"""Turns of the model: what a generator calls to let it speak."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from rlsys.config import Config
from rlsys.core.spans import TopLogprobs
from rlsys.core.types import Sample, Status
from rlsys.router.engines import Engines
from rlsys.router.router import Router


class Speak(Protocol):
    """One turn: adds tokens until the model stops or the budget ends, over all interruptions.

    `most`: response tokens with which the turn ends at the latest; unset: those of the whole budget. `stop_texts`:
    end it too, beside those of rollout.stop.
    """

    def __call__(
        self, sample: Sample, *, most: int | None = None, stop_texts: Sequence[str] = ()
    ) -> Awaitable[None]: ...


class Look(Protocol):
    """As Speak, in training, of at most `most` response tokens, and `tops` gets what else was probable. `greedy`: the
    most probable ids instead of drawn ones; their `mu` is what it is at temperature 1."""

    def __call__(
        self, sample: Sample, most: int, tops: TopLogprobs, *, greedy: bool
    ) -> Awaitable[object]: ...


def looking_turns(config: Config, router: Router) -> Look:
    r = config.rollout

    async def look(sample: Sample, most: int, tops: TopLogprobs, *, greedy: bool) -> None:
        limit = within(r.max_response_tokens, most)
        temperature = 0.0 if greedy else r.temperature
        await router.generate(sample, max_response_tokens=limit, temperature=temperature, tops=tops)

    return look


def sampling_turns(config: Config, router: Router, *, explorers: bool = False) -> Speak:
    """Turns of training: sampled, in the ledger. `explorers`: the same by engines that try prompts out, of samples
    outside of it."""
    r = config.rollout

    async def speak(sample: Sample, *, most: int | None = None, stop_texts: Sequence[str] = ()) -> None:
        await router.generate(
            sample,
            max_response_tokens=within(r.max_response_tokens, most),
            temperature=r.temperature,
            truncation=r.truncation,
            stop_texts=stop_texts,
            explorers=explorers,
        )

    return speak


def greedy_turns(config: Config, router: Engines) -> Speak:
    """Turns of an evaluation: greedy, outside the ledger."""
    return probing_turns(config, router, 0.0)


def probing_turns(config: Config, router: Engines, temperature: float) -> Speak:
    """Turns outside the ledger, each with its sample's seed; greedy at temperature 0."""

    async def speak(sample: Sample, *, most: int | None = None, stop_texts: Sequence[str] = ()) -> None:
        budget = within(config.rollout.max_response_tokens, most) - sample.tokens
        if budget > 0:
            ids = [*sample.prompt_ids, *sample.response_ids]
            segment = await router.probe(ids, budget, temperature, sample.seed, stop_texts, evaluation=True)
            sample.append(segment)
        ended = budget > 0 and segment.finish == "stop"
        sample.status = Status.FINISHED if ended else Status.TRUNCATED

    return speak


def within(budget: int, most: int | None) -> int:
    return budget if most is None else min(budget, most)
