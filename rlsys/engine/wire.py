"""HTTP client of one engine: address and keys, time limits of responses, and one error class for each failure."""

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
from rlsys.engine.chunks import Refused
from rlsys.engine.fence import HEADER
from rlsys.http_server.clients import direct_session

# Servers close idle connections after a few seconds; reusing one just then fails. Ours give up earlier.
KEEPALIVE_SECONDS = 1.5
_JSON = {"Content-Type": "application/json"}

DeadEngine = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
"""What aiohttp raises when the server is gone or does not answer."""


NobodyListens = aiohttp.ClientConnectorError
"""The surest sign of death, of those: no process has the port."""


_LOCAL_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
"""What this machine lacks, not the server."""
BAD_ANSWER = 502
_NO_KEY = (401, 403)


class EngineError(Exception):
    """The server answered, with a refusal. `status`: the HTTP status, 500 and above when it is the server's fault."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Limits(NamedTuple):
    """Seconds that an answer may take; a run derives them (Config.answer_seconds, Config.work_seconds)."""

    answer: float = 60.0
    """Where the request only waits for its turn."""
    work: float = 600.0
    """Where it goes over all weights, or is the first pass with new ones, which may compile."""


UNPLANNED = Limits()
"""For engines of which no config tells how large their model is."""


class Stranger(EngineError):
    """Whoever answers there is no engine of this run."""


def make_session() -> aiohttp.ClientSession:
    """One session for all engines of a process; without a limit of its own on connections."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
    return direct_session(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=2**20,
        json_serialize=_body,
    )


class Wire:
    """To one server. Raises EngineError for a refusal and one of `DeadEngine` when nobody answers."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        identity: Identity = ANONYMOUS,
        limits: Limits = UNPLANNED,
    ) -> None:
        """`identity`: whose server it must be."""
        self.url = url.rstrip("/")
        self.identity = identity
        self.limits = limits
        self._session = session
        self.epoch: int | None = None
        """Of the push that was begun here last (fence.py)."""

    def open(self, path: str, body: bytes) -> Any:
        """POST a JSON body as it is; a context manager of aiohttp's response."""
        headers = {**_JSON, **self.identity.headers(path)}
        return self._session.post(self.url + path, data=body, headers=headers, allow_redirects=False)

    async def fetch(self, path: str) -> tuple[int, bytes]:
        """GET, with whatever status."""
        async with self.request("GET", path, timeout=self._timeout()) as answer:
            return answer.status, await answer.read()

    @contextmanager
    def understanding(self, path: str) -> Iterator[None]:
        """An answer of another form than SGLang's is this server's fault, and nobody else's."""
        try:
            yield
        except Refused as e:
            raise EngineError(f"{self.url}{path}: {e}", e.status) from None
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as e:
            raise EngineError(f"{self.url}{path}: not an answer of SGLang: {e!r:.200}", BAD_ANSWER) from None

    @asynccontextmanager
    async def request(
        self, method: str, path: str, **what: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """An answer, whatever its status. A redirect is one: nobody is led elsewhere.

        Raises one of DeadEngine when nobody answers, EngineError for an answer that is no HTTP or no text, and
        RunError when this process is out of what a connection takes: no server is to blame for that.
        """
        headers = self.identity.headers(path)
        if self.epoch is not None and method == "POST":
            headers[HEADER] = str(self.epoch)
        if headers:
            what["headers"] = headers
        try:
            async with self._session.request(
                method, self.url + path, allow_redirects=False, **what
            ) as answer:
                if answer.status in _NO_KEY and self.identity.owner:
                    raise Stranger(
                        f"{self.url} is no engine of this run: {path} answers {answer.status} to its key",
                        BAD_ANSWER,
                    )
                yield answer
        except DeadEngine as e:
            if isinstance(e, OSError) and e.errno in _LOCAL_ERRNOS:
                raise RunError(
                    f"no connection to {self.url}: {os.strerror(e.errno)} on this machine"
                ) from None
            raise
        except (aiohttp.ClientError, UnicodeError) as e:
            raise EngineError(f"{self.url}{path}: no server of ours: {e!r:.200}", BAD_ANSWER) from None

    async def get(self, path: str) -> str:
        async with self.request("GET", path, timeout=self._timeout()) as answer:
            text = await answer.text()
        if answer.status != 200:
            raise EngineError(f"{self.url}{path}: {answer.status} {text[:300]}", answer.status)
        return text

    def _timeout(self, seconds: float | None = None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=self.limits.answer if seconds is None else seconds)

    async def post(self, path: str, body: dict[str, Any], seconds: float | None = None) -> Any:
        """`seconds`: what the answer may take; the limit of those that only wait for their turn."""
        async with self.request("POST", path, json=body, timeout=self._timeout(seconds)) as answer:
            text = await answer.text()
        if answer.status != 200:
            raise EngineError(f"{self.url}{path}: {answer.status} {text[:300]}", answer.status)
        data = parse(text)
        if isinstance(data, dict) and data.get("success") is False:
            raise EngineError(f"{self.url}{path}: {data.get('message')}")
        return data


def _body(body: Any) -> str:
    """Faster than the standard library's: a resumed prompt has thousands of ids."""
    return msgspec.json.encode(body).decode()


def parse(text: str) -> Any:
    """JSON, or None: some endpoints answer with nothing or in plain words."""
    try:
        return json.loads(text)
    except ValueError:
        return None
