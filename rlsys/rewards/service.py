"""Reward services: `data.reward: http://HOST:PORT/PATH` is a stateless HTTP service.

    POST {"id", "prompt", "response", "response_ids", "response_mask", "finished", "label", "entry"}
        ->  a number or a dictionary, like the value of a reward function

`prompt`, `response` and `label` are the fields of slime's remote reward models. A request without a response, or with
a status in RETRY_STATUSES, is repeated with the same `id`, so that a service may cache its results. The header
Idempotency-Key has the `id`, too. Any other error censors the sample at once.
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
from rlsys.data.rows import json_row
from rlsys.data.tokenizer import Tokenizer
from rlsys.http_server.clients import TooLong, direct_session, read_bounded
from rlsys.rewards.workers import RewardError

TOKEN = "RLSYS_REWARD_TOKEN"
"""Environment variable with the bearer token of the service, if it requires one."""
RETRY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which a request is repeated."""
MIN_PAUSE, MAX_PAUSE = 0.2, 5.0
"""Shortest and longest pause between two attempts, in seconds. The pause doubles with each attempt."""
CONNECT_SECONDS = 10.0
MAX_ANSWER_BYTES = 2**20
TIMEOUT_SHARE = 0.9
"""Share of rollout.reward_timeout for attempts. The remaining time suffices to report the reason."""


class _Unavailable(Exception):
    """Raised when the service is temporarily unavailable. `pause`: seconds of its Retry-After header."""

    def __init__(self, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


def is_url(name: str) -> bool:
    """Return whether an entry of `data.reward` names a service."""
    return name.startswith(("http://", "https://"))


def service_name(url: str) -> str:
    """Return the name of a service's part in a joined reward, its host name."""
    return urlsplit(url).hostname or url


class ServiceReward:
    """The reward function of the service at `url`. Used in one event loop.

    Uses no proxy, and refuses redirects, whose target would receive the token, the prompt and the answer.
    """

    def __init__(self, config: Config, url: str) -> None:
        self._url = url
        self._seconds = config.rollout.reward_timeout * TIMEOUT_SHARE
        self._tokenizer = Tokenizer.of(config)
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, prompt: Prompt, text: str) -> Any:
        """Request the score of a response.

        Returns:
            The value of the service's JSON response.

        Raises:
            RewardError: the service refused the request, returned no JSON, or did not respond in time.
        """
        plain = self._tokenizer.without_special(text)
        body = question(prompt, text.with_text(plain) if isinstance(text, Response) else plain)
        loop = asyncio.get_running_loop()
        end = loop.time() + self._seconds
        pause, attempts = MIN_PAUSE, 1
        while True:
            try:
                async with asyncio.timeout_at(end):
                    return await self._request(body)
            except _Unavailable as e:
                reason, wait = str(e), max(pause, e.pause)
            except (aiohttp.ClientError, OSError) as e:  # includes TimeoutError
                reason, wait = _describe(e), pause
            if loop.time() + wait >= end:
                raise RewardError(f"{self._url}: {reason}; {attempts} attempts in {self._seconds:g} s")
            await asyncio.sleep(wait)
            pause, attempts = min(2 * pause, MAX_PAUSE), attempts + 1

    async def _request(self, body: Mapping[str, Any]) -> Any:
        """Send one request, and return the value of the JSON response.

        Raises:
            _Unavailable: the status is one of RETRY_STATUSES.
            RewardError: the service redirects, refuses the request, or returns too much or no JSON.
        """
        if self._session is None:
            times = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)  # the caller limits the total
            self._session = direct_session(timeout=times)
        token = os.environ.get(TOKEN)
        headers = {"Idempotency-Key": body["id"]} | ({"Authorization": f"Bearer {token}"} if token else {})
        post = self._session.post(self._url, json=body, headers=headers, allow_redirects=False)
        async with post as response:
            if 300 <= response.status < 400:
                location = response.headers.get("Location", "no Location")[:200]
                raise RewardError(
                    f"{self._url} redirects to {location}; expected the final URL in data.reward"
                )
            try:
                raw = await read_bounded(response, MAX_ANSWER_BYTES)
            except TooLong as e:
                raise RewardError(str(e)) from None
            text = " ".join(raw.decode(errors="replace").split())[:200]
            if response.status in RETRY_STATUSES:
                raise _Unavailable(f"HTTP {response.status} {text}", _retry_after(response.headers))
            if response.status != 200:
                raise RewardError(f"{self._url}: HTTP {response.status} {text}")
            try:
                return msgspec.json.decode(raw)
            except msgspec.DecodeError:
                raise RewardError(f"{self._url}: response {text!r}: expected JSON") from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


def question(prompt: Prompt, response: str) -> dict[str, Any]:
    """Build the body of a request.

    Args:
        prompt: the prompt.
        response: the response; if it is a Response, the body also has its ids, mask and `finished`.

    Returns:
        The body. Its `id` is a hash of all other fields.

    Raises:
        RowError: the row cannot be encoded as JSON without loss.
    """
    entry = json_row(prompt.entry, prompt.location or f"prompt {prompt.index}")
    problem = entry.get("prompt", entry.get("messages", prompt.question))
    body = {
        "prompt": problem,
        "response": str(response),
        "label": entry.get("label", entry.get("answer")),
        "entry": entry,
    }
    if isinstance(response, Response):
        body |= {
            "response_ids": list(response.ids),
            "response_mask": list(response.mask),
            "finished": response.finished,
        }
    encoded = json.dumps(body, sort_keys=True, default=str)
    return {"id": hashlib.sha256(encoded.encode()).hexdigest(), **json.loads(encoded)}


def find_service(url: str) -> Callable[[Config], ServiceReward]:
    """Return the factory of the reward function of a URL.

    Raises:
        UserError: the URL is invalid, or has credentials, which the stored config must not contain.
    """
    try:
        parts = urlsplit(url)
        host, _port = parts.hostname, parts.port
    except ValueError as e:
        raise UserError(f"data.reward = {url!r}: not a URL: {e}") from None
    if parts.username is not None:
        raise UserError(
            "data.reward: the URL has a user name or a password; expected a URL without, and a token in the "
            f"environment variable {TOKEN}"
        )
    if not host or any(c.isspace() for c in url):
        raise UserError(f"data.reward = {url!r}: expected a URL http://HOST:PORT/PATH")

    def make(config: Config) -> ServiceReward:
        return ServiceReward(config, url)

    return make


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of a Retry-After header; 0 if the header is missing or a date."""
    header = headers.get("Retry-After", "")
    return float(header) if header.isascii() and header.isdecimal() and len(header) < 6 else 0.0


def _describe(error: Exception) -> str:
    """Return the type and the message of an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
