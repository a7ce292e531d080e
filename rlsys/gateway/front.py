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

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from rlsys.core.descriptors import RESERVE
from rlsys.core.errors import UserError
from rlsys.engine.wire import DeadEngine
from rlsys.engine_requests import API_FIELDS, RefusedPrompt, check_request, short
from rlsys.gateway.fair_queue import Places
from rlsys.gateway.fleet import Fleet
from rlsys.gateway.metrics import Metrics
from rlsys.gateway.proxy import Job, Unavailable, error_body
from rlsys.gateway.requests import engine_bodies, samples_of
from rlsys.http_server.connections import ServerLimits
from rlsys.http_server.server import LIMITER, Refusal, bearer_token, guarded_app, same_secret
from rlsys.router.failure_policy import PoisonRequest

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

    @property
    def places(self) -> int:
        return self.concurrency + self.queue


class Front:
    """Owns how many samples are inside."""

    def __init__(
        self, fleet: Fleet, token: str | None, limits: FrontLimits, admin_token: str | None = None
    ) -> None:
        """Without any token everything is open: for loopback alone."""
        self._fleet = fleet
        self._token, self._admin_token = token, admin_token
        self._limits = limits
        self._metrics = Metrics(fleet, lambda: self._inside)
        self._inside = 0
        self._places = Places(limits.concurrency)

    def app(self) -> web.Application:
        limits = ServerLimits(
            self._limits.places + RESERVE, self._limits.body_bytes, body_seconds=self._limits.body_seconds
        )
        routes = [
            *(web.post(path, self._forward) for path in FORWARDED),
            *(web.get(path, self._ask) for path in ASKED),
            web.get("/health", self._health),
            web.get("/ready", self._ready),
            web.get("/metrics", self._scrape),
            web.get("/engines", self._list),
            web.post("/engines", self._add),
            web.delete("/engines", self._drain),
            web.post("/update_weights_from_disk", self._update),
        ]
        statuses = {RefusedPrompt: 400, PoisonRequest: 422, Unavailable: 503}  # 422: clients send a 5xx again
        app = guarded_app(routes, limits, _error, statuses, self._check_token, self._observe)
        self._metrics.connections = app[LIMITER].counts
        return app

    def _observe(self, request: web.Request, status: int, seconds: float) -> None:
        known = request.match_info.route.resource
        self._metrics.observe(known.canonical if known else "other", status, seconds)

    def _check_token(self, request: web.Request) -> None:
        if request.path in OPEN or (self._token is None and self._admin_token is None):
            return
        if _knows(request, self._admin_token):
            return
        if request.path in ADMIN:
            if _knows(request, self._token):
                raise Refusal(403, f"{request.path} is for administrators (--admin-token-file)")
        elif self._token is None or _knows(request, self._token):
            return
        raise Refusal(401, "a bearer token is required: Authorization: Bearer TOKEN")

    # -- requests for engines -----------------------------------------------------------------------------------

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        with self._inside_for(1):  # before its body is read
            raw = await request.read()
            body = _object(raw)
            samples = samples_of(body)
            if samples > self._limits.concurrency:
                raise Refusal(
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
            raise Refusal(429, f"{self._inside} samples are here already, of at most {most}; try again later")
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
        url = _text(_object(await request.read()), "url")
        self._fleet.join(url)
        return web.json_response({"url": url}, status=201)

    async def _drain(self, request: web.Request) -> web.Response:
        url = request.query.get("url") or _text(_object(await request.read()), "url")
        self._fleet.drain(url)
        return web.json_response({"url": url, "draining": True}, status=202)

    async def _update(self, request: web.Request) -> web.Response:
        body = _object(await request.read())
        version = body.get("weight_version")
        if version is not None and not _is_version(version):
            raise UserError(f"weight_version = {short(version)}: expected a whole number below 2**63")
        new = await self._fleet.update(_text(body, "model_path"), None if version is None else int(version))
        return web.json_response({"success": True, "weight_version": new})


def _knows(request: web.Request, token: str | None) -> bool:
    return token is not None and same_secret(bearer_token(request), token)


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
        raise Refusal(400, f"not a JSON object: {e}") from None
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
