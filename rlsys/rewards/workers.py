"""The processes in which plain reward functions run."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from rlsys.config import Config
from rlsys.core.imports import source_location
from rlsys.core.process_pool import PoolProcessError, ProcessPool
from rlsys.core.texts import error_text
from rlsys.core.types import Prompt, Response

PlainScores = Callable[[Prompt, Response], Awaitable[list[Any]]]
"""Values of the plain reward functions for a response, in the order of data.reward. Raises RewardError."""


class RewardError(Exception):
    """Failure of a reward function, its process or its service: type and message."""


async def contained(score: Awaitable[Any]) -> Any:
    """Await the value of an async reward function.

    Raises:
        RewardError: instead of SystemExit and KeyboardInterrupt, which would end the event loop.
    """
    try:
        return await score
    except (SystemExit, KeyboardInterrupt) as e:
        raise RewardError(f"{type(e).__name__}: {error_text(e)}{source_location(e)}") from e


class RewardWorkers(ProcessPool):
    """Processes of the plain reward functions. They trust the pickles that they receive."""

    def __init__(self, config: Config) -> None:
        dumped = config.model_dump_json().encode()
        super().__init__("data.reward", "rlsys.rewards.worker", dumped, config.data.reward_env)

    @asynccontextmanager
    async def scores(self) -> AsyncIterator[PlainScores]:
        """Lend a process for one response. The exit kills it if it still computes."""
        async with self.acquire() as worker:

            async def call_worker(prompt: Prompt, response: Response) -> list[Any]:
                try:
                    answer: list[Any] = await worker.call(pickle.dumps((prompt, response)))
                except PoolProcessError as e:
                    raise RewardError(str(e)) from None
                return answer

            yield call_worker
