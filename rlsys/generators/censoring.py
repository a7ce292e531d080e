"""The error boundary of a sample: an error of one item censors this item, an error of the run ends the run.

    error in                                                    effect
    row, prompt, tool, environment, agent, generator, reward    the sample is censored, with a cause and a reason
    ownership, ledger, disk, machine, invariant, config         the error is raised again, and the run ends

All code that generates a response, scores it or reads a row from a source runs within `boundary`. Only this file
catches unexpected exceptions. They are logged with their traceback and counted, and too many of them end the run
(FailedSamples).
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
"""Prefix of the reason of a prompt that no engine accepts."""
LONGEST_TRACEBACK = 20_000
"""Largest length of a traceback in the log, in characters. The message of an exception may have megabytes."""
_PACKAGE = Path(__file__).resolve().parents[1]
_MACHINE_ERRNOS = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
        errno.ENOBUFS,
    }
)  # fmt: skip
"""Error numbers of OSErrors that affect all samples."""

log = logging.getLogger("rlsys.rollout.exceptions")


class Censored(NamedTuple):
    """Cause and reason why an item was censored."""

    cause: CensorCause
    reason: str


def censored(cause: CensorCause, reason: str) -> Censored:
    """Create a Censored from any text, which is made valid UTF-8 and shortened to LONGEST_REASON characters."""
    return Censored(cause, shorten(valid_text(reason), LONGEST_REASON))


@dataclass
class Item:
    """Result of a `boundary`. `censored`: cause and reason if an error censored the item; otherwise None."""

    censored: Censored | None = None


@contextmanager
def boundary(name: str) -> Iterator[Item]:
    """Run the context's code for one item. An error of the item sets `censored` of the yielded Item.

    Args:
        name: name of the item in reasons: its location in the data, or its number.

    Raises:
        BaseException: an error of the run.
    """
    item = Item()
    _contain_exits_of_tasks()
    inside = _inside_boundary.set(True)
    try:
        yield item
    except RefusedPrompt as e:
        item.censored = censored(CensorCause.PROMPT, f"{PROMPT_REFUSED}: {e} ({name})")
    except RowError as e:
        names_item = str(e).startswith(name.partition(",")[0])
        item.censored = censored(CensorCause.ROW, str(e) if names_item else f"{e} ({name})")
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
"""Whether the code runs within a `boundary`. A task inherits the value from the code that creates it."""


class TaskExit(Exception):
    """Raised by a task of an item's code instead of one of EXITS."""


EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit)
"""Exceptions of a task that the code which awaits the task cannot catch. asyncio raises the first two from the event
loop, and the last one closes the awaiting code."""


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
    """Replace the EXITS of tasks that are created within a boundary by TaskExit, if an event loop runs."""
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
    """Return whether the current task was cancelled, and not only a task of the item's code."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return False
    return task is not None and task.cancelling() > 0


def _ends_the_run(error: BaseException) -> bool:
    """Return whether an error is an error of the run."""
    if isinstance(error, RlsysError | GeneratorExit):  # GeneratorExit: no task awaits this work any more
        return True
    if isinstance(error, AssertionError | sqlite3.Error | MemoryError):
        # Errors of the run only if a file of rlsys raised them, for example a violated invariant.
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and Path(frames[-1].filename).is_relative_to(_PACKAGE)
    return isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS


def _unexpected(name: str, error: BaseException) -> Censored:
    """Log an unexpected exception of the item `name` with its traceback, and return its cause and reason."""
    text = shorten(" ".join(error_text(error).split()), 1000)
    result = censored(
        CensorCause.EXCEPTION, f"{type(error).__name__}: {text}{source_location(error)} ({name})"
    )
    trace = "".join(traceback.format_exception(error))
    log.error("unexpected exception: %s\n%s", result.reason, valid_text(shorten(trace, LONGEST_TRACEBACK)))
    return result


@contextmanager
def exceptions_unlogged() -> Iterator[None]:
    """Do not log unexpected exceptions while the context is active."""
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False


def prompt_name(prompt: Prompt) -> str:
    """Return the name of a prompt for reasons and errors: its location in the data, or its number."""
    return prompt.location or f"prompt {prompt.index}"


def train_prompt(source: PromptSource, index: int) -> Prompt:
    """Return the training prompt with this index; a refused prompt if the source raises an error."""
    with boundary(f"prompt {index}") as item:
        return source.train(index)
    assert item.censored is not None
    return refused_prompt(Prompt(index, "", [], {}), item.censored)


def refused_prompt(prompt: Prompt, censored: Censored) -> Prompt:
    """Return a copy of the prompt that is refused, and has no ids, so that no engine gets it."""
    return replace(prompt, ids=[], refusal=censored.reason, refusal_cause=censored.cause)


@dataclass
class FailedSamples:
    """Ends a run with too many unexpected exceptions.

    Attributes:
        max_share: rollout.max_failed_share, the largest share of failed samples.
        step_samples: number of samples of a train step.
        settled_samples: number of samples that have ended since the last train step.
        failed_samples: number of samples that failed with unexpected exceptions since the last train step.
    """

    max_share: float
    step_samples: int
    settled_samples: int = 0
    failed_samples: int = 0
    _prompts: set[int] = field(default_factory=set)

    def begin_step(self) -> None:
        """Reset the counts for the next train step."""
        self.settled_samples = self.failed_samples = 0
        self._prompts.clear()

    def settle(self, samples: int) -> None:
        """Count samples that have ended."""
        self.settled_samples += samples

    def add(self, samples: int, prompt_index: int, reason: str) -> None:
        """Count samples of a prompt that failed with an unexpected exception.

        Args:
            samples: number of samples.
            prompt_index: index of the prompt.
            reason: reason of the failure, for the error.

        Raises:
            RunError: too many samples failed, and not all of them have the same prompt.
        """
        self.failed_samples += samples
        self._prompts.add(prompt_index)
        total = max(self.step_samples, self.settled_samples)
        if self.failed_samples > self.max_share * total and len(self._prompts) > 1:
            raise RunError(
                f"rollout: {reason}; {self.failed_samples} of {total} samples of a train step failed with unexpected "
                f"exceptions, more than rollout.max_failed_share = {self.max_share:g}"
            )
