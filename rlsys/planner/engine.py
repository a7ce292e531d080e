"""SGLang's HTTP API over a continuous batch that is only timed, not computed: for the product's client and router.

As SGLang does, an engine reads waiting prompts before it decodes on, runs so many requests at once as it may, and
gives a request back with an abort, or keeps it through a pause. Tokens have no meaning; a response ends where its
sample's seed says. One unit of length stands for `grain` tokens, so that a long run stays small.
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
"""Ids of a response, and of its end."""
FIRST_PROMPT = 4
"""The id that prompt 0 begins with; that of prompt `i` is so much larger."""
_ANSWER_SECONDS = 0.001
_LOOK_UNITS = 64
"""Decoded at most before the cost of a pass is taken anew: the context grows meanwhile."""


@dataclass
class _Request:
    rid: str
    prompt: int
    """Units that it came with."""
    end: int
    """Units that it makes."""
    finish: dict[str, Any]
    """Why it ends there."""
    versions: list[str] = field(default_factory=list)
    """Of the weights that made each unit."""
    since: int | None = None
    """The engine's count of decoding passes when its prompt had been read; None: it waits, or is being read."""
    base: int = 0
    """Units that it had then, with the one that reading made."""
    began: asyncio.Event = field(default_factory=asyncio.Event)
    """Its prompt has been read, or it has ended."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    why: dict[str, Any] | None = None


class SimulatedEngine:
    """One server. `run` is its scheduler; `answer` and `stream` are its HTTP side."""

    def __init__(
        self,
        url: str,
        costs: Costs,
        length: Callable[[int, int], int],
        prompt: int,
        slots: int,
        room: int,
        grain: int,
        *,
        tells: bool = False,
    ) -> None:
        """`length`: units of a sample's response, by its seed and its prompt's number. `prompt`: units of every
        prompt. `slots`: requests that run at once. `room`: units that its cache holds. `tells`: a response's first
        token at once, from which the router learns how fast the engine is."""
        self.url = url
        self._costs, self._length, self._prompt = costs, length, prompt
        self._slots, self._room, self._grain, self._tells = slots, room, grain, tells
        self._canaries: list[tuple[int, asyncio.Event]] = []
        """Units of each that waits to be read."""
        self._waiting: deque[_Request] = deque()
        self._running: dict[str, _Request] = {}
        self._ends: list[tuple[int, int, str]] = []
        """Heap of (the decoding pass after which it is done, order, request)."""
        self._context = 0
        self._passes = 0
        self._order = 0
        self._changed = asyncio.Event()
        self._paused = ""
        self._version = "0"
        self._arriving: dict[str, _Request] = {}
        self._free = 0.0
        """When its server has taken in all that has come."""
        self._orders: deque[tuple[Callable[[], None], asyncio.Event]] = deque()
        """What is done between two passes."""
        self.generated = 0
        self.decoding = 0.0
        """Requests x seconds that decoded."""
        self.prefilling = 0.0
        """Seconds in which prompts were read."""

    # -- the scheduler --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            self._changed.clear()
            while self._orders:
                order, done = self._orders.popleft()
                order()
                done.set()
            if self._canaries:
                await self._read_canaries()
            elif self._paused:
                await self._changed.wait()
            elif fresh := self._admit():
                seconds = self._costs.prefill(self._grain * sum(r.prompt + len(r.versions) for r in fresh))
                self.prefilling += seconds
                await asyncio.sleep(seconds)  # who decodes waits meanwhile
                for request in fresh:
                    self._start(request)
                self._complete()
            elif self._running:
                await self._decode()
                self._complete()
            else:
                await self._changed.wait()

    async def _read_canaries(self) -> None:
        asked, self._canaries = self._canaries, []
        await asyncio.sleep(self._costs.prefill(self._grain * sum(units for units, _ in asked)))
        for _, done in asked:
            done.set()

    def _admit(self) -> list[_Request]:
        """As many as there is room for, in their order."""
        fresh = []
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting[0]
            needed = request.prompt + len(request.versions)
            if self._running and self._context + needed > self._room:
                break
            self._waiting.popleft()
            self._context += needed
            self._running[request.rid] = request
            fresh.append(request)
        return fresh

    def _start(self, request: _Request) -> None:
        """Its prompt has been read, which makes a first token."""
        request.base = len(request.versions) + 1
        request.since = self._passes
        request.began.set()
        self._order += 1
        due = request.since + request.end - request.base
        heapq.heappush(self._ends, (due, self._order, request.rid))

    async def _decode(self) -> None:
        """Until the next response ends, the context has grown, or somebody comes or goes."""
        running = len(self._running)
        each = self._grain * self._costs.decode(running, self._grain * self._context)
        units = max(1, min(self._ends[0][0] - self._passes, _LOOK_UNITS))
        clock = asyncio.get_running_loop().time
        start = clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(units * each):
                await self._changed.wait()
        # Who comes in the middle of a pass waits for its end.
        done = min(units, int((clock() - start) / each) + 1)
        if (left := done * each - (clock() - start)) > 0:
            await asyncio.sleep(left)
        self._passes += done
        self._context += done * len(self._running)
        self.decoding += running * done * each

    def _complete(self) -> None:
        while self._ends and self._ends[0][0] <= self._passes:
            _, _, rid = heapq.heappop(self._ends)
            if (request := self._running.get(rid)) is not None and self._made(request) >= request.end:
                self._leave(request, request.finish)

    def _made(self, request: _Request) -> int:
        if request.since is None:
            return len(request.versions)
        return min(request.end, request.base + self._passes - request.since)

    def _write(self, request: _Request) -> None:
        """Note what it has made so far, by these weights."""
        request.versions += [self._version] * (self._made(request) - len(request.versions))

    def _leave(self, request: _Request, why: dict[str, Any]) -> None:
        self._write(request)
        self._context -= request.prompt + len(request.versions)
        del self._running[request.rid]
        self.generated += len(request.versions)
        self._end(request, why)

    def _end(self, request: _Request, why: dict[str, Any]) -> None:
        request.why = why
        request.began.set()
        request.ended.set()

    # -- HTTP -----------------------------------------------------------------------------------------------------

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """The chunks that a request is answered with: one when it ends, and where engines tell, its first token."""
        sampling, prompt = body["sampling_params"], body["input_ids"]
        made, budget = len(prompt) - self._prompt, sampling["max_new_tokens"]
        left = max(1, self._length(sampling["sampling_seed"], prompt[0] - FIRST_PROMPT) - made)
        finish = {"type": "stop", "matched": END} if left <= budget else {"type": "length", "length": budget}
        request = _Request(body["rid"], len(prompt), min(left, budget), finish)
        await self._take_in(request)
        told = 0
        if self._tells:
            await request.began.wait()
            if not request.ended.is_set():
                self._write(request)
                told = len(request.versions)
                yield self._chunk(request, 0, told)
        await request.ended.wait()
        yield self._chunk(request, told, len(request.versions))

    async def _take_in(self, request: _Request) -> None:
        now = asyncio.get_running_loop().time()
        self._free = max(now, self._free) + self._costs.request
        self._arriving[request.rid] = request
        try:
            async with asyncio.timeout_at(self._free):
                await request.ended.wait()  # aborted before it was in
        except TimeoutError:
            del self._arriving[request.rid]
            self._waiting.append(request)
            self._changed.set()

    def _chunk(self, request: _Request, start: int, end: int) -> bytes:
        """Its units from `start` to `end`, all that it has; with why it ended, once it has."""
        versions = request.versions[:end]
        ids = [TOKEN] * (end - start)
        if request.why is not None and request.why["type"] == "stop" and ids:
            ids[-1] = END
        meta: dict[str, Any] = {
            "finish_reason": request.why,
            "weight_version": versions[-1] if versions else self._version,
            "completion_tokens": end,
            "output_token_logprobs": [[-1.0, i, None] for i in ids],
        }
        if versions:  # one that was dropped from the queue says nothing of its prompt
            meta |= {"prompt_tokens": request.prompt, "cached_tokens": 0}
        if len(counts := Counter(versions)) > 1:
            meta["weight_versions"] = [
                {"version": v, "start": versions.index(v), "end": versions.index(v) + n}
                for v, n in counts.items()
            ]
        return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"

    async def answer(self, path: str, body: dict[str, Any]) -> str:
        """To a control request."""
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
                self._changed.set()
            case "/update_weight_version":
                await self._between_passes(lambda: self._rename(body["new_version"]))
            case "/generate":  # a canary
                self.generated += 1
                self._canaries.append((len(body["input_ids"]), done := asyncio.Event()))
                self._changed.set()
                await done.wait()
                scored = [[-1.0, i, None] for i in body["input_ids"]]
                return json.dumps(
                    {"meta_info": {"input_token_logprobs": scored, "weight_version": self._version}}
                )
        return json.dumps({"success": True})

    async def _between_passes(self, order: Callable[[], None]) -> None:
        done = asyncio.Event()
        self._orders.append((order, done))
        self._changed.set()
        await done.wait()

    def _rename(self, version: str) -> None:
        for request in self._running.values():
            self._write(request)
        self._version = version

    def _abort(self, rid: str | None) -> None:
        """One request, or all."""
        for request in [r for r in self._arriving.values() if rid is None or r.rid.startswith(rid)]:
            del self._arriving[request.rid]
            self._free -= self._costs.request
            self._end(request, {"type": "abort"})
        for request in [r for r in self._waiting if rid is None or r.rid.startswith(rid)]:
            self._waiting.remove(request)
            self.generated += len(request.versions)
            self._end(request, {"type": "abort"})
        for request in [r for r in self._running.values() if rid is None or r.rid.startswith(rid)]:
            self._leave(request, {"type": "abort"})

    def _pause(self, mode: str) -> None:
        """`retract`: what runs goes back into the queue, and is read again when it goes on."""
        self._paused = mode
        if mode == "retract":
            for request in reversed(list(self._running.values())):
                self._write(request)
                self._context -= request.prompt + len(request.versions)
                request.since = None
                self._waiting.appendleft(request)
            self._running.clear()
            self._ends.clear()


class _Answer:
    """What aiohttp gives for a response."""

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


class Wire:
    """In the place of aiohttp's session, between EngineClient and simulated engines."""

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
            yield _Answer(_one(await engine.answer(url.removeprefix(engine.url), body)))


async def _one(text: str) -> AsyncIterator[bytes]:
    yield text.encode()
