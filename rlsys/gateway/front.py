"""The HTTP front of a stand-alone router: SGLang's /generate, OpenAI's completions and chat, and its own affairs.

    POST /generate  /v1/completions  /v1/chat/completions     to an engine, streamed or whole (proxy.py)
    GET  /v1/models /model_info /server_info                  from any engine
    GET  /health (it lives)  /ready (an engine serves)  /metrics (Prometheus)
    GET, POST, DELETE /engines                                list, add {"url": ...}, drain {"url": ...}
    POST /update_weights_from_disk {"model_path": ..., "weight_version": ...}

Two tokens: clients' opens requests for engines, the administrators' opens everything. Without the second, nobody who
has to show the first may change engines or weights.

Every refusal is JSON: {"error": {"message", "type", "code"}}.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from rlsys.core.errors import RunError, UserError
from rlsys.engine.wire import DeadEngine
from rlsys.engine_requests import API_FIELDS, RefusedPrompt, check_request, short
from rlsys.gateway.fair_queue import Places
from rlsys.gateway.fleet import Fleet
from rlsys.gateway.metrics import Metrics
from rlsys.gateway.proxy import Job, Unavailable, error_body
from rlsys.gateway.requests import engine_bodies, samples_of
from rlsys.router.failure_policy import PoisonRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

FORWARDED = tuple(API_FIELDS)
ASKED = ("/v1/models", "/model_info", "/get_model_info", "/server_info", "/get_server_info")
OPEN = ("/health", "/ready")
"""What needs no token: it tells nothing and costs nothing."""
ADMIN = ("/engines", "/update_weights_from_disk")
"""For administrators alone: others' prompts go where these say."""
_SECRET = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""What engines tell of their arguments, and clients must not hear."""
RETRY_SECONDS = "1"


@dataclass(frozen=True)
class FrontLimits:
    """In samples, of which a request may ask for several: `queue` wait while `concurrency` others are being served;
    more are refused with 429, and a request for more than `concurrency` with 413."""

    body_bytes: int = 16 * 2**20
    concurrency: int = 1024
    queue: int = 4096
    body_seconds: float = 10.0
    """For a body to come, and one more for each MiB of it."""


class Front:
    """Owns how many samples are inside."""

    def __init__(
        self, fleet: Fleet, token: str | None, limits: FrontLimits, admin_token: str | None = None
    ) -> None:
        """Without any token everything is open: for loopback alone."""
        self._fleet = fleet
        self._token = token.encode() if token is not None else None
        self._admin_token = admin_token.encode() if admin_token is not None else None
        self._limits = limits
        self._metrics = Metrics(fleet, lambda: self._inside)
        self._inside = 0
        self._places = Places(limits.concurrency)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._limits.body_bytes, middlewares=[self._guard])
        app[_LIMITS] = self._limits

        app.add_routes([web.post(path, self._forward) for path in FORWARDED])
        app.add_routes([web.get(path, self._ask) for path in ASKED])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._scrape),
                web.get("/engines", self._list),
                web.post("/engines", self._add),
                web.delete("/engines", self._drain),
                web.post("/update_weights_from_disk", self._update),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Tokens, errors as JSON, counts."""
        start = time.monotonic()
        try:
            self._check_token(request)
            response = await handler(request)
        except _Refused as e:
            response = _error(e.status, str(e))
        except RefusedPrompt as e:
            response = _error(400, str(e))
        except UserError as e:
            response = _error(400, str(e))
        except PoisonRequest as e:
            response = _error(422, str(e))  # no 5xx: clients would send it again
        except RunError as e:
            response = _error(500, str(e))
        except Unavailable as e:
            response = _error(503, str(e))
        except web.HTTPRequestEntityTooLarge:
            response = _error(413, f"the body is larger than {self._limits.body_bytes} bytes")
        except web.HTTPException as e:
            response = _error(e.status, f"{request.method} {request.path[:200]}: {e.reason}")
        known = request.match_info.route.resource
        self._metrics.observe(
            known.canonical if known else "other", response.status, time.monotonic() - start
        )
        return response

    def _check_token(self, request: web.Request) -> None:
        if request.path in OPEN or (self._token is None and self._admin_token is None):
            return
        if self._knows(request, self._admin_token):
            return
        if request.path in ADMIN:
            if self._knows(request, self._token):
                raise _Refused(403, f"{request.path} is for administrators (--admin-token-file)")
        elif self._token is None or self._knows(request, self._token):
            return
        raise _Refused(401, "a bearer token is required: Authorization: Bearer TOKEN")

    def _knows(self, request: web.Request, token: bytes | None) -> bool:
        """Compared in constant time, whatever was sent."""
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        sent = given.strip().encode(errors="replace")
        return token is not None and hmac.compare_digest(sent, token) and kind.lower() == "bearer"

    # -- requests for engines -----------------------------------------------------------------------------------

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        with self._inside_for(1):  # before its body is read
            raw = await _read(request)
            body = _object(raw)
            samples = samples_of(body)
            if samples > self._limits.concurrency:
                raise _Refused(
                    413, f"{samples} samples in one request; expected at most {self._limits.concurrency}"
                )
            with self._inside_for(samples - 1):
                limits = self._fleet.limits
                if limits is None:
                    raise Unavailable("no engine has answered yet")
                try:
                    check_request(limits, request.path, body)
                except RefusedPrompt:
                    self._metrics.refused.inc()
                    raise
                async with self._places.take(samples):
                    bodies = engine_bodies(request.path, body, deterministic=limits.deterministic)
                    jobs = [Job.of(request.path, one) for one in bodies]
                    for i, job in enumerate(jobs):
                        job.identity = hashlib.sha256(b"%d %s " % (i, request.path.encode()) + raw).digest()
                    return await self._fleet.proxy.run(jobs, request, _responses(body))

    @contextmanager
    def _inside_for(self, samples: int) -> Iterator[None]:
        most = self._limits.concurrency + self._limits.queue
        if self._inside + samples > most:
            raise _Refused(
                429, f"{self._inside} samples are here already, of at most {most}; try again later"
            )
        self._inside += samples
        try:
            yield
        finally:
            self._inside -= samples

    async def _ask(self, request: web.Request) -> web.Response:
        for engine in self._fleet.pool.serving():
            try:
                status, body = await engine.client.fetch(request.path)
            except DeadEngine:
                continue
            if status == 200 and request.path.endswith("server_info"):
                body = msgspec.json.encode({k: v for k, v in _object(body).items() if k not in _SECRET})
            return web.Response(status=status, body=body, content_type="application/json")
        raise Unavailable("no engine serves")

    # -- its own affairs ----------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        serving = len(self._fleet.pool.serving())
        ready = serving > 0 and self._fleet.limits is not None
        return web.json_response({"ready": ready, "engines_serving": serving}, status=200 if ready else 503)

    async def _scrape(self, _: web.Request) -> web.Response:
        body, kind = self._metrics.render()
        return web.Response(body=body, headers={"Content-Type": kind})

    async def _list(self, _: web.Request) -> web.Response:
        rows = [
            {
                "url": e.url, "state": e.state, "version": e.version, "in_flight": e.load, "tokens": e.tokens,
                "deaths": e.deaths, "failures_in_a_row": e.breaker.failures,
            }
            for e in self._fleet.pool.engines
        ]  # fmt: skip
        return web.json_response({"weight_version": self._fleet.pool.version, "engines": rows})

    async def _add(self, request: web.Request) -> web.Response:
        url = _text(_object(await _read(request)), "url")
        self._fleet.join(url)
        return web.json_response({"url": url}, status=201)

    async def _drain(self, request: web.Request) -> web.Response:
        url = request.query.get("url") or _text(_object(await _read(request)), "url")
        self._fleet.drain(url)
        return web.json_response({"url": url, "draining": True}, status=202)

    async def _update(self, request: web.Request) -> web.Response:
        body = _object(await _read(request))
        version = body.get("weight_version")
        if version is not None and not _is_version(version):
            raise UserError(f"weight_version = {short(version)}: expected a whole number below 2**63")
        new = await self._fleet.update(_text(body, "model_path"), None if version is None else int(version))
        return web.json_response({"success": True, "weight_version": new})


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_LIMITS = web.AppKey("limits", FrontLimits)


