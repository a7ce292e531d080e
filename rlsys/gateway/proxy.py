"""One HTTP request through to an engine and back, over interruptions and engine deaths.

A request comes here checked, with a seed for each response (requests.py). An answer's bytes pass as they are, but
where it is one of several choices (choices.py) or was interrupted. Then

    /generate, one plain prompt   goes on from its tokens (stitch.py)
    anything else                 is made again with the same seed; what the client of a stream has is skipped

A request under which DEATHS_POISONOUS engines have died is sent to no further one, also when its client sends it
again. What an engine refuses (4xx) is asked of no other.

Only engines that are deterministic make the same again. To others a seed says nothing: a stream then ends with an
error where the two differ, and a whole answer is another one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from rlsys.engine.sse import END, events
from rlsys.engine.wire import DeadEngine, EngineError
from rlsys.engine_requests import DEATHS_POISONOUS, RefusedPrompt, short
from rlsys.gateway import stitch
from rlsys.gateway.choices import DONE, Choices, Sink
from rlsys.gateway.skip import Broken, parse, skipper
from rlsys.router.dispatch import Dispatcher
from rlsys.router.engine_state import EngineState, Flight
from rlsys.router.failure_policy import HTTP_FAILURES, SERVER_FAULT, PoisonRequest, RequestEnd, attempt
from rlsys.router.strategy import RoutingRequest

KEYS_KEPT = 65536
KEY_CHARACTERS = 512
OK = 200
JSON = "application/json"
READER_SECONDS = 60.0
"""A client that takes nothing for so long is gone."""
MOST_SUSPECTS = 4096
"""Requests under which engines died, that are remembered."""
SUSPECT_SECONDS = 600.0
"""For so long after the last death: a client may send the same request again."""
ALONE_SECONDS = 0.5
"""For so long a request under which an engine died is the only such one in any engine: most that kill do so at once.
Longer would hold up what ran beside it, and is tried again as well."""
_GRAMMAR_FAULT = b"Grammar accept_token failed"
"""In SGLang's 500 for a grammar that no text satisfies."""
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "response_format", "tools")
_ABORTED = b'"abort"'
_CALLS = b'"tool_calls":['


class Unread(Exception):
    """The client does not read its answer."""


class Unavailable(Exception):
    """No engine could serve it; the message says why."""


@dataclass
class Job:
    """One client's request. `made`: /generate's answer so far, when it was interrupted; `sent`: events that the
    client has; `failures`: engines that answered it with a server error.
    """

    path: str
    body: dict[str, Any]
    raw: bytes
    key: str
    stream: bool
    sent: list[bytes] = field(default_factory=list)
    made: dict[str, Any] | None = None
    prompt: list[int] = field(default_factory=list)
    failures: int = 0
    identity: bytes = b""
    """Equal for a request that its client sends again."""
    suspects: list[EngineState] = field(default_factory=list)
    """Engines that answered 500 and above: they are at fault, or the request is."""

    @classmethod
    def of(cls, path: str, body: dict[str, Any]) -> Job:
        return cls(path, body, msgspec.json.encode(body), affinity_key(body), body.get("stream") is True)

    @property
    def text(self) -> str:
        """For a message: the API and the beginning of the prompt."""
        return f"{self.path} {short(self.key)}"


def affinity_key(body: dict[str, Any]) -> str:
    """Requests that begin alike, or say that they belong together, share an engine's cache."""
    for name in ("session_id", "routing_key", "conversation_id"):
        if isinstance(body.get(name), str):
            return str(body[name])
    begin = body.get("input_ids") or body.get("text") or body.get("messages") or body.get("prompt")
    return str(begin[:KEY_CHARACTERS] if isinstance(begin, str | list) else begin)[:KEY_CHARACTERS]


