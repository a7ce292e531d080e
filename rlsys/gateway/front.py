"""Front: the HTTP server of a stand-alone router, with SGLang's /generate and OpenAI's completions and chat APIs.

    POST   /generate, /v1/completions, /v1/chat/completions   generate responses, as a stream or as one JSON object
    GET    /v1/models, /model_info, /server_info              the response of an engine
    GET    /health                                            200 while the server runs
    GET    /ready                                             200 if an engine serves, otherwise 503
    GET    /metrics                                           metrics for Prometheus
    GET    /engines                                           list the engines
    POST   /engines {"url"}                                   add an engine
    DELETE /engines {"url"}                                   remove an engine after its requests have ended
    POST   /update_weights_from_disk {"model_path", "weight_version"}   load new weights in all engines

The clients' token allows requests for responses; the admin token allows all requests. With a clients' token but no
admin token, the engines and their weights cannot be changed.

Every refusal is JSON: {"error": {"message", "type", "code"}}.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from rlsys.agents.messages import BadRequest
from rlsys.core.descriptors import RESERVE
from rlsys.core.errors import RunError, UserError
from rlsys.engine.wire import DeadEngine
from rlsys.engine_requests import API_FIELDS, RefusedPrompt, short
from rlsys.gateway.answers import Answer, answer_to
from rlsys.gateway.api_requests import read_request, sample_count
from rlsys.gateway.event_stream import EventStream, SlowClient
from rlsys.gateway.fleet import Fleet
from rlsys.gateway.generation import Generation, Generations, Unavailable
from rlsys.gateway.metrics import Metrics
from rlsys.http_server.connections import ServerLimits
from rlsys.http_server.server import AUTHORIZED, LIMITER, Refusal, bearer_token, guarded_app, same_secret
from rlsys.router.failure_policy import PoisonRequest, RefusedRequest

FORWARDED = ("/v1/models", "/model_info", "/get_model_info", "/server_info", "/get_server_info")
OPEN = ("/health", "/ready")
"""Paths that require no token, because they disclose nothing and are cheap."""
ADMIN = ("/engines", "/update_weights_from_disk")
"""Paths for administrators: they determine which servers get the prompts of other clients."""
_SECRET = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""Arguments of engines that are removed from the response to /server_info."""
RETRY_SECONDS = "1"
"""Value of the header Retry-After, in seconds."""
STATUSES: Mapping[type[Exception], int] = {
    RefusedPrompt: 400, BadRequest: 400, RefusedRequest: 400, PoisonRequest: 422, Unavailable: 503, RunError: 500
}  # fmt: skip
"""HTTP statuses of errors, subclasses first. A poisonous request gets 422, because clients repeat it after a 5xx."""


@dataclass(frozen=True)
class FrontLimits:
    """Limits of requests and connections.

    Args:
        body_bytes: largest size of a request's body, in bytes.
        concurrency: largest number of samples in engines. A request for more samples is refused with 413.
        queue: largest number of samples that wait for a place in engines. Further ones are refused with 429.
        body_seconds: time limit for the body of a request to arrive, in seconds.
    """

    body_bytes: int = 16 * 2**20
    concurrency: int = 1024
    queue: int = 4096
    body_seconds: float = 10.0

    @property
    def samples(self) -> int:
        """Largest number of samples in progress."""
        return self.concurrency + self.queue


