"""SGLang without SGLang: servers that speak its JSON to the real EngineClient, on a clock that does not wait.

Token and log-prob at a position follow from the request's seed, the position and the weights; so a response is the
same however it is cut into requests, as on a deterministic engine. Tests make servers die, restart, hang, preempt.
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
LATENCY = 0.001  # between a request's departure and its registration
TOKEN_SECONDS = 0.01


# The model


def token(seed: int, position: int, weights: int) -> int:
    """Never EOS."""
    return 3 + (seed * 31 + position * 17 + weights * 7) % 120


def logprob(seed: int, position: int, weights: int) -> float:
    return -((seed + position * 3 + weights) % 11) / 8


def experts(position: int) -> list[int]:
    """Of one position: two layers, two experts each."""
    return [position % 8, (position + 3) % 8, position % 5, 300]


def canary_logprobs(ids: list[int], weights: int) -> list[float]:
    """Of `ids[1:]`."""
    return [-(i % 5) / 4 - weights for i in ids[1:]]


def checksums(weights: int) -> dict[str, str]:
    """Of one rank; nobody knows how it holds `packed`."""
    return {"layers.0.norm": f"0{weights}", "layers.1.norm": f"1{weights}", "packed": "?"}


# A server


@dataclass
class Request:
    rid: str
    ids: list[int]
    seed: int
    budget: int
    cache_key: str | None = None
    made: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)  # that made each token
    versions: list[int | str] = field(default_factory=list)  # and what they were called
    sent: int = 0
    aborted: bool = False
    running: bool = False
    preempted: bool = False
    routes_from: int | None = None
    points: bool = False  # it may be answered with a pointer to its routes
    delivered: int = 0  # tokens that the client has read, where somebody counts them
    died: bool = False  # with its server
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine:
    """One server process after another on the same URL. `ends_at(seed)`: position of the token that ends a sequence.

    `calls` has the control requests in the order of their arrival, `started` the prompts in theirs, `history` all
    requests that were ever streamed.
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
        passed: list[int] | None = None,
    ) -> None:
        """`label`: what it calls the weights that it starts with. `segments`: of the run, where it writes routes.
        `passed`: what engines that pass on weights have written and nobody has read; None: it cannot."""
        self.url = url
        self._label = label
        self._segments = segments
        self._passed = passed
        self.starts = 0
        self.chunk = chunk
        self.max_running = max_running
        self.ends_at = ends_at
        self.calls: list[str] = []
        self.started: list[list[int]] = []
        self.dead = self.hung = False
        self.aborting = 0  # so many of the requests that do not stream
        self.requests: dict[str, Request] = {}
        self.history: list[Request] = []
        self.cached = 0  # so many tokens of a prompt it says to have read before
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

    # What tests do to it

    def die(self) -> None:
        self.dead = True
        for request in self.requests.values():
            request.died = True
            request.changed.set()

    def restart(self) -> None:
        """With the weights that it was first started with."""
        self.die()
        self.requests = {}
        self._boot()
        self.dead = self.hung = False

    def wake(self) -> None:
        """It hung. Control requests of that time stay without an answer; streams go on."""
        self.hung = False
        for request in self.requests.values():
            request.changed.set()

    def preempt(self) -> None:
        """Every running request goes back to the queue for want of memory, and stays there."""
        for request in self.requests.values():
            request.preempted = True

    # HTTP

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
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
        """A trainer's tensors arrive."""
        assert self.update_open, "tensors outside an update"
        assert not any(r.running for r in self.requests.values()), "tensors under a running request"
        assert "weights" not in self.released, "tensors without memory for them"
        self.calls.append("tensors")
        self.weights = weights

    def _load(self, body: dict[str, Any]) -> tuple[int, str]:
        """The same from a trainer in another process."""
        if self.update_open and not self.dead:
            self.load(body["weights"])
        return 200, ""

    def _update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, str]:
        """Without tensors, by a loader of the engine's own."""
        assert pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])) == []
        if self._passed is None or not self.update_open:
            return 400, json.dumps({"success": False, "message": "refused"})
        if body["load_format"] == WRITE_LOADER:
            assert self.paused or not self.requests, "it would wait for its requests"
            self._passed.append(self.weights)
        elif self._passed:
            assert body["load_format"] == READ_LOADER and not any(r.running for r in self.requests.values())
            self.weights = self._passed.pop()
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
        assert not self.requests, "memory released under a request"
        assert not self.released, "memory released twice"
        self.released = set(body["tags"])
        return 200, ""

    def _resume_memory_occupation(self, body: dict[str, Any]) -> tuple[int, str]:
        assert self.released >= set(body["tags"]), "memory resumed that was not released"
        self.released -= set(body["tags"])
        return 200, ""

    def _weights_checker(self, body: dict[str, Any]) -> tuple[int, str]:
        assert body == {"action": "checksum"}
        return 200, json.dumps({"success": True, "ranks": [{"checksums": checksums(self.weights)}]})

    def _generate(self, body: dict[str, Any]) -> tuple[int, str]:
        """Not streamed: a canary, or a prompt to be scored."""
        assert not self.released, "a request without memory"
        if self.aborting:
            self.aborting -= 1
            return 200, json.dumps({"meta_info": {"finish_reason": {"type": "abort"}}})
        self.generated += 1
        entries = [[None, body["input_ids"][0], None]]
        entries += [[x, 0, None] for x in canary_logprobs(body["input_ids"], self.weights)]
        meta = {"input_token_logprobs": entries, "weight_version": str(self.version)}
        return 200, json.dumps({"meta_info": meta})

    # Generation

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(LATENCY)
        assert body["rid"] not in self.requests, "a request id in use"
        assert all(0 <= i < 128 for i in body["input_ids"]), "this id would kill it"
        assert not self.released, "a request without memory"
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
            request.points = bool(sampling["custom_params"][ROUTES_PARAM])
        generation = self.requests  # a restarted server has a new dict
        generation[request.rid] = request
        self.history.append(request)
        self.started.append(request.ids)
        try:
            finish = None
            while finish is None:
                due = await self._turn(request)
                if self.dead or generation is not self.requests:
                    raise aiohttp.ClientPayloadError("the server died")
                if not due:
                    yield self._chunk(request, None)
                    continue
                finish = self._step(request)
                if finish or len(request.made) - request.sent >= self.chunk:
                    yield self._chunk(request, finish)
            yield b"data: [DONE]\n"
        finally:
            if generation is self.requests:
                if not request.aborted and finish is None:
                    self.generated += len(request.made)  # its client went away: it stops by itself
                generation.pop(request.rid, None)
                for other_request in generation.values():
                    other_request.changed.set()

    async def _turn(self, request: Request) -> bool:
        """Until its next token is due, or something happens to it. False: it pauses, and what is made is sent."""
        while not ((request.aborted and self.paused != "in_place") or self.dead):
            if self.paused and len(request.made) > request.sent:
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

    def _step(self, request: Request) -> dict[str, Any] | None:
        """One token further; why it ends, if it does. What is aborted makes one token more before it ends."""
        aborted = {"type": "abort", "message": "Aborted", "status_code": None} if request.aborted else None
        if aborted and (request.preempted or not request.running):
            return aborted
        position = len(request.ids) + len(request.made)
        request.weights.append(self.weights)
        request.versions.append(self.version)
        if position == self.ends_at(request.seed):
            request.made.append(EOS)
            return aborted or {"type": "stop", "matched": EOS}
        request.made.append(token(request.seed, position, self.weights))
        if aborted:
            return aborted
        if len(request.made) == request.budget:
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
            # As SGLang answers for a request in its queue: what was not sent is gone, the last token comes again.
            sent_ids = request.made[: request.sent]
            ids, probs = sent_ids[-1:], probs[: request.sent]
            meta["completion_tokens"] = len(sent_ids)
        else:
            ids, probs = request.made[request.sent :], probs[request.sent :]
            meta |= {
                "prompt_tokens": first,
                "cached_tokens": self.cached,
                "completion_tokens": len(request.made),
            }
            request.sent = len(request.made)
            if finish:
                self.generated += len(request.made)
                if request.routes_from is not None:
                    rows = range(request.routes_from, first + len(request.made) - 1)
                    chosen = np.array([experts(p) for p in rows], "<i4").reshape(-1, 2, 2)
                    route_bytes = chosen.tobytes()
                    if self.routes is not None and request.points and len(rows):
                        route_bytes = self.routes.append(chosen, request.routes_from)
                    meta["routed_experts"] = base64.b64encode(route_bytes).decode()
        meta["output_token_logprobs"] = [[p, i, None] for p, i in zip(probs, request.made, strict=False)]
        return f"data: {json.dumps({'output_ids': ids, 'meta_info': meta})}\n".encode()


# The wire


class _Answer:
    def __init__(self, status: int, text: str = "", content: _Content | None = None) -> None:
        self.status = status
        self._text = text
        self.content = content

    async def text(self) -> str:
        return self._text


class _Content:
    """The body of a stream, in pieces that do not follow the events."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream

    async def iter_any(self) -> AsyncIterator[bytes]:
        async for line in self._stream:
            yield line[:7]
            yield line[7:] + b"\n"


class Network:
    """Stands in for aiohttp's session."""

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
    ) -> AsyncIterator[_Answer]:
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
                yield _Answer(200, content=_Content(stream))
            finally:
                await stream.aclose()
            return
        async with asyncio.timeout(timeout.total if timeout else None):
            status, text = await engine.answer(path, body)
        yield _Answer(status, text)