class Reply:
    """What goes to the client: a whole answer, or a stream that begins with its first event."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._stream: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        return self._stream is not None

    async def write(self, event: bytes) -> None:
        """Raises Unread when the client takes nothing for READER_SECONDS."""
        deadline = asyncio.timeout(READER_SECONDS)
        try:
            async with deadline:
                await self._write(event)
        except TimeoutError:
            if deadline.expired():
                raise Unread from None
            raise

    async def _write(self, event: bytes) -> None:
        if self._stream is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            self._stream = web.StreamResponse(headers=headers)
            await self._stream.prepare(self._request)
        await self._stream.write(event + END)

    async def end(self) -> web.StreamResponse:
        assert self._stream is not None
        await self._stream.write_eof()
        return self._stream

    def drop(self) -> web.StreamResponse:
        """Close the connection in the middle: who does not read would not read an end either."""
        assert self._stream is not None
        if self._request.transport is not None:
            self._request.transport.abort()
        return self._stream

    def whole(self, body: bytes, status: int, kind: str) -> web.Response:
        """Raises Broken when a stream has begun already."""
        if self.begun:
            raise Broken(f"the engine refused to go on: {status} {body[:200].decode(errors='replace')}")
        return web.Response(body=body, status=status, headers={"Content-Type": kind})


class Deaths:
    """Owns which engines died under which request, for SUSPECT_SECONDS after the last death. Each death counts once,
    however many equal requests the engine had."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: OrderedDict[bytes, tuple[set[tuple[str, int]], float]] = OrderedDict()

    def of(self, identity: bytes) -> int:
        deaths, last = self._of.get(identity, (set(), 0.0))
        return len(deaths) if self._clock() - last < SUSPECT_SECONDS else 0

    def add(self, identity: bytes, engine: EngineState) -> None:
        """`engine`: that has just died, or was found dead."""
        before = self._of[identity][0] if self.of(identity) else set()
        self._of[identity] = before | {(engine.url, engine.deaths)}, self._clock()
        self._of.move_to_end(identity)
        if len(self._of) > MOST_SUSPECTS:
            self._of.popitem(last=False)

    def clear(self, identity: bytes) -> None:
        """An engine has answered it."""
        self._of.pop(identity, None)


