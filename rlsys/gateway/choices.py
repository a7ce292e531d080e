"""Several requests to engines as one answer of OpenAI's form: choices in order, usage in sum.

A stream's events come as they are made, each with the number of its choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from rlsys.gateway.skip import Broken, parse

DONE = b"data: [DONE]"
_EVENT = b"data: {"


class Sink(Protocol):
    """What goes to the client: a whole answer, or a stream that begins with its first event."""

    @property
    def begun(self) -> bool: ...

    async def write(self, event: bytes) -> None: ...

    async def end(self) -> web.StreamResponse: ...

    def drop(self) -> web.StreamResponse: ...

    def whole(self, body: bytes, status: int, kind: str) -> web.Response: ...


class Choices:
    """Owns the one answer. `responses`: to each prompt."""

    def __init__(self, reply: Sink, responses: int) -> None:
        self.reply = reply
        self._responses = responses
        self._lock = asyncio.Lock()
        self._id: str | None = None
        self._usage: dict[int, dict[str, Any]] = {}

    def sink(self, number: int) -> Sink:
        return _Choice(self, number)

    async def write(self, number: int, event: bytes) -> None:
        """An event of one choice."""
        if not event.startswith(_EVENT):
            return  # its end is not that of all
        chunk = parse(event)
        if self._id is None:
            self._id = chunk.get("id")
        if "id" in chunk:
            chunk["id"] = self._id
        if chunk.get("usage") and not chunk.get("choices"):
            self._usage[number] = chunk
            return
        for choice in chunk.get("choices") or ():
            choice["index"] = number
        async with self._lock:
            await self.reply.write(b"data: " + msgspec.json.encode(chunk))

    async def end(self) -> web.StreamResponse:
        """Once all have ended."""
        if self._usage:
            last = {
                **self._usage[max(self._usage)],
                "usage": self._sum({i: c["usage"] for i, c in self._usage.items()}),
            }
            await self.reply.write(b"data: " + msgspec.json.encode(last))
        await self.reply.write(DONE)
        return await self.reply.end()

    def whole(self, answers: Sequence[web.Response]) -> web.Response:
        """The first one that is no success stands for all."""
        for answer in answers:
            if answer.status != 200:
                return answer
        parts = [msgspec.json.decode(bytes(a.body or b"")) for a in answers]  # type: ignore[arg-type]
        choices = [{**choice, "index": i} for i, part in enumerate(parts) for choice in part["choices"]]
        joined = {**parts[0], "choices": choices}
        if all(part.get("usage") for part in parts):
            joined["usage"] = self._sum({i: part["usage"] for i, part in enumerate(parts)})
        return self.reply.whole(msgspec.json.encode(joined), 200, "application/json")

    def _sum(self, usages: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """A prompt counts once, however many responses it has."""
        first = usages[min(usages)]
        prompt = sum(u.get("prompt_tokens") or 0 for i, u in usages.items() if i % self._responses == 0)
        made = sum(u.get("completion_tokens") or 0 for u in usages.values())
        total = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        if first.get("reasoning_tokens") is not None:
            total["reasoning_tokens"] = sum(u.get("reasoning_tokens") or 0 for u in usages.values())
        return {**first, **total}


class _Choice:
    """One choice's part. It begins and ends by itself; the stream of all ends with the last one."""

    def __init__(self, choices: Choices, number: int) -> None:
        self._choices, self._number = choices, number
        self.begun = False

    async def write(self, event: bytes) -> None:
        self.begun = True
        await self._choices.write(self._number, event)

    async def end(self) -> web.StreamResponse:
        return web.StreamResponse()

    def drop(self) -> web.StreamResponse:
        return self._choices.reply.drop() if self._choices.reply.begun else web.StreamResponse()

    def whole(self, body: bytes, status: int, kind: str) -> web.Response:
        """Raises Broken when a stream has begun already."""
        if self._choices.reply.begun:
            raise Broken(f"the engine refused to go on: {status} {body[:200].decode(errors='replace')}")
        return web.Response(body=body, status=status, headers={"Content-Type": kind})
