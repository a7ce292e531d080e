"""The error boundary of a sample: errors of one item censor that item, errors of the run end the run.

    row, prompt, tool, environment, agent, generator, reward    the sample is censored, with a cause and a reason
    ownership, ledger, disk, machine, invariants, config        re-raised: the run ends

All code that generates a response, scores it or reads a row from a source runs within `boundary`. Only this file
catches unexpected exceptions. They are logged with their traceback and counted, and too many of them end the run
(`FailedSamples`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
import traceback
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rlsys.core.errors import GeneratorError, RlsysError, RowError, RunError
from rlsys.core.imports import source_location
from rlsys.core.texts import error_text, shorten, valid_text
from rlsys.core.types import LONGEST_REASON, CensorCause, Prompt
from rlsys.data import PromptSource
from rlsys.engine_requests import RefusedPrompt
from rlsys.generators.parser_client import ToolFailed
from rlsys.router.failure_policy import PoisonRequest, RefusedRequest

PROMPT_REFUSED = "prompt refused"
"""Prefix of the reasons for prompts that must not reach an engine."""
LONGEST_TRACEBACK = 20_000
"""Largest length of a traceback in the log, in characters: an exception's message may have megabytes."""
_PACKAGE = Path(__file__).resolve().parents[1]
_MACHINE_ERRNOS = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
        errno.ENOBUFS,
    }
)  # fmt: skip
"""Numbers of OSErrors that affect all samples."""

log = logging.getLogger("rlsys.rollout.exceptions")


class Censored(NamedTuple):
    """Cause and reason why an item has no usable response."""

    cause: CensorCause
    reason: str


def censored(cause: CensorCause, reason: str) -> Censored:
    """Create a Censored. The reason may be any text; it is made valid UTF-8 and shortened."""
    return Censored(cause, shorten(valid_text(reason), LONGEST_REASON))


@dataclass
class Item:
    """Result of a `boundary`. `censored`: None without an error."""

    censored: Censored | None = None


@contextmanager
def boundary(name: str) -> Iterator[Item]:
    """Run work on one item. Its errors set `censored` of the yielded Item; errors of the run are raised again.

    Args:
        name: name of the item in messages: its location in the data, or its number.
    """
    item = Item()
    _contain_exits_of_tasks()
    inside = _inside_boundary.set(True)
    try:
        yield item
    except RefusedPrompt as e:
        item.censored = censored(CensorCause.PROMPT, f"{PROMPT_REFUSED}: {e} ({name})")
    except RowError as e:
        place_first = str(e).startswith(name.partition(",")[0])
        item.censored = censored(CensorCause.ROW, str(e) if place_first else f"{e} ({name})")
    except (PoisonRequest, RefusedRequest) as e:
        item.censored = censored(CensorCause.ENGINE, str(e))
    except ToolFailed as e:
        item.censored = censored(CensorCause.TOOL, str(e))
    except GeneratorError as e:
        item.censored = _unexpected(name, e)
    except BaseException as e:  # also SystemExit and KeyboardInterrupt, because the item's code raises them
        if _ends_the_run(e):
            raise
        if _is_cancelled():
            raise asyncio.CancelledError from e  # the item's code may have converted the cancellation
        item.censored = _unexpected(name, e)
    finally:
        with suppress(ValueError):  # the garbage collector may close abandoned work in another task's context
            _inside_boundary.reset(inside)


_inside_boundary: ContextVar[bool] = ContextVar("inside_boundary", default=False)
"""Tasks inherit it from the code that creates them."""


class TaskExit(Exception):
    """Raised in the place of one of EXITS, by a task of an item's code."""


EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit)
"""Exceptions that code which awaits a task cannot catch. asyncio raises the first two from the event loop, and the
last one closes the awaiting code."""


class _ContainedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine whose EXITS are raised as TaskExit."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        try:
            return self._coroutine.send(value)
        except EXITS as e:
            raise TaskExit(f"{type(e).__name__}: {e}") from e

    def throw(self, *error: Any) -> Any:
        try:
            return self._coroutine.throw(*error)
        except EXITS as e:
            raise TaskExit(f"{type(e).__name__}: {e}") from e

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._coroutine.__await__())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # asyncio's debug mode and repr() read its frame and name