class Proxy:
    """Owns which engine a key went to last. `incremental`: engines' streams bring new tokens only. `stop_ids`: tokens
    that end a response.
    """

    def __init__(self, dispatcher: Dispatcher, queue_seconds: float) -> None:
        self._dispatcher = dispatcher
        self._queue_seconds = queue_seconds
        self._engine_of: OrderedDict[str, str] = OrderedDict()
        self._order = itertools.count()
        self.incremental = True
        self.stop_ids: Collection[int] = ()
        self.counts = {"continued": 0, "repeated": 0, "broken": 0}
        self.poisonous = 0
        self._deaths, self._suspect = Deaths(), asyncio.Lock()

    async def run(self, jobs: Sequence[Job], request: web.Request, responses: int = 1) -> web.StreamResponse:
        """The engines' answer: of one request, or of several as one, `responses` in a row to the same prompt. Raises
        Unavailable, PoisonRequest and RefusedPrompt before the answer has begun."""
        reply = Reply(request)
        if len(jobs) == 1:
            return await self._run(jobs[0], reply)
        choices = Choices(reply, responses)
        tasks = [asyncio.create_task(self._run(job, choices.sink(i))) for i, job in enumerate(jobs)]
        try:
            answers = await asyncio.gather(*tasks)
            if reply.begun:
                return await choices.end()
            return choices.whole([a for a in answers if isinstance(a, web.Response)])
        except Unread:
            return reply.drop()
        except (Unavailable, PoisonRequest, RefusedPrompt) as e:
            if not reply.begun:
                raise
            return await _end_with(reply, e)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: Job, reply: Sink) -> web.StreamResponse:
        try:
            while True:
                self._check_deaths(job)
                async with self._alone(job) as admitted:
                    engine = await self._admit(job)
                    admitted()
                    done = await self._attempt(job, reply, engine)
                if done is not None:
                    return done
                await self._prepare(job)
                if job.made is not None:
                    reason = stitch.finished(job.body, job.made["output_ids"], self.stop_ids)
                    if reason is not None:
                        return await self._finish_here(job, reply, reason)
        except Unread:
            self.counts["broken"] += 1
            return reply.drop()
        except (Broken, Unavailable, PoisonRequest, RefusedPrompt) as e:
            if not reply.begun:
                if isinstance(e, Broken):
                    raise Unavailable(str(e)) from None
                raise
            self.counts["broken"] += 1
            return await _end_with(reply, e)

    @asynccontextmanager
    async def _alone(self, job: Job) -> AsyncIterator[Callable[[], None]]:
        """While this one, under which an engine died, is tried: to its end, or ALONE_SECONDS after the call of what
        is yielded. Others do not wait. Raises Unavailable."""
        if not self._deaths.of(job.identity):
            yield lambda: None
            return
        try:
            await asyncio.wait_for(self._suspect.acquire(), self._queue_seconds)
        except TimeoutError:
            raise Unavailable(f"no engine could take the request within {self._queue_seconds:g} s") from None
        held, timer = True, None

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._suspect.release()

        def admitted() -> None:
            nonlocal timer
            timer = asyncio.get_running_loop().call_later(ALONE_SECONDS, release)

        try:
            yield admitted
        finally:
            if timer is not None:
                timer.cancel()
            release()

    def _check_deaths(self, job: Job) -> None:
        """Raises PoisonRequest."""
        if (deaths := self._deaths.of(job.identity)) >= DEATHS_POISONOUS:
            self.poisonous += 1
            raise PoisonRequest(
                f"{job.text}: refused: {deaths} engines died while they worked on this request; it is tried again "
                f"after {SUSPECT_SECONDS:g} s"
            )

    async def _attempt(self, job: Job, reply: Sink, engine: EngineState) -> web.StreamResponse | None:
        """None when it was interrupted, or its engine failed: what came is in the job."""
        before = self._dispatcher.interrupts
        flight = Flight(f"http-{next(self._order)}", None, asyncio.timeout(None))
        async with (
            attempt(self._dispatcher, engine, flight, len(job.raw) // 4, job.path) as made,
            engine.client.open(job.path, self._body(job)) as answer,
        ):
            if answer.status >= SERVER_FAULT:
                await self._check_grammar(job, answer)
            if answer.status >= SERVER_FAULT and job.failures < HTTP_FAILURES:
                raise EngineError(f"{engine.url}{job.path}: {answer.status}", answer.status)
            if answer.status < SERVER_FAULT:
                self._blame(job, engine)
            if job.stream and answer.status == OK:
                ended = await self._relay(job, reply, answer, before, flight)
                if ended is not None:
                    self._deaths.clear(job.identity)
                return ended
            whole = await self._whole(job, answer)
            if self._dispatcher.interrupts != before and self._interrupted(job, whole):
                return None
            self._deaths.clear(job.identity)
            return reply.whole(whole, answer.status, answer.headers.get("Content-Type", JSON))
        if made.end is RequestEnd.FAULT:
            job.failures += 1
            job.suspects.append(engine)
        elif made.end is RequestEnd.DEATH:
            self._deaths.add(job.identity, engine)
        return None

    @staticmethod
    async def _check_grammar(job: Job, answer: Any) -> None:
        """Raises RefusedPrompt for a grammar that no text satisfies: no engine can answer it."""
        if _GRAMMAR_FAULT in await answer.read():
            sampling = job.body.get("sampling_params")
            params = sampling if isinstance(sampling, dict) else {}
            name = next((g for g in _GRAMMARS if params.get(g) or job.body.get(g)), "the grammar")
            raise RefusedPrompt(f"{name}: no text satisfies it", name)

    def _blame(self, job: Job, engine: EngineState) -> None:
        """This engine can answer the request, so those that could not are at fault; a request that none can answer
        costs no engine its place."""
        for suspect in job.suspects:
            if suspect is not engine:
                suspect.record_failure()
        job.suspects.clear()
        engine.breaker.record_success()

    async def _relay(
        self, job: Job, reply: Sink, answer: Any, before: int, flight: Flight
    ) -> web.StreamResponse | None:
        """A stream to the client. None when it was cut short."""
        async with aclosing(self._stream(job, answer.content.iter_any(), before)) as stream:
            async for event in stream:
                job.sent.append(event)
                flight.blocked = True  # until it is written
                await reply.write(event)
                flight.blocked = False
        return await reply.end() if job.sent and job.sent[-1].startswith(DONE) else None

    async def _finish_here(self, job: Job, reply: Sink, reason: dict[str, Any]) -> web.StreamResponse:
        """The token that an aborted request made last was the one that ended it."""
        assert job.made is not None
        answer = {**job.made, "meta_info": {**job.made["meta_info"], "finish_reason": reason}}
        if not job.stream:
            return reply.whole(msgspec.json.encode(answer), OK, JSON)
        if self.incremental:
            meta = {k: v for k, v in answer["meta_info"].items() if k not in stitch.PER_TOKEN}
            answer |= {"text": "", "output_ids": [], "meta_info": meta}
        await reply.write(b"data: " + msgspec.json.encode(answer))
        await reply.write(DONE)
        return await reply.end()

    async def _admit(self, job: Job) -> EngineState:
        try:
            async with asyncio.timeout(self._queue_seconds):
                place = next(self._order)
                engine = await self._dispatcher.admit(
                    lambda: (place,),
                    lambda: RoutingRequest(
                        self._engine_of.get(job.key),
                        key=zlib.crc32(job.key.encode()),
                        avoid=frozenset(e.url for e in job.suspects),
                    ),
                )
        except TimeoutError:
            raise Unavailable(f"no engine could take the request within {self._queue_seconds:g} s") from None
        self._engine_of[job.key] = engine.url
        self._engine_of.move_to_end(job.key)
        if len(self._engine_of) > KEYS_KEPT:
            self._engine_of.popitem(last=False)
        return engine

    def _body(self, job: Job) -> bytes:
        if job.made is None:
            return job.raw
        return msgspec.json.encode(stitch.continuation(job.body, job.prompt, job.made["output_ids"]))

    # -- whole answers ------------------------------------------------------------------------------------------

    async def _whole(self, job: Job, answer: Any) -> bytes:
        """The answer's bytes, joined with what was made before."""
        body: bytes = await answer.read()
        if job.made is None or answer.status != OK:
            return body
        joined = stitch.join(job.made, msgspec.json.decode(body), incremental=False)
        return msgspec.json.encode(joined)

    def _interrupted(self, job: Job, body: bytes) -> bool:
        """Whether an abort of ours ended it; what it has is kept."""
        if _ABORTED not in body:
            return False
        answer = msgspec.json.decode(body)
        parts = answer if isinstance(answer, list) else [answer]
        if not any(isinstance(a, dict) and stitch.was_aborted(a) for a in parts):
            return False
        if isinstance(answer, dict) and self._goes_on(job):
            self._keep(job, answer)
        return True

    def _keep(self, job: Job, answer: dict[str, Any]) -> None:
        """One that was aborted in the queue has nothing to go on from."""
        if answer["meta_info"].get("prompt_tokens") and answer.get("output_ids"):
            job.made = answer

    # -- streams ------------------------------------------------------------------------------------------------

    async def _stream(self, job: Job, pieces: Any, before: int) -> AsyncGenerator[bytes, None]:
        """Events for the client: all but those that our abort has made."""
        held = b""  # of a tool call, while an abort is due
        behind = None
        if job.sent and job.made is None:
            behind = skipper(job.path, job.sent, incremental=self.incremental)
        async for event in events(pieces):
            interrupted = self._dispatcher.interrupts != before
            if _ABORTED in event and interrupted and stitch.was_aborted(parse(event)):
                chunk = parse(event)
                if self._goes_on(job) and chunk["meta_info"].get("prompt_tokens"):
                    if job.made is not None:
                        chunk = stitch.join(job.made, chunk, incremental=self.incremental)
                    chunk["meta_info"]["finish_reason"] = None
                    yield b"data: " + msgspec.json.encode(chunk)
                return  # without `held`: SGLang writes an end to the arguments of a call that it aborts
            if held:
                yield held
                held = b""
            if job.made is not None and event.startswith(b"data: {"):
                chunk = stitch.join(job.made, parse(event), incremental=self.incremental)
                event = b"data: " + msgspec.json.encode(chunk)
            elif behind is not None:
                event = behind.skip(event)
                if not event:
                    continue
            if interrupted and _CALLS in event:
                held = event
                continue
            yield event
        if held:
            yield held

    def _goes_on(self, job: Job) -> bool:
        return job.path == "/generate" and stitch.can_go_on(job.body)

    async def _prepare(self, job: Job) -> None:
        """For the next attempt: gather what the client of a stream has, and the prompt's ids."""
        if self._goes_on(job):
            chunks = [parse(e) for e in job.sent if e.startswith(b"data: {")]
            if job.stream and chunks:
                job.made = stitch.gather(chunks, incremental=self.incremental)
            if job.made is not None and not job.prompt:
                job.prompt = await self._prompt_ids(job)
        self.counts["continued" if job.made is not None else "repeated"] += 1

    async def _prompt_ids(self, job: Job) -> list[int]:
        if isinstance(job.body.get("input_ids"), list):
            ids: list[int] = job.body["input_ids"]
            return ids
        while True:
            engine = await self._admit(job)
            try:
                return await engine.client.tokenize(job.body["text"])
            except (*DeadEngine, EngineError):
                engine.mark_dead()


async def _end_with(reply: Sink, error: Exception) -> web.StreamResponse:
    """The end of a stream that cannot go on."""
    status = 422 if isinstance(error, PoisonRequest) else 400 if isinstance(error, RefusedPrompt) else 503
    await reply.write(b"data: " + error_body(status, str(error)))
    return await reply.end()


def error_body(status: int, message: str) -> bytes:
    """As OpenAI's clients and SGLang's expect it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})
