"""In-process fake of SGLang's HTTP server for the real EngineClient, in virtual time.

The token and log-prob at a position are functions of the request's seed, the position and the weights. A response
is therefore the same however it is split into requests, as with deterministic inference. Tests can kill, restart
and hang an engine, and preempt its requests.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from aiohttp.client_reqrep import ConnectionKey

from rlsys.engine.hooks.peer_weights import READ_LOADER, WRITE_LOADER
from rlsys.engine.hooks.route_writer import RouteWriter
from rlsys.segments.route_records import ROUTES_PARAM

EOS = 2
LATENCY = 0.001  # seconds between sending a request and its registration
TOKEN_SECONDS = 0.01


# Reference model


def token(seed: int, position: int, weights: int) -> int:
    """Return the token id at a position, which is never EOS."""
    return 3 + (seed * 31 + position * 17 + weights * 7) % 120


def logprob(seed: int, position: int, weights: int) -> float:
    return -((seed + position * 3 + weights) % 11) / 8


def experts(position: int) -> list[int]:
    """Return the experts of one position: two layers with two experts each."""
    return [position % 8, (position + 3) % 8, position % 5, 300]


def canary_logprobs(ids: list[int], weights: int) -> list[float]:
    """Return the log-probs of `ids[1:]`."""
    return [-(i % 5) / 4 - weights for i in ids[1:]]


def checksums(weights: int) -> dict[str, str]:
    """Return the tensor checksums of one rank. `packed` stands for a tensor without a comparable checksum."""
    return {"layers.0.norm": f"0{weights}", "layers.1.norm": f"1{weights}", "packed": "?"}


# Server


@dataclass
class Request:
    """A streamed request and its state."""

    rid: str
    ids: list[int]
    seed: int
    budget: int
    cache_key: str | None = None
    output_ids: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)  # weights that sampled each token
    versions: list[int | str] = field(default_factory=list)  # version of the weights of each token
    sent: int = 0
    aborted: bool = False
    running: bool = False
    preempted: bool = False
    routes_from: int | None = None
    accepts_route_records: bool = (
        False  # the response may refer to a route record instead of holding the routes
    )
    delivered: int = 0  # tokens that the client has read; only some subclasses count them
    died: bool = False  # the server died before the request ended
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine:
    """Fake SGLang server. After `restart`, a new server process serves the same URL.

    Attributes:
        calls: Paths of control requests, in the order of their arrival.
        prompts: Prompts of streamed requests, in the order of their arrival.
        history: All streamed requests.
        cached_tokens: Number of cached prompt tokens that responses report.
        pending_aborts: Number of next non-streaming requests to answer with an abort.
    """

    def __init__(
        self,
        url: str,
        *,
        ends_at: Callable[[int], int] = lambda seed: 40,
        chunk: int = 4,
        max_running: int = 1000,
        label: str = "0",
        segments: Path | None = None,
        peer_weights: list[int] | None = None,
    ) -> None:
        """Start the engine.

        Args:
            ends_at: Return the position of the EOS token from the seed of a request.
            chunk: Number of tokens per streamed event.
            max_running: Largest number of running requests.
            label: Version of the initial weights.
            segments: Segment folder of the run, for route records; None: the response holds the routes.
            peer_weights: Weights that engines have sent for a peer and no peer has received yet, shared among
                engines; None: the engine refuses peer weight transfers.
        """
        self.url = url
        self._label = label
        self._segments = segments
        self._peer_weights = peer_weights
        self.starts = 0
        self.chunk = chunk
        self.max_running = max_running
        self.ends_at = ends_at
        self.calls: list[str] = []
        self.prompts: list[list[int]] = []
        self.dead = self.hung = False
        self.pending_aborts = 0
        self.requests: dict[str, Request] = {}
        self.history: list[Request] = []
        self.cached_tokens = 0
        self._boot()

    def _boot(self) -> None:
        self.weights = 0
        self.loading: int | None = None  # weights of an open update
        self.update_open = False
        self.version: int | str = self._label
        self.released: set[str] = set()
        self.generated = 0
        self.paused: str | None = None
        self.starts += 1
        unit = urlsplit(self.url).hostname or ""
        self.routes: RouteWriter | None = None
        if self._segments is not None:
            self.routes = RouteWriter(self._segments, 0, unit, self.starts, 0, size=4000)

    # Fault injection

    def die(self) -> None:
        """Kill the server: its streams break and it refuses connections."""
        self.dead = True
        for request in self.requests.values():
            request.died = True
            request.changed.set()

    def restart(self) -> None:
        """Kill the server and start a new one with the initial weights."""
        self.die()
        self.requests = {}
        self._boot()
        self.dead = self.hung = False

    def wake(self) -> None:
        """End a hang: streams continue. Control requests that arrived during the hang are never answered."""
        self.hung = False
        for request in self.requests.values():
            request.changed.set()

    def preempt(self) -> None:
        """Preempt every request for lack of memory; none is scheduled again."""
        for request in self.requests.values():
            request.preempted = True

    # HTTP

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Return the status and body of the response to a request that does not stream."""
        if self.hung:
            await asyncio.Event().wait()
        handler = getattr(self, "_" + path.partition("?")[0].strip("/"))
        if body or path not in ("/model_info", "/metrics", "/health"):
            self.calls.append(path.partition("?")[0].strip("/"))
        return handler(body)

    def _model_info(self, _: dict[str, Any]) -> tuple[int, str]:
        return 200, json.dumps({"weight_version": str(self.version)})

    def _metrics(self, _: dict[str, Any]) -> tuple[int, str]:
        return 200, f'# HELP x\nsglang:generation_tokens_total{{is_streaming="true"}} {self.generated}.0\n'

    def _abort_request(self, body: dict[str, Any]) -> tuple[int, str]:
        for request in self.requests.values():
            if body.get("abort_all") or request.rid.startswith(body["rid"]):
                request.aborted = True
                request.changed.set()
        return 200, ""

    def _begin_weight_update(self, _: dict[str, Any]) -> tuple[int, str]:
        if self.update_open:
            return 400, json.dumps({"success": False, "message": "a weight-update session is already open"})
        self.update_open = True
        return 200, json.dumps({"success": True, "message": "Success"})

    def _end_weight_update(self, _: dict[str, Any]) -> tuple[int, str]:
        if not self.update_open:
            return 400, json.dumps({"success": False, "message": "no weight-update session is open"})
        self.update_open = False
        return 200, json.dumps({"success": True, "message": "Success"})

    def load(self, weights: int) -> None:
        """Receive the tensors of a trainer."""
        assert self.update_open, "tensors arrive outside a weight-update session"
        assert not any(r.running for r in self.requests.values()), "tensors arrive while a request runs"
        assert "weights" not in self.released, "tensors arrive while the memory of the weights is released"
        self.calls.append("tensors")
        self.weights = weights

    def _load(self, body: dict[str, Any]) -> tuple[int, str]:
        """Receive the tensors of a trainer in another process."""
        if self.update_open and not self.dead:
            self.load(body["weights"])
        return 200, ""

    def _update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, str]:
        """Send weights to a peer or receive them from one, by a custom loader without tensors in the request."""
        assert pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])) == []
        if self._peer_weights is None or not self.update_open:
            return 400, json.dumps({"success": False, "message": "refused"})
        if body["load_format"] == WRITE_LOADER:
            assert self.paused or not self.requests, "the engine would wait until its requests end"
            self._peer_weights.append(self.weights)
        elif self._peer_weights:
            assert body["load_format"] == READ_LOADER and not any(r.running for r in self.requests.values())
            self.weights = self._peer_weights.pop()
        return 200, json.dumps({"success": True, "message": "Success"})

    def _pause_generation(self, body: dict[str, Any]) -> tuple[int, str]:
        self.paused = body["mode"]
        for request in self.requests.values():
            request.running = False
            request.changed.set()
        return 200, ""

    def _continue_generation(self, _: dict[str, Any]) -> tuple[int, str]:
        self.paused = None
        for request in self.requests.values():
            request.changed.set()
        return 200, ""

    def _flush_cache(self, _: dict[str, Any]) -> tuple[int, str]:
        return (400, "busy") if self.requests and self.paused != "retract" else (200, "Cache flushed.\n")

    def _update_weight_version(self, body: dict[str, Any]) -> tuple[int, str]:
        text = body["new_version"]
        self.version = text
        return 200, json.dumps({"success": True})

    def _release_memory_occupation(self, body: dict[str, Any]) -> tuple[int, str]:
        assert not self.requests, "memory is released while the engine has requests"
        assert not self.released, "memory is released twice"
        self.released = set(body["tags"])
        return 200, ""

    def _resume_memory_occupation(self, body: dict[str, Any]) -> tuple[int, str]:
        assert self.released >= set(body["tags"]), "memory is resumed that is not released"
        self.released -= set(body["tags"])
        return 200, ""

    def _weights_checker(self, body: dict[str, Any]) -> tuple[int, str]:
        assert body == {"action": "checksum"}
        return 200, json.dumps({"success": True, "ranks": [{"checksums": checksums(self.weights)}]})

    def _generate(self, body: dict[str, Any]) -> tuple[int, str]:
        """Score a canary or a prompt, without streaming."""
        assert not self.released, "a request arrives while the memory is released"
        if self.pending_aborts:
            self.pending_aborts -= 1
            return 200, json.dumps({"meta_info": {"finish_reason": {"type": "abort"}}})
        self.generated += 1
        entries = [[None, body["input_ids"][0], None]]
        entries += [[x, 0, None] for x in canary_logprobs(body["input_ids"], self.weights)]
        meta = {"input_token_logprobs": entries, "weight_version": str(self.version)}
        return 200, json.dumps({"meta_info": meta})

    # Generation

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of a streamed request."""
        await asyncio.sleep(LATENCY)
        assert body["rid"] not in self.requests, "the request id is in use"
        assert all(0 <= i < 128 for i in body["input_ids"]), "a token id is outside the vocabulary of 128"
        assert not self.released, "a request arrives while the memory is released"
        sampling = body["sampling_params"]
        request = Request(
            body["rid"],
            body["input_ids"],
            sampling["sampling_seed"],
            sampling["max_new_tokens"],
            body.get("extra_key"),
        )
        if body.get("return_routed_experts"):
            request.routes_from = body["routed_experts_start_len"]
            request.accepts_route_records = bool(sampling["custom_params"][ROUTES_PARAM])
        generation = self.requests  # a restarted server has a new dict
        generation[request.rid] = request
        self.history.append(request)
        self.prompts.append(request.ids)
        try:
            finish = None
            while finish is None:
                due = await self._wait_for_token(request)
                if self.dead or generation is not self.requests:
                    raise aiohttp.ClientPayloadError("the server died")
                if not due:
                    yield self._chunk(request, None)
                    continue
                finish = self._generate_token(request)
                if finish or len(request.output_ids) - request.sent >= self.chunk:
                    yield self._chunk(request, finish)
            yield b"data: [DONE]\n"
        finally:
            if generation is self.requests:
                if not request.aborted and finish is None:
                    self.generated += len(request.output_ids)  # the client disconnected, so the request ends
                generation.pop(request.rid, None)
                for other_request in generation.values():
                    other_request.changed.set()

    async def _wait_for_token(self, request: Request) -> bool:
        """Wait until the next token is due, or until the request is aborted or its server dies.

        Returns:
            False if the engine is paused and unsent tokens are to be streamed.
        """
        while not ((request.aborted and self.paused != "in_place") or self.dead):
            if self.paused and len(request.output_ids) > request.sent:
                return False
            request.changed.clear()
            running = sum(r.running for r in self.requests.values())
            if (
                self.paused
                or request.preempted
                or self.hung
                or (not request.running and running >= self.max_running)
            ):
                await request.changed.wait()
                continue
            request.running = True
            try:
                async with asyncio.timeout(TOKEN_SECONDS):
                    await request.changed.wait()
            except TimeoutError:
                if not self.paused:
                    return True
        return True

    def _generate_token(self, request: Request) -> dict[str, Any] | None:
        """Generate one token and return the finish reason, or None if the request goes on.

        As in SGLang, a running request generates one more token after an abort.
        """
        aborted = {"type": "abort", "message": "Aborted", "status_code": None} if request.aborted else None
        if aborted and (request.preempted or not request.running):
            return aborted
        position = len(request.ids) + len(request.output_ids)
        request.weights.append(self.weights)
        request.versions.append(self.version)
        if position == self.ends_at(request.seed):
            request.output_ids.append(EOS)
            return aborted or {"type": "stop", "matched": EOS}
        request.output_ids.append(token(request.seed, position, self.weights))
        if aborted:
            return aborted
        if len(request.output_ids) == request.budget:
            return {"type": "length", "length": request.budget}
        return None

    def _chunk(self, request: Request, finish: dict[str, Any] | None) -> bytes:
        first = len(request.ids)
        probs = [logprob(request.seed, first + i, w) for i, w in enumerate(request.weights)]
        meta: dict[str, Any] = {"finish_reason": finish, "weight_version": str(self.version)}
        if finish and len(set(request.versions)) > 1:
            meta["weight_versions"] = [
                {"version": str(v), "start": request.versions.index(v), "end": request.versions.index(v) + n}
                for v, n in Counter(request.versions).items()
            ]
        if request.aborted and (request.preempted or not request.running):
            # SGLang's response to an aborted request in its queue drops unsent tokens and repeats the last one.
            sent_ids = request.output_ids[: request.sent]
            ids, probs = sent_ids[-1:], probs[: request.sent]
            meta["completion_tokens"] = len(sent_ids)
        else:
            ids, probs = request.output_ids[request.sent :], probs[request.sent :]
            meta |= {
                "prompt_tokens": first,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": len(request.output_ids),
            }
            request.sent = len(request.output_ids)
            if finish:
                self.generated += len(request.output_ids)
                if request.routes_from is not None:
                    rows = range(request.routes_from, first + len(request.output_ids) - 1)
                    chosen = np.array([experts(p) for p in rows], "<i4").reshape(-1, 2, 2)
                    route_bytes = chosen.tobytes()
                    if self.routes is not None and request.accepts_route_records and len(rows):
                        route_bytes = self.routes.append(chosen, request.routes_from)
                    meta["routed_experts"] = base64.b64encode(route_bytes).decode()
        meta["output_token_logprobs"] = [
            [p, i, None] for p, i in zip(probs, request.output_ids, strict=False)
        ]
        return f"data: {json.dumps({'output_ids': ids, 'meta_info': meta})}\n".encode()


# HTTP session


class _Response:
    def __init__(self, status: int, text: str = "", content: _Content | None = None) -> None:
        self.status = status
        self._text = text
        self.content = content

    async def text(self) -> str:
        return self._text


class _Content:
    """Body of a stream, in pieces that do not end where events end."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream

    async def iter_any(self) -> AsyncIterator[bytes]:
        async for line in self._stream:
            yield line[:7]
            yield line[7:] + b"\n"


