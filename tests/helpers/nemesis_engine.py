"""A scripted engine as a process on virtual wires, and a fake of aiohttp's session for engine clients."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_reqrep import ConnectionKey

from rlsys.config import Config
from rlsys.core.identity import Identity
from rlsys.core.types import Prompt
from rlsys.ledger.buffer import RolloutBuffer
from tests.helpers.history import History, RequestRecord
from tests.helpers.scripted_engine import Request, ScriptedEngine, logprob
from tests.helpers.virtual_processes import (
    Connection,
    Process,
    Refused,
    Reset,
    Wires,
    current_process,
    lines,
)

INITIAL = 0
"""State of the weights before the first step."""
BUCKETS = 3
"""Number of buckets of a push."""


def weights_state(*parts: object) -> int:
    """Return a state of the weights: a hash of `parts`."""
    return 1 + int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") % 999_983


class NemesisEngine(ScriptedEngine):
    """A scripted engine that loads a push in buckets. Buckets of different pushes result in a state of their own."""

    def __init__(self, url: str, identity: Identity, poison: int | None) -> None:
        """Set up the engine.

        Args:
            url: URL of the engine.
            identity: its key and label; requests without the key are refused.
            poison: seed of a sample that kills the engine; None: no such sample.
        """
        self._poison = poison
        self._identity = identity
        self.drops_tensors = False
        """Whether the engine reports success for tensors without loading them."""
        self.process: Process | None = None
        self.poison_deaths = 0
        """Number of deaths that the poison sample caused."""
        self.corruption_rng: random.Random | None = None
        """Generator of corrupted responses; None: responses are valid."""
        super().__init__(url, ends_at=lambda seed: 10 + seed % 100, label=identity.label(0))

    def _boot(self) -> None:
        super()._boot()
        self._buckets = [INITIAL] * BUCKETS
        self.weights = INITIAL

    def start(self) -> None:
        self.restart()
        self.corruption_rng, self.drops_tensors = None, False
        self.process = Process("engine", self._on_exit)

    def _on_exit(self, _: Process) -> None:
        self.die()
        self.process = None

    def _health(self, _: dict[str, Any]) -> tuple[int, str]:
        return 200, ""

    def _tensors(self, body: dict[str, Any]) -> tuple[int, str]:
        if not self.update_open:
            return 400, json.dumps({"success": False, "message": "no weight-update session is open"})
        if not self.drops_tensors:
            self._buckets[body["bucket"]] = body["weights"]
        is_uniform = len(set(self._buckets)) == 1
        self.weights = self._buckets[0] if is_uniform else weights_state(*self._buckets)
        return 200, json.dumps({"success": True, "message": ""})

    async def serve(
        self, connection: Connection, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> None:
        """Answer a request in the engine's process: send status and text, or status and the lines of a stream."""
        key = self._identity.headers(path).get("Authorization")
        # `headers` may have others, such as the epoch of a push.
        if path != "/health" and headers.get("Authorization") != key:
            connection.send((401, "Unauthorized"))
            return
        if not body.get("stream"):
            status, text = await self.answer(path, body)
            connection.send(self._corrupt_response(status, text))
            return
        connection.send((200, ""))
        stream, clean = self.stream(body), True
        try:
            async for line in stream:
                if body["sampling_params"]["sampling_seed"] == self._poison and self.process is not None:
                    self.poison_deaths += 1
                    self.process.end("poison")
                    return
                request = (
                    self.history[-1]
                    if self.history[-1].rid == body["rid"]
                    else self._find_request(body["rid"])
                )
                delivered_line = self._corrupt_chunk(line)
                clean = clean and delivered_line == line
                connection.send((delivered_line, request, request.sent if clean else 0))
            connection.send(None)
        finally:
            await stream.aclose()

    def _find_request(self, rid: str) -> Request:
        return next(r for r in reversed(self.history) if r.rid == rid)

    def _corrupt_response(self, status: int, text: str) -> tuple[int, str]:
        if self.corruption_rng is None:
            return status, text
        return self.corruption_rng.choice([
            (status, text), (500, "Internal Server Error"), (200, "<html>"), (200, "[]"), (200, "{}"), (302, ""),
            (200, '{"weight_version": null, "ranks": 3, "meta_info": {}, "success": true}'),
            (200, "sglang:generation_tokens_total many\n"),
        ])  # fmt: skip

    def _corrupt_chunk(self, line: bytes) -> bytes:
        if self.corruption_rng is None or not line.startswith(b"data: {"):
            return line
        chunk = json.loads(line[6:])
        kind = self.corruption_rng.choice(
            ["none", "cut", "no meta", "fewer", "more", "words", "error", "version"]
        )
        meta = chunk["meta_info"]
        if kind == "cut":
            return line[: len(line) // 2] + b"\n"
        if kind == "no meta":
            del chunk["meta_info"]
        elif kind == "fewer":
            meta["output_token_logprobs"] = meta["output_token_logprobs"][1:]
        elif kind == "more":
            chunk["output_ids"] = chunk["output_ids"] + [10**9]
        elif kind == "words":
            chunk["output_ids"] = ["a"] * len(chunk["output_ids"])
        elif kind == "error":
            chunk = {"error": {"message": "out of memory", "code": 503}}
        elif kind == "version":
            meta["weight_version"] = "foreign"
        return b"data: " + json.dumps(chunk).encode() + b"\n"

    def request_records(self) -> list[RequestRecord]:
        return [
            RequestRecord(
                self.url, r.rid, r.ids, r.output_ids,
                [logprob(r.seed, len(r.ids) + i, w) for i, w in enumerate(r.weights)],
                r.weights, r.delivered, r.died,
            )
            for r in self.history
        ]  # fmt: skip


@dataclass
class RunEnvironment:
    """The state that all launches of a run share: folder, wires, disk, checkpoints and logs."""

    config: Config
    steps: int
    poison: int | None = None
    """Seed of the sample that kills engines; None: no such sample."""
    wires: Wires = field(default_factory=Wires)
    engines: dict[str, NemesisEngine] = field(default_factory=dict)
    history: History = field(default_factory=lambda: History(INITIAL))
    checkpoints: dict[int, int] = field(default_factory=dict)
    """Step -> state of the weights."""
    disk_full: bool = False
    done: bool = False
    handler_error: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def newest_checkpoint(self) -> tuple[int, int]:
        return max(self.checkpoints.items(), default=(0, INITIAL))

    async def reward(self, prompt: Prompt, text: str) -> float:
        await asyncio.sleep(0.02)
        return float(len(text) % 2)

    def limit_disk(self, buffer: RolloutBuffer) -> None:
        """Stop the growth of the database while the disk is full. SQLite's page limit replaces the disk's."""
        if self.disk_full:
            pages = buffer.read(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
            buffer.read(lambda db: db.execute(f"PRAGMA max_page_count={pages}"))

    def report_handler_error(self, task: asyncio.Task[Any]) -> None:
        """Record the first exception of a request handler; it fails the test."""
        if not task.cancelled() and (error := task.exception()) is not None and not self.handler_error.done():
            self.handler_error.set_exception(error)


class _Response:
    def __init__(self, status: int, text: str, stream: AsyncIterator[bytes] | None = None) -> None:
        self.status = status
        self._text = text
        self.content = self
        self._stream = stream

    async def text(self) -> str:
        return self._text

    async def iter_any(self) -> AsyncIterator[bytes]:
        assert self._stream is not None
        async for line in self._stream:
            yield line


class EngineNetwork:
    """A fake of aiohttp's session that connects the current process to an engine."""

    def __init__(self, environment: RunEnvironment) -> None:
        self._environment = environment

    def request(
        self, method: str, url: str, *, json: dict[str, Any] | None = None,
        timeout: aiohttp.ClientTimeout | None = None, headers: dict[str, str] | None = None, allow_redirects: bool,
    ) -> Any:  # fmt: skip
        return self._send(url, json or {}, headers or {}, timeout.total if timeout else None)

    @asynccontextmanager
    async def _send(
        self, url: str, body: dict[str, Any], headers: dict[str, str], seconds: float | None
    ) -> AsyncIterator[_Response]:
        parts = urlsplit(url)
        engine = self._environment.engines[f"{parts.scheme}://{parts.netloc}"]
        async with asyncio.timeout(seconds):
            try:
                connection = await self._environment.wires.connect(current_process(), engine.process)
            except Refused as e:
                key = ConnectionKey(parts.hostname or "", parts.port, False, True, None, None, None)
                raise aiohttp.ClientConnectorError(key, e) from None
            assert engine.process is not None
            work = engine.serve(connection, url.removeprefix(engine.url), body, headers)
            connection.task = engine.process.spawn(work)
            connection.task.add_done_callback(self._environment.report_handler_error)
            try:
                status, text = await connection.read()
            except Reset:
                connection.close()
                raise aiohttp.ServerDisconnectedError() from None
            except asyncio.CancelledError:
                connection.close()
                raise
        try:
            yield _Response(status, text, _read_stream(connection))
        finally:
            connection.close()


async def _read_stream(connection: Connection) -> AsyncIterator[bytes]:
    """Yield the stream in chunks that do not end at line ends, and count the delivered tokens."""
    try:
        async for line, request, sent_count in lines(connection):
            yield line[:7]
            request.delivered = max(request.delivered, sent_count)
            yield line[7:] + b"\n"
    except Reset as e:
        raise aiohttp.ClientPayloadError(str(e)) from None
