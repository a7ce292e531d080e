"""The boundary of a sample: what goes wrong with one item costs that item, what is wrong with the run ends it.

    row, prompt, tool, environment, agent, generator, reward    the sample is censored: its cause, and the reason
    ownership, ledger, disk, machine, invariants, config        raised on: the run ends

Whoever makes a response, scores it or reads a row from a source does it within `boundary`: training, evaluations,
named sets, probes. It is the one place where an exception that nobody foresaw is survived. It is logged with its
traceback and counted, and too many of them end the run (`FailedSamples`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rlsys.core.errors import GeneratorError, RlsysError, RowError, RunError
from rlsys.core.imports import source_location
from rlsys.core.texts import error_text, shorten, valid_text
from rlsys.core.types import LONGEST_REASON, CensorCause, Prompt
from rlsys.data import PromptSource
from rlsys.engine_requests import RefusedPrompt
from rlsys.generators.parser_client import ToolFailed
from rlsys.router.failure_policy import PoisonRequest, RefusedRequest

REFUSED = "prompt refused"
"""Reasons begin with it where no engine may get the prompt."""
LONGEST_TRACEBACK = 20_000
"""Characters of one in the log: an exception's message may have megabytes."""
_OURS = Path(__file__).resolve().parents[1]
_OF_THE_MACHINE = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
        errno.ENOBUFS,
    }
)  # fmt: skip
"""OSErrors that every other sample would meet as well."""

log = logging.getLogger("rlsys.rollout.exceptions")


class Censored(NamedTuple):
    """Why an item gives no response, or none that can be used."""

    cause: CensorCause
    reason: str


def censored(cause: CensorCause, reason: str) -> Censored:
    """The reason may be anybody's text: it is made valid, and cut."""
    return Censored(cause, shorten(valid_text(reason), LONGEST_REASON))


@dataclass
class Item:
    """What a `boundary` found: None, as long as nothing went wrong."""

    censored: Censored | None = None


@contextmanager
def boundary(name: str) -> Iterator[Item]:
    """Work on one item, which `name` tells people: its place in the data, or its number. What it cannot help becomes
    `censored` of what this gives. Raises what concerns the whole run."""
    item = Item()
    try:
        yield item
    except RefusedPrompt as e:
        item.censored = censored(CensorCause.PROMPT, f"{REFUSED}: {e} ({name})")
    except RowError as e:
        place_first = str(e).startswith(name.partition(",")[0])
        item.censored = censored(CensorCause.ROW, str(e) if place_first else f"{e} ({name})")
    except (PoisonRequest, RefusedRequest) as e:
        item.censored = censored(CensorCause.ENGINE, str(e))
    except ToolFailed as e:
        item.censored = censored(CensorCause.TOOL, str(e))
    except GeneratorError as e:
        item.censored = _unexpected(name, e)
    except BaseException as e:  # what ends a program, too: it is the item's code that raises it
        if _ends_the_run(e):
            raise
        if _is_cancelled():
            raise asyncio.CancelledError from e  # whatever the item's code makes of it
        item.censored = _unexpected(name, e)


def _is_cancelled() -> bool:
    """Whether somebody has cancelled this task. A CancelledError alone does not say it: the item's code may have a
    task of its own."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return False
    return task is not None and task.cancelling() > 0


def _ends_the_run(error: BaseException) -> bool:
    if isinstance(error, RlsysError | GeneratorExit):  # the latter: nobody waits for this work any more
        return True
    if isinstance(
        error, AssertionError | sqlite3.Error | MemoryError
    ):  # an invariant, the ledger: where it is ours
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and Path(frames[-1].filename).is_relative_to(_OURS)
    return isinstance(error, OSError) and error.errno in _OF_THE_MACHINE


def _unexpected(name: str, error: BaseException) -> Censored:
    words = shorten(" ".join(error_text(error).split()), 1000)
    found = censored(
        CensorCause.EXCEPTION, f"{type(error).__name__}: {words}{source_location(error)} ({name})"
    )
    told = "".join(traceback.format_exception(error))
    log.error("unexpected exception: %s\n%s", found.reason, valid_text(shorten(told, LONGEST_TRACEBACK)))
    return found


@contextmanager
def exceptions_unlogged() -> Iterator[None]:
    """Before a run starts: whoever reads the reasons needs no tracebacks."""
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False


def named(prompt: Prompt) -> str:
    """What a prompt is called in messages."""
    return prompt.location or f"prompt {prompt.index}"


def train_prompt(source: PromptSource, index: int) -> Prompt:
    """The source's training prompt of this index; a refused one where the source raises for it alone."""
    with boundary(f"prompt {index}") as item:
        return source.train(index)
    assert item.censored is not None
    return Prompt(index, "", [], {}, refusal=item.censored.reason, refusal_cause=item.censored.cause)


@dataclass
class FailedSamples:
    """Owns the count of samples that raised what nobody foresaw, since the last train step was taken. `share`:
    rollout.max_failed_share. `least`: samples of a train step."""

    share: float
    least: int
    settled: int = 0
    failed: int = 0
    _prompts: set[int] = field(default_factory=set)

    def begin_step(self) -> None:
        self.settled = self.failed = 0
        self._prompts.clear()

    def settle(self, samples: int) -> None:
        """So many have their reward, or their reason."""
        self.settled += samples

    def add(self, samples: int, prompt_index: int, reason: str) -> None:
        """So many of this prompt failed. Raises RunError when they are too many. Those of one prompt never are: one
        bad row costs one row."""
        self.failed += samples
        self._prompts.add(prompt_index)
        of = max(self.least, self.settled)
        if self.failed > self.share * of and len(self._prompts) > 1:
            raise RunError(
                f"rollout: {reason}; {self.failed} of {of} samples of a train step ended in exceptions that nobody "
                f"foresaw, more than rollout.max_failed_share = {self.share:g}"
            )