class Network:
    """Fake of aiohttp.ClientSession that routes requests to engines by URL."""

    def __init__(self, *engines: ScriptedEngine) -> None:
        self._engines = {e.url: e for e in engines}

    def request(
        self,
        method: str,
        url: str,
        *,
        json: dict[str, Any] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
        headers: dict[str, str] | None = None,
        allow_redirects: bool,
    ) -> Any:
        assert not allow_redirects, f"{method} {url} would follow a redirect"
        return self._send(url, json or {}, timeout)

    @asynccontextmanager
    async def _send(
        self, url: str, body: dict[str, Any], timeout: aiohttp.ClientTimeout | None
    ) -> AsyncIterator[_Response]:
        parts = urlsplit(url)
        engine = self._engines[f"{parts.scheme}://{parts.netloc}"]
        path = url.removeprefix(engine.url)
        await asyncio.sleep(LATENCY)
        if engine.dead:
            key = ConnectionKey(parts.hostname or "", parts.port, False, True, None, None, None)
            raise aiohttp.ClientConnectorError(key, OSError(111, "Connection refused"))
        if body.get("stream"):
            stream = engine.stream(body)
            try:
                yield _Response(200, content=_Content(stream))
            finally:
                await stream.aclose()
            return
        async with asyncio.timeout(timeout.total if timeout else None):
            status, text = await engine.answer(path, body)
        yield _Response(status, text)
