"""HTTP client of one engine: address and keys, time limits of responses, one error class for each kind of failure."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec

from rlsys.core.errors import RunError
from rlsys.core.identity import ANONYMOUS, Identity
from rlsys.engine.chunks import RequestRefused
from rlsys.engine.fence import HEADER
from rlsys.http_server.clients import direct_session

# Servers close idle connections after a few seconds, and a request at that moment fails. The client closes first.
KEEPALIVE_SECONDS = 1.5
_JSON = {"Content-Type": "application/json"}

DeadEngine = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
"""aiohttp's errors for a server that has exited or does not respond."""
PortClosed = aiohttp.ClientConnectorError
"""The error of DeadEngine that proves that the server has exited: no process listens on the port."""
_LOCAL_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
"""Errors of this machine, not of the server."""
BAD_ANSWER = 502
"""Status of an EngineError for a malformed response."""
_NO_KEY = (401, 403)
"""HTTP statuses that refuse a key."""


class EngineError(Exception):
    """Raised when the server refuses a request, or its response is malformed.

    Attributes:
        status: HTTP status; from 500 on, the server is at fault.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Limits(NamedTuple):
    """Time limits of responses in seconds. A run derives them (Config.answer_seconds, Config.work_seconds)."""

    answer: float = 60.0
    """Limit of a request that only waits in the queue."""
    work: float = 600.0
    """Limit of a request that processes all weights, or runs the first forward pass, which may compile kernels."""


DEFAULT_LIMITS = Limits()
"""Limits of engines whose model size is unknown."""


class ForeignServer(EngineError):
    """Raised when the server at an engine's address is not an engine of this run."""


def make_session() -> aiohttp.ClientSession:
    """Create the session for all engines of a process. It does not limit the number of connections."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
    return direct_session(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=2**20,
        json_serialize=_body,
    )


class Wire:
    """HTTP client of one server.

    Methods raise EngineError if the server refuses a request, and an error of `DeadEngine` if it does not respond.
    """

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        identity: Identity = ANONYMOUS,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Create a client without sending a request.

        Args:
            identity: Owner that the server must have, and its keys.
        """
        self.url = url.rstrip("/")
        self.identity = identity
        self.limits = limits
        self._session = session
        self.epoch: int | None = None
        """Epoch of the last weight update that this client began (fence.py)."""

    def open(self, path: str, body: bytes) -> Any:
        """Return aiohttp's context manager that sends an encoded JSON body by POST and yields the response."""
        headers = {**_JSON, **self.identity.headers(path)}
        return self._session.post(self.url + path, data=body, headers=headers, allow_redirects=False)

    async def fetch(self, path: str) -> tuple[int, bytes]:
        """Send a GET request. Return status and body, also of an error."""
        async with self.request("GET", path, timeout=self._timeout()) as answer:
            return answer.status, await answer.read()

    @contextmanager
    def translate_errors(self, path: str) -> Iterator[None]:
        """Convert errors of decoding a response to EngineError: a malformed response is the server's fault."""
        try:
            yield
        except RequestRefused as e:
            raise EngineError(f"{self.url}{path}: {e}", e.status) from None
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as e:
            raise EngineError(f"{self.url}{path}: malformed response: {e!r:.200}", BAD_ANSWER) from None

    @asynccontextmanager
    async def request(
        self, method: str, path: str, **options: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Send a request and yield the response, regardless of its status. Do not follow redirects.

        Args:
            method: HTTP method.
            path: Path, with query.
            options: Passed to aiohttp's request.

        Raises:
            DeadEngine: The server does not respond.
            EngineError: The response is not HTTP, or not text.
            RunError: This process lacks files, memory or ports for a connection.
        """
        headers = self.identity.headers(path)
        if self.epoch is not None and method == "POST":
            headers[HEADER] = str(self.epoch)
        if headers:
            options["headers"] = headers
        try:
            async with self._session.request(
                method, self.url + path, allow_redirects=False, **options
            ) as answer:
                if answer.status in _NO_KEY and self.identity.owner:
                    raise ForeignServer(
                        f"{self.url} is not an engine of this run: {path} refuses its key (HTTP {answer.status})",
                        BAD_ANSWER,
                    )
                yield answer
        except DeadEngine as e:
            if isinstance(e, OSError) and e.errno in _LOCAL_ERRNOS:
                raise RunError(
                    f"cannot connect to {self.url}: this machine reports: {os.strerror(e.errno)}"
                ) from None
            raise
        except (aiohttp.ClientError, UnicodeError) as e:
            raise EngineError(f"{self.url}{path}: not an HTTP response: {e!r:.200}", BAD_ANSWER) from None

    async def get(self, path: str) -> str:
        """Send a GET request and return the text of the response.

        Raises:
            EngineError: The status is not 200.
        """
        async with self.request("GET", path, timeout=self._timeout()) as answer:
            text = await answer.text()
        self._check_status(path, answer.status, text)
        return text

    def _check_status(self, path: str, status: int, text: str) -> None:
        if status != 200:
            raise EngineError(f"{self.url}{path}: HTTP {status}: {text[:300]}", status)

    def _timeout(self, seconds: float | None = None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=self.limits.answer if seconds is None else seconds)

    async def post(self, path: str, body: dict[str, Any], seconds: float | None = None) -> Any:
        """Send a JSON body by POST, and return the decoded response; None if the response is not JSON.

        Args:
            path: Path, with query.
            body: Value that is encoded as JSON.
            seconds: Time limit of the response; None for `Limits.answer`.

        Raises:
            EngineError: The status is not 200, or the response reports no success.
        """
        async with self.request("POST", path, json=body, timeout=self._timeout(seconds)) as answer:
            text = await answer.text()
        self._check_status(path, answer.status, text)
        data = parse(text)
        if isinstance(data, dict) and data.get("success") is False:
            message = data.get("message") or "the engine reports no success, without a message"
            raise EngineError(f"{self.url}{path}: {message}")
        return data


def _body(body: Any) -> str:
    """Encode JSON with msgspec, because the standard library is slow for the thousands of ids of a resumed prompt."""
    return msgspec.json.encode(body).decode()


def parse(text: str) -> Any:
    """Decode JSON. Return None for other text, because some endpoints return an empty body or plain text."""
    try:
        return json.loads(text)
    except ValueError:
        return None
