"""Process judges: where a response goes wrong first, and what is right there, for planners that repair (scope)."""

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
    """The first `at` characters of a response are right, and `text` is what should follow."""

    at: int
    text: str


ProcessJudge = Callable[[Prompt, str], Awaitable[Repair | None]]
"""(prompt, response) -> its repair; None: it has no wrong step, or none that can be put right."""


def chain_sum(config: Config) -> ProcessJudge:
    """A rule for the quickstart's sums: a step is a line of the working."""

    async def judge(prompt: Prompt, response: str) -> Repair | None:
        right = [f"{line}\n" for line in working(expression(prompt.entry)).split("\n")]
        right[-1] = right[-1].removesuffix("\n")
        starts = [0, *accumulate(map(len, right))]
        for start, line in zip(starts, right, strict=False):
            if not response.startswith(line, start):
                return Repair(start, line)
        return None

    return judge


JUDGES: dict[str, Callable[[Config], ProcessJudge]] = {"chain_sum": chain_sum}


def build_process_judge(config: Config) -> ProcessJudge | None:
    """That which `data.process_judge` names; None where it names none. Raises UserError for an unknown name."""
    name = config.data.process_judge
    if name is None:
        return None
    maker = resolve("data.process_judge", name, JUDGES)
    judge: ProcessJudge = call("data.process_judge", maker, config)
    expect_function(
        f"data.process_judge = {name!r}", maker, judge, "config", "an async function of (prompt, response)"
    )
    return judge
