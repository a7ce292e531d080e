"""Reward plug-in that kills the rollout process with SIGKILL at internal boundaries, which tests cannot observe.

Each boundary occurs once per run folder, with a trained step between two kills.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlsys.config import Config
from rlsys.core.types import Prompt
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.segments import SegmentTable
from rlsys.rewards import reasoning_gym
from rlsys.rollout.manager import RolloutManager
from rlsys.router.dispatch import Dispatcher
from rlsys.router.push import WeightPush

FOLDER = "killed"
"""Folder in the run folder with one file per boundary at which the process was killed."""


def reward(config: Config) -> Callable[..., Any]:
    """Return the reward. Arm the fault only in the rollout process, because `rlsys train` also builds the reward."""
    main = sys.modules["__main__"].__spec__
    if main is not None and main.name == "rlsys.rollout.service":
        folder = config.run.dir / FOLDER
        folder.mkdir(exist_ok=True)
        if remaining_names := [name for name in BOUNDARIES if not (folder / name).exists()]:
            _arm(remaining_names[0], folder)
    score = reasoning_gym(config)

    async def in_process_reward(prompt: Prompt, text: str) -> Any:
        return score(prompt, text)

    return in_process_reward


def _in_flight(dispatcher: Dispatcher) -> bool:
    return dispatcher.pool.in_flight > 0


def _always(_: Any) -> bool:
    return True


def _uncommitted(buffer: RolloutBuffer) -> bool:
    return buffer.read(lambda db: db.in_transaction)


BOUNDARIES: dict[str, tuple[type, str, str, Callable[..., bool]]] = {
    "before the abort": (Dispatcher, "abort_all", "before", _in_flight),
    "after the abort": (Dispatcher, "abort_all", "after", _in_flight),
    "before a flush": (RolloutBuffer, "flush", "before", _uncommitted),
    "in the middle of a flush": (SegmentTable, "sync", "after", _always),
    "after a flush": (RolloutBuffer, "flush", "after", _uncommitted),
    "after the take": (RolloutManager, "take", "after", _always),
    "before a push": (WeightPush, "begin", "before", _always),
    "in the middle of a push": (WeightPush, "begin", "after", _always),
    "before attestation": (WeightPush, "end", "before", _always),
    "after a push": (WeightPush, "end", "after", _always),
}
"""Boundary -> class, method, side of the call, and the condition, which is evaluated before the call."""


def _arm(name: str, folder: Path) -> None:
    """Kill the process at a boundary after its second take, when a step has been trained since the last kill."""
    owner, method, side, condition = BOUNDARIES[name]
    takes = 0
    take = RolloutManager.take

    @functools.wraps(take)
    async def count_take(self: RolloutManager, train_step: int) -> Any:
        nonlocal takes
        takes += 1
        return await take(self, train_step)

    RolloutManager.take = count_take  # type: ignore[method-assign]
    original = getattr(owner, method)

    @contextlib.contextmanager
    def boundary(self: Any) -> Iterator[None]:
        is_due = takes > 1 and condition(self)
        if is_due and side == "before":
            _kill_process(folder / name)
        yield
        if is_due:
            _kill_process(folder / name)

    async def async_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with boundary(self):
            return await original(self, *args, **kwargs)

    def sync_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with boundary(self):
            return original(self, *args, **kwargs)

    setattr(owner, method, async_call if inspect.iscoroutinefunction(original) else sync_call)


def _kill_process(marker: Path) -> None:
    marker.touch()
    os.kill(os.getpid(), signal.SIGKILL)
