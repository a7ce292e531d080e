"""Judges, which answer a question about a solution by a verdict, for group rewards such as fapo.

A judge is one of:

- the URL of an OpenAI-compatible server (UrlJudge)
- the name of a built-in judge (JUDGES)
- the import path of a factory `create(config, ask_policy) -> judge`, where `ask_policy` sends a question to the run's
  own engines through its router

Every judge has a time limit (JudgeWithTimeout).
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
"""Returns the verdict for a question."""

MAX_ANSWER_BYTES = 2**22
"""Largest size of a server's response, in bytes."""
POLL_SECONDS = 0.5
"""Interval at which `wait_for_work` calls `working`, in seconds."""
TOKEN = "RLSYS_JUDGE_TOKEN"
_SOLUTION = re.compile(r"Solution:\n(.*)\n\n", re.DOTALL)
_LINE = re.compile(r"(-?\d+)([+-]\d+)=(-?\d+)")

log = logging.getLogger("rlsys.rewards")


class JudgeError(Exception):
    """Raised if a judge's server returns an error, or a response that is not OpenAI-compatible."""


class JudgeWithTimeout:
    """A judge with a time limit.

    Args:
        judge: the judge.
        seconds: time limit of a question, in seconds.
        working: returns whether time counts. Engines, for example, do not answer while their memory is released.

    Attributes:
        timeouts: number of questions without an answer in time.
        failures: number of questions for which the judge raised an exception, or returned no text.
        last: reason of the last timeout or failure; empty: none so far.
    """

    def __init__(self, judge: Judge, seconds: float, working: Callable[[], bool] = lambda: True) -> None:
        self._judge = judge
        self._seconds = seconds
        self._working = working
        self.timeouts = self.failures = 0
        self.last = ""

    async def __call__(self, text: str) -> str | None:
        """Return the verdict for a question; None after a timeout or an exception, which is counted and logged."""
        task = asyncio.ensure_future(self._judge(text))
        try:
            await wait_for_work(task, self._seconds, self._working)
            if not task.done():
                self.timeouts += 1
                self.last = f"the judge took longer than data.judge_timeout = {self._seconds:g} s"
            elif (error := task.exception()) is not None:
                self.failures += 1
                self.last = f"the judge failed: {type(error).__name__}: {error}"
            elif isinstance(verdict := task.result(), str):
                return valid_text(verdict)
            else:
                self.failures += 1
                self.last = f"the judge returned a {type(verdict).__name__}; expected text"
        finally:
            task.cancel()
        log.warning("%s", self.last)
        return None


async def wait_for_work(task: asyncio.Future[Any], seconds: float, working: Callable[[], bool]) -> None:
    """Wait until a task is done, but at most for the time limit. The task is not cancelled.

    Args:
        task: the task.
        seconds: time limit, in seconds.
        working: returns whether time counts towards the limit.
    """
    # asyncio.wait_for would wait for the cancelled task, which may never end.
    remaining = seconds
    while remaining > 0 and not task.done():
        interval = min(remaining, POLL_SECONDS)
        await asyncio.wait({task}, timeout=interval)
        remaining -= interval * working()


def engines(config: Config, ask_policy: Judge) -> Judge:
    """Create a judge that asks the policy itself, through the run's router."""
    return ask_policy


def chain_sum(config: Config, ask_policy: Judge) -> Judge:
    """Create a judge for the quickstart's task, which checks each line of the working.

    The verdict is the index of the first wrong line in \\boxed{}; -1 if all lines are correct; 0 without lines.
    """

    async def judge(text: str) -> str:
        match = _SOLUTION.search(text)
        working = match[1].partition("</think>")[0].split("\n") if match else []
        return rf"\boxed{{{first_wrong(working)}}}"

    return judge


def first_wrong(lines: list[str]) -> int:
    """Return the index of the first line that is not a correct sum `a+b=c`; -1: all lines are; 0: no lines."""
    for i, line in enumerate(lines):
        match = _LINE.fullmatch(line.strip())
        if match is None or int(match[1]) + int(match[2]) != int(match[3]):
            return i
    return -1 if lines else 0


class UrlJudge:
    """Generative reward model on an OpenAI-compatible server, for example `rlsys router` with its own engines.

    Sends each question as a chat message to the first model that the server lists, at temperature 0. The bearer token
    comes from the environment variable RLSYS_JUDGE_TOKEN, because the run folder stores the config.
    """

    def __init__(self, url: str) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._model: str | None = None
        token = os.environ.get(TOKEN)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def __call__(self, text: str) -> str:
        """Send a question to the server, and return the answer.

        Raises:
            JudgeError: the server returns an error, or the response is not OpenAI-compatible.
            aiohttp.ClientError: the server is unreachable.
        """
        no_limit = aiohttp.ClientTimeout(total=None)  # the caller limits the time
        async with direct_session(timeout=no_limit, headers=self._headers) as session:
            if self._model is None:
                models = await _json(session.get(f"{self._base}/models"))
                self._model = _text_at(models, "data", 0, "id")
            message = {"role": "user", "content": text}
            body = {"model": self._model, "messages": [message], "temperature": 0}
            answer = await _json(session.post(f"{self._base}/chat/completions", json=body))
            return _text_at(answer, "choices", 0, "message", "content")


async def _json(request: Any) -> Any:
    """Await the response to a request, and decode its JSON.

    Raises:
        JudgeError: the response has another status than 200, is too large, or is not JSON.
    """
    try:
        response = await request
        raw = await read_bounded(response, MAX_ANSWER_BYTES)
    except (RedirectRefused, TooLong) as e:
        raise JudgeError(str(e)) from None
    async with response:
        text = raw.decode(errors="replace")
        if response.status != 200:
            raise JudgeError(f"{response.url}: HTTP {response.status}: {' '.join(text.split())[:200]}")
        try:
            return load_json(raw)
        except ValueError:
            raise JudgeError(f"{response.url}: response {text[:200]!r}: expected JSON") from None


def _text_at(answer: Any, *path: str | int) -> str:
    """Return the text at a path of keys and indices in a response.

    Raises:
        JudgeError: the response has no text at the path.
    """
    value = answer
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        value = None
    if not isinstance(value, str):
        raise JudgeError(f"response {str(answer)[:200]}: expected text at {'.'.join(map(str, path))}")
    return value


JUDGES: dict[str, Callable[[Config, Judge], Judge]] = {"engines": engines, "chain_sum": chain_sum}


def find_judge(name: str) -> Callable[[Config, Judge], Judge]:
    """Return the factory of the judge that `data.judge` names.

    Raises:
        UserError: the name is unknown.
    """
    if name.startswith(("http://", "https://")):
        return lambda config, ask_policy: UrlJudge(name)
    return resolve("data.judge", name, JUDGES)


def build_judge(
    config: Config, ask_policy: Judge, working: Callable[[], bool] = lambda: True
) -> JudgeWithTimeout | None:
    """Create the judge of `data.judge`; None if it is unset.

    Args:
        config: config of the run.
        ask_policy: sends a question to the run's own engines.
        working: returns whether the engines currently answer questions.

    Raises:
        UserError: the name is unknown.
    """
    if config.data.judge is None:
        return None
    judge: Judge = call("data.judge", find_judge(config.data.judge), config, ask_policy)
    return JudgeWithTimeout(judge, config.data.judge_timeout, working)