async def _read(request: web.Request) -> bytes:
    limits = request.app[_LIMITS]
    size = min(request.content_length or limits.body_bytes, limits.body_bytes)
    seconds = limits.body_seconds + size / 2**20
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise _Refused(408, f"the body did not come within {seconds:.0f} s") from None
    except web.RequestPayloadError as e:
        raise _Refused(400, f"the body cannot be read: {' '.join(str(e).split())}") from None


def _is_version(value: Any) -> bool:
    """Digits first: Python refuses to make a number of thousands of them."""
    if isinstance(value, str):
        return value.isascii() and value.isdecimal() and len(value) < 19
    return type(value) is int and 0 <= value < 2**63


def _object(raw: bytes) -> dict[str, Any]:
    """Strict JSON: NaN and Infinity are refused here."""
    try:
        body = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise _Refused(400, f"not a JSON object: {e}") from None
    return body


def _responses(body: dict[str, Any]) -> int:
    """To each prompt, of a request that was checked."""
    return int(body.get("n") or 1)


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise UserError(f"{name} = {value!r}: expected text")
    return value


def _error(status: int, message: str) -> web.Response:
    headers = {"Retry-After": RETRY_SECONDS} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        body=error_body(status, message), status=status, content_type="application/json", headers=headers
    )
