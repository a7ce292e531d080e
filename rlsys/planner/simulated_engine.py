"""Simulated engine: SGLang's HTTP API over a continuous batch whose passes take virtual time but compute nothing.

The client and router of a real run use it. Like SGLang, the engine prefills waiting prompts before it continues
decoding, limits the number of running requests, returns a request on an abort, and keeps requests during a pause.
Tokens have no meaning; the length of a response depends on its sample's seed. One unit of length is `unit_tokens`
tokens, so that simulations of long responses are fast.
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

TOKEN = 3
"""Token id of all units but the last of a complete response."""
END = 2
"""Token id of the last unit of a complete response."""
FIRST_PROMPT = 4
"""First token id of prompt 0. The first token id of prompt `i` is FIRST_PROMPT + i."""
_ANSWER_SECONDS = 0.001
"""Latency of an HTTP request."""
_MAX_UNITS = 64
"""Largest number of units to decode before the cost of a pass is computed again for the longer context."""


@dataclass
class _Request:
    """A request in the engine.

    Attributes:
        rid: Request id.
        prompt: Number of units of its prompt and prefix.
        end: Number of units that it generates.
        finish: Finish reason after these units.
        versions: Weight version of each recorded unit; see `_record_versions`.
        start_pass: Number of decode passes before its first one; None while it waits or is prefilled.
        base: Number of units generated before `start_pass`, including the unit from the prefill.
        prefilled_event: Set when the prompt was prefilled, or the request has ended.
        ended_event: Set when the request has ended.
        finish_reason: Finish reason of the ended request; None before.
    """

    rid: str
    prompt: int
    end: int
    finish: dict[str, Any]
    versions: list[str] = field(default_factory=list)
    start_pass: int | None = None
    base: int = 0
    prefilled_event: asyncio.Event = field(default_factory=asyncio.Event)
    ended_event: asyncio.Event = field(default_factory=asyncio.Event)
    finish_reason: dict[str, Any] | None = None


class SimulatedEngine:
    """A simulated server. `run` is its scheduler; `answer` and `stream` handle HTTP requests.

    Attributes:
        url: Address of the server.
        generated: Number of units of ended requests, and of canaries.
        decoding: Sum over decode passes of running requests x seconds.
        prefilling: Seconds of prefill passes.
    """

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
            url: address of the server.
            costs: costs of the engine.
            length: function of a sample's seed and its prompt's number that returns the units of the response.
            prompt: number of units of every prompt.
            slots: largest number of running requests.
            cache_units: number of units that the KV cache holds.
            unit_tokens: number of tokens per unit.
            reports_first_token: whether the engine streams the first token of a response immediately, so that the
                router can measure the engine's speed.
        """
        self.url = url
        self._costs, self._length, self._prompt = costs, length, prompt
        self._slots, self._cache_units, self._unit_tokens = slots, cache_units, unit_tokens
        self._reports_first_token = reports_first_token
        self._canaries: list[tuple[int, asyncio.Event]] = []
        """Units of each waiting canary, and the event that its prefill sets."""
        self._waiting: deque[_Request] = deque()
        self._running: dict[str, _Request] = {}
        self._ends: list[tuple[int, int, str]] = []
        """Heap of (last decode pass, number of the start, request id) of running requests."""
        self._context = 0
        """Units of running requests in the KV cache."""
        self._passes = 0
        """Number of decode passes so far."""
        self._starts = 0
        """Number of starts of requests so far."""
        self._wake_up = asyncio.Event()
        self._paused = ""
        """Mode of the pause; empty if the engine is not paused."""
        self._version = "0"
        self._arriving: dict[str, _Request] = {}
        """Requests that the server has not received yet."""
        self._server_free_at = 0.0
        """Time at which the server will have received all requests."""
        self._actions: deque[tuple[Callable[[], None], asyncio.Event]] = deque()
        """Actions to execute between two passes, and the events that are set afterwards."""
        self.generated = 0
        self.decoding = 0.0
        self.prefilling = 0.0

    # -- the scheduler --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the scheduler until the task is cancelled."""
        while True:
            self._wake_up.clear()
            while self._actions:
                action, executed = self._actions.popleft()
                action()
                executed.set()
            if self._canaries:
                await self._prefill_canaries()
            elif self._paused:
                await self._wake_up.wait()
            elif admitted := self._admit():
                units = sum(request.prompt + len(request.versions) for request in admitted)
                seconds = self._costs.prefill(self._unit_tokens * units)
                self.prefilling += seconds
                await asyncio.sleep(seconds)  # no decoding during a prefill
                for request in admitted:
                    self._start(request)
                self._complete()
            elif self._running:
                await self._decode()
                self._complete()
                self._retract()
            else:
                await self._wake_up.wait()

    async def _prefill_canaries(self) -> None:
        """Prefill all waiting canaries in one pass."""
        canaries, self._canaries = self._canaries, []
        await asyncio.sleep(self._costs.prefill(self._unit_tokens * sum(units for units, _ in canaries)))
        for _, prefilled in canaries:
            prefilled.set()

    def _admit(self) -> list[_Request]:
        """Move waiting requests into the batch, in order, while slots and cache are free; return these requests."""
        admitted = []
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting[0]
            request_units = request.prompt + len(request.versions)
            if self._running and self._context + request_units > self._cache_units:
                break
            self._waiting.popleft()
            self._context += request_units
            self._running[request.rid] = request
            admitted.append(request)
        return admitted

    def _start(self, request: _Request) -> None:
        """Start decoding a request whose prefill generated its first unit."""
        request.base = len(request.versions) + 1
        request.start_pass = self._passes
        request.prefilled_event.set()
        self._starts += 1
        last_pass = request.start_pass + request.end - request.base
        heapq.heappush(self._ends, (last_pass, self._starts, request.rid))

    async def _decode(self) -> None:
        """Decode until the next response ends, a request or an action arrives, or _MAX_UNITS units are decoded."""
        running = len(self._running)
        unit_seconds = self._unit_tokens * self._costs.decode(running, self._unit_tokens * self._context)
        units = max(1, min(self._ends[0][0] - self._passes, _MAX_UNITS))
        clock = asyncio.get_running_loop().time
        start = clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(units * unit_seconds):
                await self._wake_up.wait()
        # A request that arrives during a pass waits for the end of the pass.
        decoded_units = min(units, int((clock() - start) / unit_seconds) + 1)
        if (remaining := decoded_units * unit_seconds - (clock() - start)) > 0:
            await asyncio.sleep(remaining)
        self._passes += decoded_units
        self._context += decoded_units * len(self._running)
        self.decoding += running * decoded_units * unit_seconds

    def _complete(self) -> None:
        """End the running requests that have generated all their units."""
        while self._ends and self._ends[0][0] <= self._passes:
            _, _, rid = heapq.heappop(self._ends)
            request = self._running.get(rid)
            if request is not None and self._generated_units(request) >= request.end:
                self._remove(request, request.finish)

    def _retract(self) -> None:
        """Return requests with the fewest generated units to the queue until the others fit the cache."""
        for request in sorted(self._running.values(), key=self._generated_units):
            if self._context <= self._cache_units or len(self._running) == 1:
                return
            del self._running[request.rid]
            self._requeue(request)

    def _requeue(self, request: _Request) -> None:
        """Put a running request at the head of the queue; it will be prefilled again."""
        self._record_versions(request)
        self._context -= request.prompt + len(request.versions)
        request.start_pass = None
        self._waiting.appendleft(request)

    def _generated_units(self, request: _Request) -> int:
        """Return the number of units that a request has generated."""
        if request.start_pass is None:
            return len(request.versions)
        return min(request.end, request.base + self._passes - request.start_pass)

    def _record_versions(self, request: _Request) -> None:
        """Record the weight version of the units generated so far."""
        request.versions += [self._version] * (self._generated_units(request) - len(request.versions))

    def _remove(self, request: _Request, finish_reason: dict[str, Any]) -> None:
        """Remove a running request from the batch, and end it."""
        self._record_versions(request)
        self._context -= request.prompt + len(request.versions)
        del self._running[request.rid]
        self.generated += len(request.versions)
        self._end(request, finish_reason)

    def _end(self, request: _Request, finish_reason: dict[str, Any]) -> None:
        """End a request that is in no queue and not in the batch."""
        request.finish_reason = finish_reason
        request.prefilled_event.set()
        request.ended_event.set()

    # -- HTTP -----------------------------------------------------------------------------------------------------

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield the chunks of a response: one at its end, and with `reports_first_token` one after its prefill.

        Args:
            body: body of a streaming request to /generate.
        """
        sampling, prompt = body["sampling_params"], body["input_ids"]
        prefix_units, budget = len(prompt) - self._prompt, sampling["max_new_tokens"]
        remaining = max(1, self._length(sampling["sampling_seed"], prompt[0] - FIRST_PROMPT) - prefix_units)
        if remaining <= budget:
            finish = {"type": "stop", "matched": END}
        else:
            finish = {"type": "length", "length": budget}
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
        """Put a request into the queue when the server has received it and all earlier ones."""
        arrival_time = asyncio.get_running_loop().time()
        self._server_free_at = max(arrival_time, self._server_free_at) + self._costs.request
        self._arriving[request.rid] = request
        try:
            async with asyncio.timeout_at(self._server_free_at):
                await request.ended_event.wait()  # an abort ends the request before the server receives it
        except TimeoutError:
            del self._arriving[request.rid]
            self._waiting.append(request)
            self._wake_up.set()

    def _chunk(self, request: _Request, start: int, end: int) -> bytes:
        """Return a chunk with units of a response, and the finish reason if the response has ended.

        Args:
            request: the request.
            start: index of the first unit of the chunk.
            end: number of units recorded so far.
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
        """Handle a control request.

        Args:
            path: path of the request.
            body: body of the request.

        Returns:
            The response as JSON, except for /metrics.
        """
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
                await self._between_passes(lambda: self._set_version(body["new_version"]))
            case "/generate":  # a canary
                self.generated += 1
                prefilled = asyncio.Event()
                self._canaries.append((len(body["input_ids"]), prefilled))
                self._wake_up.set()
                await prefilled.wait()
                scored = [[-1.0, i, None] for i in body["input_ids"]]
                return json.dumps(
                    {"meta_info": {"input_token_logprobs": scored, "weight_version": self._version}}
                )
        return json.dumps({"success": True})

    async def _between_passes(self, action: Callable[[], None]) -> None:
        """Execute an action between two passes of the scheduler."""
        executed = asyncio.Event()
        self._actions.append((action, executed))
        self._wake_up.set()
        await executed.wait()

    def _set_version(self, version: str) -> None:
        """Change the weight version of units that are generated from now on."""
        for request in self._running.values():
            self._record_versions(request)
        self._version = version

    def _abort(self, rid: str | None) -> None:
        """Abort the requests whose ids start with `rid`, or all requests for None."""

        def is_aborted(request: _Request) -> bool:
            return rid is None or request.rid.startswith(rid)

        for request in list(filter(is_aborted, self._arriving.values())):
            del self._arriving[request.rid]
            self._server_free_at -= self._costs.request
            self._end(request, {"type": "abort"})
        for request in list(filter(is_aborted, self._waiting)):
            self._waiting.remove(request)
            self.generated += len(request.versions)
            self._end(request, {"type": "abort"})
        for request in list(filter(is_aborted, self._running.values())):
            self._remove(request, {"type": "abort"})

    def _pause(self, mode: str) -> None:
        """Pause the scheduler. In mode `retract`, running requests return to the queue; a prefill follows later."""
        self._paused = mode
        if mode == "retract":
            for request in reversed(list(self._running.values())):
                self._requeue(request)
            self._running.clear()
            self._ends.clear()


class _Answer:
    """HTTP response with the interface of aiohttp's ClientResponse that EngineClient uses."""

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
    """HTTP session with the interface of aiohttp's ClientSession that EngineClient uses, for simulated engines."""

    def __init__(self, engines: list[SimulatedEngine]) -> None:
        self._engines = {engine.url: engine for engine in engines}

    def request(self, method: str, url: str, *, json: dict[str, Any] | None = None, **_: Any) -> Any:
        return self._send(url, json or {})

    @asynccontextmanager
    async def _send(self, url: str, body: dict[str, Any]) -> AsyncIterator[_Answer]:
        """Send a request to the engine at `url`; yield the response."""
        parts = urlsplit(url)
        engine = self._engines[f"{parts.scheme}://{parts.netloc}"]
        await asyncio.sleep(_ANSWER_SECONDS)
        if body.get("stream"):
            yield _Answer(engine.stream(body))
        else:
            yield _Answer(_single_chunk(await engine.answer(url.removeprefix(engine.url), body)))


async def _single_chunk(text: str) -> AsyncIterator[bytes]:
    """Yield a text as the only chunk of a response."""
    yield text.encode()
