"""Judges of whole solutions, for group rewards that ask one (fapo): text in, verdict out.

A judge, built in or named by import path, is made as `function(config, ask)`; `ask` puts a question to the run's
own engines, through the same router as the rollout.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from rlsys.config import Config
from rlsys.plugins import call, resolve

Judge = Callable[[str], Awaitable[str]]

_SOLUTION = re.compile(r"Solution:\n(.*)\n\n", re.DOTALL)
_LINE = re.compile(r"(-?\d+)([+-]\d+)=(-?\d+)")


def engines(config: Config, ask: Judge) -> Judge:
    """The policy judges itself: a generative judge behind the router, for models that can."""
    return ask


def chain_sum(config: Config, ask: Judge) -> Judge:
    """A rule for the quickstart's task: each line of the working must be true; an answer without any is a guess."""

    async def judge(text: str) -> str:
        found = _SOLUTION.search(text)
        working = found[1].partition("</think>")[0].split("\n") if found else []
        return rf"\boxed{{{first_wrong(working)}}}"

    return judge


def first_wrong(lines: list[str]) -> int:
    """Number of the first line that is no true `a+b=c`, from 0; -1 when all are."""
    for i, line in enumerate(lines):
        match = _LINE.fullmatch(line.strip())
        if match is None or int(match[1]) + int(match[2]) != int(match[3]):
            return i
    return -1 if lines else 0


JUDGES: dict[str, Callable[[Config, Judge], Judge]] = {"engines": engines, "chain_sum": chain_sum}


def build_judge(config: Config, ask: Judge) -> Judge | None:
    """The judge that `data.judge` names; None where it names none. Raises UserError for an unknown name."""
    if config.data.judge is None:
        return None
    judge: Judge = call("data.judge", resolve("data.judge", config.data.judge, JUDGES), config, ask)
    return judge
