"""Process judges: find the first error of a response and correct it, for group policies with repairs (scope)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import accumulate
from typing import NamedTuple

from rlsys.config import Config
from rlsys.config.plugins import call, expect_function
from rlsys.core.imports import resolve
from rlsys.core.types import Prompt
from rlsys.data.chain_sum import expression
from rlsys.data.traces import working


class Repair(NamedTuple):
    """Correction of a response: its first `at` characters are correct, and `text` should follow."""

    at: int
    text: str


ProcessJudge = Callable[[Prompt, str], Awaitable[Repair | None]]
"""(prompt, response) -> its repair; None: no step is wrong, or the wrong step cannot be corrected."""


def chain_sum(config: Config) -> ProcessJudge:
    """Create a judge that compares the lines of the working with those of the quickstart's sums."""

    async def judge(prompt: Prompt, response: str) -> Repair | None:
        lines = [f"{line}\n" for line in working(expression(prompt.entry)).split("\n")]
        lines[-1] = lines[-1].removesuffix("\n")
        starts = [0, *accumulate(map(len, lines))]
        for start, line in zip(starts, lines, strict=False):
            if not response.startswith(line, start):
                return Repair(start, line)
        return None

    return judge


JUDGES: dict[str, Callable[[Config], ProcessJudge]] = {"chain_sum": chain_sum}


def build_process_judge(config: Config) -> ProcessJudge | None:
    """Create the judge of `data.process_judge`; None if it is unset.

    Raises:
        UserError: the name is unknown.
    """
    name = config.data.process_judge
    if name is None:
        return None
    maker = resolve("data.process_judge", name, JUDGES)
    judge: ProcessJudge = call("data.process_judge", maker, config)
    expect_function(
        f"data.process_judge = {name!r}", maker, judge, "config", "an async function of (prompt, response)"
    )
    return judge