def _contain_exits_of_tasks() -> None:
    """Make the running event loop, if any, convert the EXITS of tasks that are created within a boundary."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    existing: Any = loop.get_task_factory()
    if existing is not None and getattr(existing, "contains_exits", False):
        return

    def create_task(
        loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Future[Any]:
        if _inside_boundary.get():
            coroutine = _ContainedCoroutine(coroutine)
        if existing is not None:
            task: asyncio.Future[Any] = existing(loop, coroutine, **options)
            return task
        return asyncio.Task(coroutine, loop=loop, **options)

    factory: Any = create_task
    factory.contains_exits = True
    loop.set_task_factory(factory)


def _is_cancelled() -> bool:
    """Return whether this task was cancelled. A CancelledError may also come from a task of the item's code."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return False
    return task is not None and task.cancelling() > 0


def _ends_the_run(error: BaseException) -> bool:
    if isinstance(error, RlsysError | GeneratorExit):  # GeneratorExit: no task awaits this work any more
        return True
    if isinstance(
        error, AssertionError | sqlite3.Error | MemoryError
    ):  # errors of the run only if rlsys raised them, such as a violated invariant
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and Path(frames[-1].filename).is_relative_to(_PACKAGE)
    return isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS


def _unexpected(name: str, error: BaseException) -> Censored:
    text = shorten(" ".join(error_text(error).split()), 1000)
    result = censored(
        CensorCause.EXCEPTION, f"{type(error).__name__}: {text}{source_location(error)} ({name})"
    )
    trace = "".join(traceback.format_exception(error))
    log.error("unexpected exception: %s\n%s", result.reason, valid_text(shorten(trace, LONGEST_TRACEBACK)))
    return result


@contextmanager
def exceptions_unlogged() -> Iterator[None]:
    """Suppress the log of tracebacks while the context is active. Used before a run starts."""
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False


def prompt_name(prompt: Prompt) -> str:
    """Return the name of a prompt in messages."""
    return prompt.location or f"prompt {prompt.index}"


def train_prompt(source: PromptSource, index: int) -> Prompt:
    """Return the source's training prompt of this index; a refused prompt if the source raises an error."""
    with boundary(f"prompt {index}") as item:
        return source.train(index)
    assert item.censored is not None
    return refused_prompt(Prompt(index, "", [], {}), item.censored)


def refused_prompt(prompt: Prompt, censored: Censored) -> Prompt:
    """Return the prompt as refused and without ids, so that no engine gets it."""
    return replace(prompt, ids=[], refusal=censored.reason, refusal_cause=censored.cause)


@dataclass
class FailedSamples:
    """Ends a run with too many unexpected exceptions. Owns their number since the last train step.

    `max_share`: rollout.max_failed_share. `step_samples`: number of samples of a train step.
    """

    max_share: float
    step_samples: int
    settled_samples: int = 0
    failed_samples: int = 0
    _prompts: set[int] = field(default_factory=set)

    def begin_step(self) -> None:
        """Reset the counts. Called when a train step has taken its groups."""
        self.settled_samples = self.failed_samples = 0
        self._prompts.clear()

    def settle(self, samples: int) -> None:
        """Count finished samples."""
        self.settled_samples += samples

    def add(self, samples: int, prompt_index: int, reason: str) -> None:
        """Count failed samples of a prompt. Failures of a single prompt never end the run.

        Raises:
            RunError: too many samples of several prompts failed.
        """
        self.failed_samples += samples
        self._prompts.add(prompt_index)
        total = max(self.step_samples, self.settled_samples)
        if self.failed_samples > self.max_share * total and len(self._prompts) > 1:
            raise RunError(
                f"rollout: {reason}; {self.failed_samples} of {total} samples of a train step failed with unexpected "
                f"exceptions, more than rollout.max_failed_share = {self.max_share:g}"
            )
