"""Judges of whole solutions, for group rewards that ask one (fapo): text in, verdict out.

A judge is a URL, built in, or named by import path; then it is made as `function(config, ask)`, and `ask` puts a
question to the run's own engines, through the same router as the rollout. None may hold a group up (PatientJudge).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from rlsys.config import Config
from rlsys.config.plugins import call
from rlsys.core.imports import resolve
from rlsys.core.texts import load_json, valid_text
from rlsys.http_server.clients import RedirectRefused, TooLong, direct_session, read_bounded

Judge = Callable[[str], Awaitable[str]]

LARGEST_ANSWER = 2**22
"""Bytes."""
LOOK_SECONDS = 0.5
"""How often a wait looks whether its time counts."""
TOKEN = "RLSYS_JUDGE_TOKEN"
_SOLUTION = re.compile(r"Solution:\n(.*)\n\n", re.DOTALL)
_LINE = re.compile(r"(-?\d+)([+-]\d+)=(-?\d+)")

log = logging.getLogger("rlsys.rewards")


class JudgeError(Exception):
    """A server that does not answer as an OpenAI-compatible one does."""


class PatientJudge:
    """A judge with a time limit. What it does not say in time, or fails to say, is no verdict: None, counted, logged.

    Only time in which `working()` counts: engines that rest for the trainer judge nothing. `hung` counts questions
    given up, `failed` those that raised; `last` says why the last one of both had no verdict.
    """

    def __init__(self, judge: Judge, seconds: float, working: Callable[[], bool] = lambda: True) -> None:
        self._judge = judge
        self._seconds = seconds
        self._working = working
        self.hung = self.failed = 0
        self.last = ""

    async def __call__(self, text: str) -> str | None:
        task = asyncio.ensure_future(self._judge(text))
        try:
            await wait_for_work(task, self._seconds, self._working)
            if not task.done():
                self.hung += 1
                self.last = f"the judge took longer than data.judge_timeout = {self._seconds:g} s"
            elif (error := task.exception()) is not None:
                self.failed += 1
                self.last = f"the judge failed: {type(error).__name__}: {error}"
            elif isinstance(said := task.result(), str):
                return valid_text(said)
            else:
                self.failed += 1
                self.last = f"the judge gave a {type(said).__name__}, expected a text"
        finally:
            task.cancel()
        log.warning("%s", self.last)
        return None


async def wait_for_work(task: asyncio.Future[Any], seconds: float, working: Callable[[], bool]) -> None:
    """Until it is done or its time is up. Not wait_for: that waits for a task that may not end when cancelled."""
    left = seconds
    while left > 0 and not task.done():
        look = min(left, LOOK_SECONDS)
        await asyncio.wait({task}, timeout=look)
        left -= look * working()


def engines(config: Config, ask: Judge) -> Judge:
    """The policy judges itself, through the run's own router. For models that can."""
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


class UrlJudge:
    """A generative reward model behind an OpenAI-compatible server (`rlsys router` before its own engines, say).

    Asks greedily, in one chat message, the first model that the server names. A bearer token, if it wants one, is in
    the environment (TOKEN): a config is written down.
    """

    def __init__(self, url: str) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._model: str | None = None
        token = os.environ.get(TOKEN)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def __call__(self, text: str) -> str:
        """Raises JudgeError, and aiohttp's errors for a server that cannot be reached."""
        no_limit = aiohttp.ClientTimeout(total=None)  # that is its caller's
        async with direct_session(timeout=no_limit, headers=self._headers) as session:
            if self._model is None:
                models = await _json(session.get(f"{self._base}/models"))
                self._model = _dig(models, "data", 0, "id")
            message = {"role": "user", "content": text}
            body = {"model": self._model, "messages": [message], "temperature": 0}
            answer = await _json(session.post(f"{self._base}/chat/completions", json=body))
            return _dig(answer, "choices", 0, "message", "content")


async def _json(request: Any) -> Any:
    try:
        response = await request
        raw = await read_bounded(response, LARGEST_ANSWER)
    except (RedirectRefused, TooLong) as e:
        raise JudgeError(str(e)) from None
    async with response:
        text = raw.decode(errors="replace")
        if response.status != 200:
            raise JudgeError(f"{response.url} answered {response.status}: {' '.join(text.split())[:200]}")
        try:
            return load_json(raw)
        except ValueError:
            raise JudgeError(f"{response.url} answered no JSON: {text[:200]!r}") from None


def _dig(found: Any, *path: str | int) -> str:
    """The text at this path of an answer. Raises JudgeError when there is none."""
    at = found
    try:
        for key in path:
            at = at[key]
    except (KeyError, IndexError, TypeError):
        at = None
    if not isinstance(at, str):
        raise JudgeError(f"no text at {'.'.join(map(str, path))} of its answer {str(found)[:200]}")
    return at


JUDGES: dict[str, Callable[[Config, Judge], Judge]] = {"engines": engines, "chain_sum": chain_sum}


def find_judge(name: str) -> Callable[[Config, Judge], Judge]:
    """What makes the judge of this name. Raises UserError for an unknown one."""
    if name.startswith(("http://", "https://")):
        return lambda config, ask: UrlJudge(name)
    return resolve("data.judge", name, JUDGES)


def build_judge(
    config: Config, ask: Judge, working: Callable[[], bool] = lambda: True
) -> PatientJudge | None:
    """The judge that `data.judge` names; None where it names none. Raises UserError for an unknown name.

    `working`: whether the engines work on questions.
    """
    if config.data.judge is None:
        return None
    judge: Judge = call("data.judge", find_judge(config.data.judge), config, ask)
    return PatientJudge(judge, config.data.judge_timeout, working)
