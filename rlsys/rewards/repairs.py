"""Process judges: find the first error in a response and correct it, for planners that repair responses (scope)."""

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
    """Correction of a response.

    Attributes:
        at: number of correct characters at the start of the response.
        text: text that should follow them.
    """

    at: int
    text: str


ProcessJudge = Callable[[Prompt, str], Awaitable[Repair | None]]
"""(prompt, response) -> repair; None: no step is wrong, or the wrong step cannot be corrected."""


def chain_sum(config: Config) -> ProcessJudge:
    """Create a judge for the quickstart's task, which compares a response with the expected working line by line."""

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
        UserError: the name is unknown, or the factory returns no function.
    """
    name = config.data.process_judge
    if name is None:
        return None
    factory = resolve("data.process_judge", name, JUDGES)
    judge: ProcessJudge = call("data.process_judge", factory, config)
    expect_function(
        f"data.process_judge = {name!r}", factory, judge, "config", "an async function of (prompt, response)"
    )
    return judge