class Front:
    """The HTTP server. Owns the number of samples in progress.

    Args:
        fleet: the engines.
        token: token of clients; None: clients need no token.
        limits: limits of requests and connections.
        admin_token: the admin token. None: if `token` is None, too, all requests are allowed; otherwise
            requests of administrators are refused.
    """

    def __init__(
        self, fleet: Fleet, token: str | None, limits: FrontLimits, admin_token: str | None = None
    ) -> None:
        self._fleet = fleet
        self._token, self._admin_token = token, admin_token
        self._limits = limits
        self._metrics = Metrics(fleet, lambda: self._samples)
        self._samples = 0
        self._generations = Generations(fleet.router, limits.concurrency, fleet.queue_seconds)

    def app(self) -> web.Application:
        """Create the application."""
        limits = ServerLimits(
            self._limits.samples + RESERVE, self._limits.body_bytes, body_seconds=self._limits.body_seconds
        )
        routes = [
            *(web.post(path, self._generate) for path in API_FIELDS),
            *(web.get(path, self._forward) for path in FORWARDED),
            web.get("/health", self._health),
            web.get("/ready", self._ready),
            web.get("/metrics", self._scrape),
            web.get("/engines", self._list),
            web.post("/engines", self._add),
            web.delete("/engines", self._drain),
            web.post("/update_weights_from_disk", self._update),
        ]
        app = guarded_app(routes, limits, _error, STATUSES, self._check_token, self._observe)
        self._metrics.connections = app[LIMITER].counts
        return app

    def _observe(self, request: web.Request, status: int, seconds: float) -> None:
        resource = request.match_info.route.resource
        self._metrics.observe(resource.canonical if resource else "other", status, seconds)

    def _check_token(self, request: web.Request) -> None:
        token = bearer_token(request)
        is_admin = self._admin_token is not None and same_secret(token, self._admin_token)
        is_client = self._token is not None and same_secret(token, self._token)
        request[AUTHORIZED] = is_admin or is_client
        if request.path in OPEN or (self._token is None and self._admin_token is None) or is_admin:
            return
        if request.path in ADMIN:
            if is_client:
                raise Refusal(403, f"{request.path}: expected the admin token (--admin-token-file)")
        elif self._token is None or is_client:
            return
        raise Refusal(401, "the bearer token is missing or wrong: expected Authorization: Bearer TOKEN")

    # -- requests for engines -----------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        with self._admitted(1):  # before the body is read
            raw = await request.read()
            body = _object(raw)
            samples = sample_count(body)
            if samples > self._limits.concurrency:
                raise Refusal(
                    413, f"{samples} samples in one request: expected at most {self._limits.concurrency}"
                )
            with self._admitted(samples - 1):
                return await self._respond(request, raw, body)

    async def _respond(self, request: web.Request, raw: bytes, body: dict[str, Any]) -> web.StreamResponse:
        """Answer an admitted request. `raw`: the encoded body."""
        limits, model = self._fleet.limits, self._fleet.model
        if limits is None or model is None:
            raise Unavailable("no engine has responded yet")
        try:
            # In a thread, because a long text takes seconds to tokenize.
            api_request = await asyncio.to_thread(read_request, request.path, body, limits, model)
        except (RefusedPrompt, BadRequest):
            self._metrics.refusals.inc()
            raise
        identity = hashlib.sha256(request.path.encode() + b" " + raw).digest()
        async with self._generations.running(api_request, model, identity) as generations:
            answer = answer_to(api_request, generations, model)
            if api_request.stream:
                return await self._stream(request, answer, generations)
            await asyncio.gather(*(g.task for g in generations))
            body_bytes = msgspec.json.encode(await answer.result())
            return web.Response(body=body_bytes, content_type="application/json")

    async def _stream(
        self, request: web.Request, answer: Answer, generations: Sequence[Generation]
    ) -> web.StreamResponse:
        """Send the events of an answer as they arrive. An error after the first event becomes the last event."""
        stream = EventStream(request)

        async def send(index: int, generation: Generation) -> None:
            async for final in generation.arrivals():
                async for event in answer.events(index, final=final):
                    await stream.write(msgspec.json.encode(event))

        tasks = [asyncio.create_task(send(i, g)) for i, g in enumerate(generations)]
        try:
            await asyncio.gather(*tasks)
            for event in answer.closing():
                await stream.write(msgspec.json.encode(event))
            await stream.write(b"[DONE]")
        except SlowClient:
            return stream.drop()
        except tuple(STATUSES) as e:
            if stream.response is None:
                raise
            status = next(code for kind, code in STATUSES.items() if isinstance(e, kind))
            await stream.write(error_body(status, str(e)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return await stream.end()

    @contextmanager
    def _admitted(self, samples: int) -> Iterator[None]:
        """Count the samples of a request while the context is active.

        Raises:
            Refusal: too many samples are in progress.
        """
        limit = self._limits.samples
        if self._samples + samples > limit:
            in_progress = f"{self._samples} samples are in progress, and the request has {samples} more"
            raise Refusal(429, f"{in_progress}: expected at most {limit} in total; try again later")
        self._samples += samples
        try:
            yield
        finally:
            self._samples -= samples

    async def _forward(self, request: web.Request) -> web.Response:
        """Forward a request to a serving engine, and return the engine's response without secrets."""
        for engine in self._fleet.pool.serving():
            try:
                status, body = await engine.client.fetch(request.path)
            except DeadEngine:
                continue
            if status == 200 and request.path.endswith("server_info"):
                body = msgspec.json.encode({k: v for k, v in _object(body).items() if k not in _SECRET})
            return web.Response(status=status, body=body, content_type="application/json")
        raise Unavailable("no engine serves requests")

    # -- engines, weights and health ------------------------------------------------------------------------------

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
        new_version = await self._fleet.update(
            _text(body, "model_path"), None if version is None else int(version)
        )
        return web.json_response({"success": True, "weight_version": new_version})


def _is_version(value: Any) -> bool:
    """Return whether a value is a weight version, as a number or as text."""
    if isinstance(value, str):  # the length is limited because Python refuses to convert long texts
        return value.isascii() and value.isdecimal() and len(value) < 19
    return type(value) is int and 0 <= value < 2**63


def _object(raw: bytes) -> dict[str, Any]:
    """Decode a JSON object without NaN and Infinity.

    Raises:
        Refusal: `raw` is something else.
    """
    try:
        body = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Refusal(400, f"the body is not a JSON object: {e}") from None
    return body


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise UserError(f"{name} = {value!r:.200}: expected a text that is not empty")
    return value


def _error(status: int, message: str) -> web.Response:
    headers = {"Retry-After": RETRY_SECONDS} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        body=error_body(status, message), status=status, content_type="application/json", headers=headers
    )


def error_body(status: int, message: str) -> bytes:
    """Return the body of an error in the format of OpenAI and SGLang."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})
