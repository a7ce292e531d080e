"""The reward behind a URL: `data.reward: http://HOST:PORT/PATH`, a service that keeps nothing between two questions.

    POST {"id", "prompt", "response", "response_ids", "response_mask", "finished", "label", "entry"}
        ->  a number, or a dictionary as of a reward function

`prompt`, `response` and `label` are what slime's remote reward models are sent. A question is asked again when there
was no answer, or one that says "not now"; `id`, also sent as the header Idempotency-Key, is the same then, so that a
service may answer from its memory. Whatever else goes wrong is told once, and the sample is censored.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt, Response
from rlsys.data.tokenizer import Tokenizer
from rlsys.http_server.clients import TooLong, direct_session, read_bounded
from rlsys.rewards.workers import RewardError

TOKEN = "RLSYS_REWARD_TOKEN"
"""Environment variable with the bearer token that the service wants, if it wants one."""
AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same question may be answered."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between two tries; doubled each time."""
CONNECT_SECONDS = 10.0
LARGEST_ANSWER = 2**20
PART_OF_TIMEOUT = 0.9
"""Of rollout.reward_timeout: after it there is no further try, so that the reason can be told in time."""


class _NotNow(Exception):
    """No answer this time. `pause`: seconds that the service wants us to wait."""

    def __init__(self, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


def is_url(name: str) -> bool:
    """Whether `data.reward` names a service."""
    return name.startswith(("http://", "https://"))


def service_name(url: str) -> str:
    """What the parts of a joined reward call it."""
    return urlsplit(url).hostname or url


class ServiceReward:
    """A score of the service at `url`. Belongs to one event loop.

    Through no proxy and to no other address: a redirect is refused, because whoever answers there is not who was
    named, and would get the token, the prompt and its answer.
    """

    def __init__(self, config: Config, url: str) -> None:
        self._url = url
        self._seconds = config.rollout.reward_timeout * PART_OF_TIMEOUT
        self._tokenizer = Tokenizer.of(config)
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, prompt: Prompt, text: str) -> Any:
        """Raises RewardError: it refused, gave no JSON, or had no answer in the time."""
        plain = self._tokenizer.without_special(text)
        body = question(prompt, text.with_text(plain) if isinstance(text, Response) else plain)
        loop = asyncio.get_running_loop()
        end, pause, tries = loop.time() + self._seconds, FIRST_PAUSE, 1
        while True:
            try:
                async with asyncio.timeout_at(end):
                    return await self._ask(body)
            except _NotNow as e:
                last, wait = str(e), max(pause, e.pause)
            except (aiohttp.ClientError, OSError) as e:  # TimeoutError is one
                last, wait = _words(e), pause
            if loop.time() + wait >= end:
                raise RewardError(f"{self._url}: {last}; tried {tries} times in {self._seconds:g} s")
            await asyncio.sleep(wait)
            pause, tries = min(2 * pause, LONGEST_PAUSE), tries + 1

    async def _ask(self, body: Mapping[str, Any]) -> Any:
        """One try."""
        if self._session is None:
            times = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)  # the whole is the caller's
            self._session = direct_session(timeout=times)
        token = os.environ.get(TOKEN)
        headers = {"Idempotency-Key": body["id"]} | ({"Authorization": f"Bearer {token}"} if token else {})
        post = self._session.post(self._url, json=body, headers=headers, allow_redirects=False)
        async with post as response:
            if 300 <= response.status < 400:
                there = response.headers.get("Location", "nowhere")[:200]
                raise RewardError(f"{self._url} redirects to {there}; name the address that answers")
            try:
                raw = await read_bounded(response, LARGEST_ANSWER)
            except TooLong as e:
                raise RewardError(str(e)) from None
            said = " ".join(raw.decode(errors="replace").split())[:200]
            if response.status in AGAIN:
                raise _NotNow(f"it answered {response.status} {said}", _retry_after(response.headers))
            if response.status != 200:
                raise RewardError(f"{self._url} answered {response.status} {said}")
            try:
                return msgspec.json.decode(raw)
            except msgspec.DecodeError:
                raise RewardError(f"{self._url} answered no JSON: {said!r}") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def question(prompt: Prompt, response: str) -> dict[str, Any]:
    """What the service is sent; the same response to the same prompt has the same `id`."""
    asked = prompt.entry.get("prompt", prompt.entry.get("messages", prompt.question))
    body = {
        "prompt": asked,
        "response": str(response),
        "label": prompt.entry.get("label", prompt.entry.get("answer")),
        "entry": prompt.entry,
    }
    if isinstance(response, Response):
        body |= {
            "response_ids": list(response.ids),
            "response_mask": list(response.mask),
            "finished": response.finished,
        }
    written = json.dumps(body, sort_keys=True, default=str)
    return {"id": hashlib.sha256(written.encode()).hexdigest(), **json.loads(written)}


def find_service(url: str) -> Callable[[Config], ServiceReward]:
    """What makes the score of this URL, as a reward function of ours is made. Raises UserError for a secret in it: a
    config is written down."""
    try:
        parts = urlsplit(url)
        host, _port = parts.hostname, parts.port
    except ValueError as e:
        raise UserError(f"data.reward = {url!r}: not a URL: {e}") from None
    if parts.username is not None:
        raise UserError(
            f"data.reward: a URL with a name or a password in it; a config is written down. Use {TOKEN}"
        )
    if not host or any(c.isspace() for c in url):
        raise UserError(f"data.reward = {url!r}: expected a URL http://HOST:PORT/PATH")

    def make(config: Config) -> ServiceReward:
        return ServiceReward(config, url)

    return make


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds; dates count as none."""
    said = headers.get("Retry-After", "")
    return float(said) if said.isascii() and said.isdecimal() and len(said) < 6 else 0.0


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
