"""Process judges: the first error of a response and its correction, for group policies that repair (scope)."""

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
    """Correction of a response: its first `at` characters are right, and `text` should follow."""

    at: int
    text: str


ProcessJudge = Callable[[Prompt, str], Awaitable[Repair | None]]
"""(prompt, response) -> its repair; None: no step is wrong, or none can be corrected."""


def chain_sum(config: Config) -> ProcessJudge:
    """Compare the lines of the working with those of the quickstart's sums."""

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
    """Build the judge that `data.process_judge` names; None if unset. Raises UserError for an unknown name."""
    name = config.data.process_judge
    if name is None:
        return None
    maker = resolve("data.process_judge", name, JUDGES)
    judge: ProcessJudge = call("data.process_judge", maker, config)
    expect_function(
        f"data.process_judge = {name!r}", maker, judge, "config", "an async function of (prompt, response)"
    )
    return judge
