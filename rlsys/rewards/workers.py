"""RewardWorkers: the processes in which plain reward functions run."""

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
"""Returns the value of each plain reward function for a response, in the order of data.reward. Raises RewardError."""


class RewardError(Exception):
    """Raised when a reward function, its process or its service fails."""


class Row(dict[str, Any]):
    """The row of a prompt, for reward functions. The KeyError of a missing key names the prompt in a note."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt.entry)
        self._name = prompt.location or f"prompt {prompt.index}"

    def __missing__(self, key: object) -> Any:
        hint = " (data.keys.answer=KEY selects another key)" if key == "answer" and self else ""
        error = KeyError(key)
        error.add_note(f": {self._name} has no {key}; its keys: {', '.join(self) or 'none'}{hint}")
        raise error


def location_and_row(error: BaseException) -> str:
    """Return the location of the user's code that raised an error, and for a missing key of a Row also its note."""
    notes: list[str] = getattr(error, "__notes__", [])
    return source_location(error) + "".join(n for n in notes if isinstance(error, KeyError))


async def contained(score: Awaitable[Any]) -> Any:
    """Await the value of an async reward function, and contain errors that would end the event loop.

    Raises:
        RewardError: the function raised SystemExit or KeyboardInterrupt.
    """
    try:
        return await score
    except (SystemExit, KeyboardInterrupt) as e:
        raise RewardError(f"{type(e).__name__}: {error_text(e)}{source_location(e)}") from e


class RewardWorkers(ProcessPool):
    """Processes that run the plain reward functions. They unpickle what this process sends."""

    def __init__(self, config: Config) -> None:
        dumped = config.model_dump_json().encode()
        super().__init__("data.reward", "rlsys.rewards.worker", dumped, config.data.reward_env)

    @asynccontextmanager
    async def scores(self) -> AsyncIterator[PlainScores]:
        """Reserve a process for one response, and yield its functions. On exit, kill it if it still computes."""
        async with self.acquire() as worker:

            async def call_worker(prompt: Prompt, response: Response) -> list[Any]:
                try:
                    answer: list[Any] = await worker.call(pickle.dumps((prompt, response)))
                except PoolProcessError as e:
                    raise RewardError(str(e)) from None
                return answer

            yield call_worker
