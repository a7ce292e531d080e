"""Simulated engine: SGLang's HTTP API over a continuous batch that is timed, not computed.

It serves the product's client and router. Like SGLang, an engine prefills waiting prompts before it continues
decoding, limits the number of running requests, and returns a request on an abort or keeps it during a pause.
Tokens have no meaning; the length of a response depends on its sample's seed. One unit of length stands for
`unit_tokens` tokens, so that long runs remain small.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rlsys.planner.costs import Costs

TOKEN, END = 3, 2
"""Token ids of a response, and of its end."""
FIRST_PROMPT = 4
"""First id of prompt 0; that of prompt `i` is larger by `i`."""
_ANSWER_SECONDS = 0.001
_MAX_UNITS = 64
"""Maximum number of units to decode before the cost of a pass is updated for the longer context."""


@dataclass
class _Request:
    """A request in the engine."""

    rid: str
    prompt: int
    """Units of its prompt and prefix."""
    end: int
    """Units that it generates."""
    finish: dict[str, Any]
    """Finish reason at that point."""
    versions: list[str] = field(default_factory=list)
    """Weight version of each generated unit."""
    start_pass: int | None = None
    """Number of the decode pass after its prefill; None while it waits or is prefilled."""
    base: int = 0
    """Units generated at that time, including the one from the prefill."""
    prefilled_event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its prompt was prefilled, or it has ended."""
    ended_event: asyncio.Event = field(default_factory=asyncio.Event)
    finish_reason: dict[str, Any] | None = None


