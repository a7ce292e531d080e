"""Rewards: score a response by the functions of `data.reward`.

An entry of data.reward is one of:

- the name of a built-in function (REWARDS)
- the import path of a factory `create(config) -> score(prompt, response)`
- the import path of a function with the signature of another framework (signatures.py)
- the URL of a service (service.py)

An async function runs in the event loop and must not block it: a loop that is blocked for rollout.stall_timeout ends
the run. Plain functions run in separate processes, which can be killed, and each process creates the functions. The
caller enforces the time limit and censors the sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.imports import resolve
from rlsys.core.types import Prompt, Response
from rlsys.rewards.answer import (
    answer_and_format,
    exact_answer,
    reasoning_gym,
    reasoning_gym_partial,
)
from rlsys.rewards.code import code
from rlsys.rewards.consistency import reasoning_answer_consistency
from rlsys.rewards.environment import agent, environment
from rlsys.rewards.judge_training import fapo_judge
from rlsys.rewards.maths import math
from rlsys.rewards.results import RewardResult, join_rewards, parse_reward
from rlsys.rewards.service import ServiceReward, find_service, is_url, service_name
from rlsys.rewards.shapes import format_, json_schema, length, regex
from rlsys.rewards.signatures import Score, adapt, is_async
from rlsys.rewards.slime_names import install
from rlsys.rewards.workers import PlainScores, RewardWorkers, contained

RewardFn = Callable[[Prompt, Response], Awaitable[RewardResult]]
"""Scores a response by all functions of data.reward."""

REWARDS: dict[str, Callable[..., Callable[[Prompt, Response], Any]]] = {
    "reasoning_gym": reasoning_gym,
    "reasoning_gym_partial": reasoning_gym_partial,
    "exact_answer": exact_answer,
    "answer_and_format": answer_and_format,
    "fapo_judge": fapo_judge,
    "reasoning_answer_consistency": reasoning_answer_consistency,
    "environment": environment,
    "agent": agent,
    "math": math,
    "code": code,
    "regex": regex,
    "json_schema": json_schema,
    "length": length,
    "format": format_,
}


RENAMED_PARAMS = {("regex", "whole"): "full_match"}
"""(reward function, old name of a parameter) -> the new name."""


def make_scores(config: Config) -> list[Score]:
    """Create the functions of `data.reward`, in their order.

    Raises:
        UserError: a name, a parameter or a signature is unknown.
    """
    for spec in config.data.reward:
        for name in spec.params:
            if (new_name := RENAMED_PARAMS.get((spec.name, name))) is not None:
                raise UserError(
                    f"data.reward: {spec.name}: parameter {name} was renamed; expected {new_name}"
                )
    return [adapt("data.reward", find_reward(spec.name), spec, config) for spec in config.data.reward]


def find_reward(name: str) -> Callable[..., Any]:
    """Return the factory of a reward function that `data.reward` names.

    Raises:
        UserError: the name is unknown.
    """
    if is_url(name):
        return find_service(name)
    install()
    return resolve("data.reward", name, REWARDS)


def make_score(config: Config) -> Score:
    """Create the function of a `data.reward` with exactly one entry."""
    (score,) = make_scores(config)
    return score


def short_names(names: list[str]) -> list[str]:
    """Return the names of the parts of a joined reward: names of functions, numbered if several are equal."""
    base_names = [service_name(name) if is_url(name) else name.rpartition(":")[2] for name in names]
    return [
        name if base_names.count(name) == 1 else f"{name}_{base_names[: i + 1].count(name)}"
        for i, name in enumerate(base_names)
    ]


class Rewards:
    """The reward functions of a run.

    Raises:
        UserError: a name is unknown.
    """

    def __init__(self, config: Config) -> None:
        specs = config.data.reward
        self._names = short_names([spec.name for spec in specs])
        self._weights = [spec.weight for spec in specs]
        self._async_scores = {i: s for i, s in enumerate(make_scores(config)) if is_async(s)}
        self._workers = RewardWorkers(config)
        self._start_task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start a process for the plain functions in the background, so that the first score does not wait for it.

        An error of the start is ignored, because the first score starts the process again and reports the error.
        """
        if len(self._async_scores) < len(self._names):
            self._start_task = asyncio.ensure_future(self._start_worker())

    async def _start_worker(self) -> None:
        async with self._workers.acquire():
            pass

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RewardFn]:
        """Reserve a process for the plain functions, and yield the function that scores one response.

        On exit, the process is killed if it still computes.
        """
        all_async = len(self._async_scores) == len(self._names)
        async with nullcontext() if all_async else self._workers.scores() as plain_scores:

            async def reward_fn(prompt: Prompt, response: Response) -> RewardResult:
                return await self._score(prompt, response, plain_scores)

            yield reward_fn

    async def _score(
        self, prompt: Prompt, response: Response, plain_scores: PlainScores | None
    ) -> RewardResult:
        """Call all functions concurrently, and join their rewards. `plain_scores`: calls the plain functions."""

        async def call_plain() -> list[Any]:
            return [] if plain_scores is None else await plain_scores(prompt, response)

        async_scores = [contained(score(prompt, response)) for score in self._async_scores.values()]
        plain_values, *async_values = await asyncio.gather(call_plain(), *async_scores)
        async_iterator, plain_iterator = iter(async_values), iter(plain_values)
        results = []
        for i, name in enumerate(self._names):
            value = next(async_iterator if i in self._async_scores else plain_iterator)
            results.append(None if value is None else parse_reward(value, name))
        return join_rewards(self._names, self._weights, results)

    async def close(self) -> None:
        """Close the connections of services and the processes of plain functions."""
        if self._start_task is not None:
            self._start_task.cancel()
            await asyncio.gather(self._start_task, return_exceptions=True)
        for score in self._async_scores.values():
            if isinstance(score, ServiceReward):
                await score.close()
        await self._workers.close()


__all__ = ["REWARDS", "RewardResult", "RewardFn", "Rewards", "make_score", "make_scores"]
