"""A reward that is none: as a plug-in it is loaded into the rollout process, which it ends with kill -9 at boundaries
that cannot be seen from outside. Each of them once in a run folder, with a trained step before the next.
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
"""In the run folder: a file of the name of each boundary at which it was killed."""


def reward(config: Config) -> Callable[..., Any]:
    """Armed in the rollout process alone: `rlsys train` makes the reward too, to try it before the run."""
    main = sys.modules["__main__"].__spec__
    if main is not None and main.name == "rlsys.rollout.service":
        folder = config.run.dir / FOLDER
        folder.mkdir(exist_ok=True)
        if remaining_names := [name for name in BOUNDARIES if not (folder / name).exists()]:
            _arm(remaining_names[0], folder)
    score = reasoning_gym(config)

    async def in_this_process(prompt: Prompt, text: str) -> Any:
        return score(prompt, text)

    return in_this_process


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
"""Class, method, side of its call, and whether this call is meant: asked before it."""


def _arm(name: str, folder: Path) -> None:
    """From the second take of this process on: then a step has been trained since the last death."""
    owner, method, side, meant = BOUNDARIES[name]
    takes = 0
    take = RolloutManager.take

    @functools.wraps(take)
    async def counted(self: RolloutManager, train_step: int) -> Any:
        nonlocal takes
        takes += 1
        return await take(self, train_step)

    RolloutManager.take = counted  # type: ignore[method-assign]
    original = getattr(owner, method)

    @contextlib.contextmanager
    def boundary(self: Any) -> Iterator[None]:
        is_due = takes > 1 and meant(self)
        if is_due and side == "before":
            _die(folder / name)
        yield
        if is_due:
            _die(folder / name)

    async def awaited(self: Any, *args: Any, **kwargs: Any) -> Any:
        with boundary(self):
            return await original(self, *args, **kwargs)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        with boundary(self):
            return original(self, *args, **kwargs)

    setattr(owner, method, awaited if inspect.iscoroutinefunction(original) else called)


def _die(note: Path) -> None:
    note.touch()
    os.kill(os.getpid(), signal.SIGKILL)