class SimulatedEngine:
    """One simulated server. `run` is its scheduler; `answer` and `stream` handle HTTP requests."""

    def __init__(
        self,
        url: str,
        costs: Costs,
        length: Callable[[int, int], int],
        prompt: int,
        slots: int,
        cache_units: int,
        unit_tokens: int,
        *,
        reports_first_token: bool = False,
    ) -> None:
        """Create an engine.

        Args:
            url: its address.
            costs: its costs.
            length: units of a response, from a sample's seed and its prompt's number.
            prompt: units of every prompt.
            slots: maximum number of running requests.
            cache_units: units in its KV cache.
            unit_tokens: tokens per unit.
            reports_first_token: stream a response's first token immediately, so that the router can measure
                the engine's speed.
        """
        self.url = url
        self._costs, self._length, self._prompt = costs, length, prompt
        self._slots, self._cache_units, self._unit_tokens, self._reports_first_token = (
            slots,
            cache_units,
            unit_tokens,
            reports_first_token,
        )
        self._canaries: list[tuple[int, asyncio.Event]] = []
        """Units of each waiting canary."""
        self._waiting: deque[_Request] = deque()
        self._running: dict[str, _Request] = {}
        self._ends: list[tuple[int, int, str]] = []
        """Heap of (last decode pass, order, request id)."""
        self._context = 0
        self._passes = 0
        self._order = 0
        self._wake_up = asyncio.Event()
        self._paused = ""
        self._version = "0"
        self._arriving: dict[str, _Request] = {}
        self._server_free_at = 0.0
        """Time at which its server has received all requests."""
        self._orders: deque[tuple[Callable[[], None], asyncio.Event]] = deque()
        """Actions to execute between two passes."""
        self.generated = 0
        self.decoding = 0.0
        """Decoding requests x seconds."""
        self.prefilling = 0.0
        """Seconds of prefill."""

    # -- the scheduler --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the scheduler."""
        while True:
            self._wake_up.clear()
            while self._orders:
                order, done = self._orders.popleft()
                order()
                done.set()
            if self._canaries:
                await self._read_canaries()
            elif self._paused:
                await self._wake_up.wait()
            elif fresh := self._admit():
                seconds = self._costs.prefill(
                    self._unit_tokens * sum(r.prompt + len(r.versions) for r in fresh)
                )
                self.prefilling += seconds
                await asyncio.sleep(seconds)  # decoding waits meanwhile
                for request in fresh:
                    self._start(request)
                self._complete()
            elif self._running:
                await self._decode()
                self._complete()
                self._retract()
            else:
                await self._wake_up.wait()

    async def _read_canaries(self) -> None:
        canaries, self._canaries = self._canaries, []
        await asyncio.sleep(self._costs.prefill(self._unit_tokens * sum(units for units, _ in canaries)))
        for _, done in canaries:
            done.set()

    def _admit(self) -> list[_Request]:
        """Move waiting requests into the batch, in order, while it has free slots and cache."""
        fresh = []
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting[0]
            request_units = request.prompt + len(request.versions)
            if self._running and self._context + request_units > self._cache_units:
                break
            self._waiting.popleft()
            self._context += request_units
            self._running[request.rid] = request
            fresh.append(request)
        return fresh

    def _start(self, request: _Request) -> None:
        """Start decoding a request whose prefill produced its first token."""
        request.base = len(request.versions) + 1
        request.start_pass = self._passes
        request.prefilled_event.set()
        self._order += 1
        due = request.start_pass + request.end - request.base
        heapq.heappush(self._ends, (due, self._order, request.rid))

    async def _decode(self) -> None:
        """Decode until the next response ends, the context has grown, or a request or order arrives."""
        running = len(self._running)
        unit_seconds = self._unit_tokens * self._costs.decode(running, self._unit_tokens * self._context)
        units = max(1, min(self._ends[0][0] - self._passes, _MAX_UNITS))
        clock = asyncio.get_running_loop().time
        start = clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(units * unit_seconds):
                await self._wake_up.wait()
        # A request that arrives during a pass waits for its end.
        done = min(units, int((clock() - start) / unit_seconds) + 1)
        if (remaining := done * unit_seconds - (clock() - start)) > 0:
            await asyncio.sleep(remaining)
        self._passes += done
        self._context += done * len(self._running)
        self.decoding += running * done * unit_seconds

    def _complete(self) -> None:
        while self._ends and self._ends[0][0] <= self._passes:
            _, _, rid = heapq.heappop(self._ends)
            if (request := self._running.get(rid)) is not None and self._generated_units(
                request
            ) >= request.end:
                self._remove(request, request.finish)

    def _retract(self) -> None:
        """Return requests to the queue until the others fit the cache, those with the fewest units first."""
        for request in sorted(self._running.values(), key=self._generated_units):
            if self._context <= self._cache_units or len(self._running) == 1:
                return
            del self._running[request.rid]
            self._requeue(request)

    def _requeue(self, request: _Request) -> None:
        """Put a running request first into the queue; it will be prefilled again."""
        self._record_versions(request)
        self._context -= request.prompt + len(request.versions)
        request.start_pass = None
        self._waiting.appendleft(request)

    def _generated_units(self, request: _Request) -> int:
        if request.start_pass is None:
            return len(request.versions)
        return min(request.end, request.base + self._passes - request.start_pass)

    def _record_versions(self, request: _Request) -> None:
        """Record the weight version of the units generated so far."""
        request.versions += [self._version] * (self._generated_units(request) - len(request.versions))

    def _remove(self, request: _Request, finish_reason: dict[str, Any]) -> None:
        self._record_versions(request)
        self._context -= request.prompt + len(request.versions)
        del self._running[request.rid]
        self.generated += len(request.versions)
        self._end(request, finish_reason)

    def _end(self, request: _Request, finish_reason: dict[str, Any]) -> None:
        request.finish_reason = finish_reason
        request.prefilled_event.set()
        request.ended_event.set()

    # -- HTTP -----------------------------------------------------------------------------------------------------

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield the chunks of a response: one at its end, and optionally one with its first token."""
        sampling, prompt = body["sampling_params"], body["input_ids"]
        prefix_units, budget = len(prompt) - self._prompt, sampling["max_new_tokens"]
        remaining = max(1, self._length(sampling["sampling_seed"], prompt[0] - FIRST_PROMPT) - prefix_units)
        finish = (
            {"type": "stop", "matched": END} if remaining <= budget else {"type": "length", "length": budget}
        )
        request = _Request(body["rid"], len(prompt), min(remaining, budget), finish)
        await self._receive(request)
        streamed = 0
        if self._reports_first_token:
            await request.prefilled_event.wait()
            if not request.ended_event.is_set():
                self._record_versions(request)
                streamed = len(request.versions)
                yield self._chunk(request, 0, streamed)
        await request.ended_event.wait()
        yield self._chunk(request, streamed, len(request.versions))

    async def _receive(self, request: _Request) -> None:
        arrival_time = asyncio.get_running_loop().time()
        self._server_free_at = max(arrival_time, self._server_free_at) + self._costs.request
        self._arriving[request.rid] = request
        try:
            async with asyncio.timeout_at(self._server_free_at):
                await request.ended_event.wait()  # aborted before it was received
        except TimeoutError:
            del self._arriving[request.rid]
            self._waiting.append(request)
            self._wake_up.set()

    def _chunk(self, request: _Request, start: int, end: int) -> bytes:
        """Return a chunk with the units from `start` to `end`, the last ones so far.

        It has the finish reason, if the response has ended.
        """
        versions = request.versions[:end]
        ids = [TOKEN] * (end - start)
        if request.finish_reason is not None and request.finish_reason["type"] == "stop" and ids:
            ids[-1] = END
        meta: dict[str, Any] = {
            "finish_reason": request.finish_reason,
            "weight_version": versions[-1] if versions else self._version,
            "completion_tokens": end,
            "output_token_logprobs": [[-1.0, i, None] for i in ids],
        }
        if versions:  # a request that was aborted in the queue has no prompt statistics
            meta |= {"prompt_tokens": request.prompt, "cached_tokens": 0}
        if len(counts := Counter(versions)) > 1:
            meta["weight_versions"] = [
                {"version": v, "start": versions.index(v), "end": versions.index(v) + n}
                for v, n in counts.items()
            ]
        return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"

    async def answer(self, path: str, body: dict[str, Any]) -> str:
        """Handle a control request, and return the response."""
        match path.partition("?")[0]:
            case "/model_info":
                return json.dumps({"weight_version": self._version})
            case "/metrics":
                return f"sglang:generation_tokens_total {self.generated}\n"
            case "/abort_request":
                await self._between_passes(lambda: self._abort(body.get("rid")))
            case "/pause_generation":
                await self._between_passes(lambda: self._pause(body["mode"]))
            case "/continue_generation":
                self._paused = ""
                self._wake_up.set()
            case "/update_weight_version":
                await self._between_passes(lambda: self._rename(body["new_version"]))
            case "/generate":  # a canary
                self.generated += 1
                self._canaries.append((len(body["input_ids"]), done := asyncio.Event()))
                self._wake_up.set()
                await done.wait()
                scored = [[-1.0, i, None] for i in body["input_ids"]]
                return json.dumps(
                    {"meta_info": {"input_token_logprobs": scored, "weight_version": self._version}}
                )
        return json.dumps({"success": True})

    async def _between_passes(self, order: Callable[[], None]) -> None:
        done = asyncio.Event()
        self._orders.append((order, done))
        self._wake_up.set()
        await done.wait()

    def _rename(self, version: str) -> None:
        for request in self._running.values():
            self._record_versions(request)
        self._version = version

    def _abort(self, rid: str | None) -> None:
        """Abort one request, or all."""
        for request in [r for r in self._arriving.values() if rid is None or r.rid.startswith(rid)]:
            del self._arriving[request.rid]
            self._server_free_at -= self._costs.request
            self._end(request, {"type": "abort"})
        for request in [r for r in self._waiting if rid is None or r.rid.startswith(rid)]:
            self._waiting.remove(request)
            self.generated += len(request.versions)
            self._end(request, {"type": "abort"})
        for request in [r for r in self._running.values() if rid is None or r.rid.startswith(rid)]:
            self._remove(request, {"type": "abort"})

    def _pause(self, mode: str) -> None:
        """Pause; with `retract`, running requests return to the queue and are prefilled again later."""
        self._paused = mode
        if mode == "retract":
            for request in reversed(list(self._running.values())):
                self._requeue(request)
            self._running.clear()
            self._ends.clear()


class _Answer:
    """Response with the interface of aiohttp."""

    status = 200

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self.content = self

    async def text(self) -> str:
        return (await self.read()).decode()

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self._chunks])

    def iter_any(self) -> AsyncIterator[bytes]:
        return self._chunks


class SimulatedSession:
    """Replacement for aiohttp's session between EngineClient and simulated engines."""

    def __init__(self, engines: list[SimulatedEngine]) -> None:
        self._engines = {engine.url: engine for engine in engines}

    def request(self, method: str, url: str, *, json: dict[str, Any] | None = None, **_: Any) -> Any:
        return self._send(url, json or {})

    @asynccontextmanager
    async def _send(self, url: str, body: dict[str, Any]) -> AsyncIterator[_Answer]:
        parts = urlsplit(url)
        engine = self._engines[f"{parts.scheme}://{parts.netloc}"]
        await asyncio.sleep(_ANSWER_SECONDS)
        if body.get("stream"):
            yield _Answer(engine.stream(body))
        else:
            yield _Answer(_single_chunk(await engine.answer(url.removeprefix(engine.url), body)))


async def _single_chunk(text: str) -> AsyncIterator[bytes]:
    yield text.encode()
