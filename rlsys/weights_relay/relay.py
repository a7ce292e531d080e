"""Relay on a host of a chain: receives pieces of weights, verifies, stores and forwards them while more arrive.

    POST /relay/open     start a push: the sender's token, and the next hosts
    POST /relay/declare  declare sizes and digests of more files of the push
    POST /relay/renew    replace the sender's token
    POST /relay/state    return whether all pieces are stored, and their folder, for `update_weights_from_disk`
    POST /relay/feed     send all stored pieces to hosts that lost their predecessor
    POST /relay/offer    return which of these pieces are missing
    POST /relay/piece    receive one piece

It runs in the engine's own HTTP server (rlsys/engine/server.py). The trainer calls the first five itself, with the
engine's admin key, and subject to its fence. The last two require the token of the latest push; the trainer renews
it after the engine has loaded the weights, so that no host has a valid token. A host allocates memory and
descriptors only for declared files and writes only content with a declared digest, so the engine loads verified
content only.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import shutil
import tempfile
import threading
import weakref
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.weights_relay.feeder import (
    ACCEPTED,
    BASE_HEADER,
    CORRUPTED,
    NEEDS_WHOLE,
    OFFER,
    PIECE,
    PIECE_HEADER,
    PIECES_PER_OFFER,
    TOKEN_HEADER,
    Feeder,
    Hop,
)
from rlsys.weights_relay.pieces import (
    PIECE_BYTES,
    Damaged,
    FileSpec,
    Payload,
    Piece,
    decode,
    decode_locations,
)
from rlsys.weights_relay.store import Store, Undeclared

FORBIDDEN, BAD_REQUEST, TOO_LARGE = 403, 400, 413
MAX_BODY_BYTES = 2 * PIECE_BYTES
MAX_CONCURRENT_BODIES = 64
"""Bodies that are read at once."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass
class _Push:
    token: str
    seconds: float
    """Maximum silence of a sender."""
    onward: Feeder | None
    """Feeder of the next host."""
    helping: list[Feeder] = field(default_factory=list)
    """Feeders of hosts that lost their predecessor."""
    received: set[Piece] = field(default_factory=set)


class Relay:
    """Owner of the store, the folder with its files, and the current push. Thread-safe."""

    def __init__(self) -> None:
        self._store = Store()
        self._push: _Push | None = None
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self.damaged = 0
        """Number of damaged pieces since the start."""

    def open(self, token: str, line: Sequence[Hop], seconds: float) -> dict[str, Any]:
        """Start a push.

        Args:
            line: the next host, then its substitutes.
            seconds: maximum silence of each.
        """
        with self._lock:
            self._end()
            self._store.begin()
            self._push = _Push(token, seconds, Feeder(line, self._store, seconds) if line else None)
        return {"success": True}

    def declare(self, first: int, files: Sequence[FileSpec]) -> dict[str, Any]:
        """Declare the next files of the push. `first`: number of the first one.

        Raises:
            TooLarge: the files exceed the machine's resources.
        """
        with self._lock:
            if self._push is None:
                return {"success": False, "message": "no push was opened here"}
            if first != self._store.declared:
                message = f"file {first} is declared after {self._store.declared} files"
                return {"success": False, "message": message}
            self._store.declare(files)
        return {"success": True}

    def renew(self, token: str) -> dict[str, Any]:
        """Replace the token, so that holders of the old one can send no more pieces of this push."""
        with self._lock:
            if self._push is None:
                return {"success": False, "message": "no push was opened here"}
            self._push.token = token
        return {"success": True}

    def state(self, files: int) -> dict[str, Any]:
        """Return whether all pieces of the push are stored.

        Args:
            files: number of files of the push.

        Returns:
            `folder`: of the files, or None; `taken`: number of pieces received in this push.
        """
        with self._lock:
            push = self._push
            state = {
                "success": True,
                "taken": 0 if push is None else len(push.received),
                "damaged": self.damaged,
            }
            if push is None or self._store.declared != files or not self._store.is_complete():
                return {**state, "folder": None}
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="rlsys-relay-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            self._store.link(self._folder)
            return {**state, "folder": str(self._folder)}

    def feed(self, line: Sequence[Hop], seconds: float) -> dict[str, Any]:
        """Send the files to the first host of `line` that accepts them."""
        with self._lock:
            if self._push is None:
                return {"success": False, "message": "no push was opened here"}
            pieces = self._store.pieces()
            self._push.helping.append(Feeder(line, self._store, seconds, pieces, closed=True))
        return {"success": True}

    def admits(self, token: str) -> bool:
        """Return whether a token is that of the current push."""
        push = self._push
        return push is not None and hmac.compare_digest(token.encode(), push.token.encode())

    @property
    def silence(self) -> float:
        """Maximum seconds between two parts of a body."""
        return self._push.seconds if self._push is not None else 0.0

    def missing(self, locations: Sequence[tuple[int, int]]) -> list[int]:
        """Return the indices of those pieces in `locations` that are not stored.

        Raises:
            Undeclared: the push has no such piece.
        """
        pieces = [self._store.piece(*location) for location in locations]
        return [i for i, piece in enumerate(pieces) if self._store.current_digest(piece) != piece.digest]

    def take(self, token: str, location: tuple[int, int], payload: Payload) -> int:
        """Store a piece, and forward it to the next host.

        Returns:
            ACCEPTED, NEEDS_WHOLE, CORRUPTED or FORBIDDEN.

        Raises:
            Undeclared: the push has no such piece.
        """
        piece, content = self._store.piece(*location), None
        if (current := self._store.current_digest(piece)) != piece.digest:
            if payload.base and current != payload.base:
                return NEEDS_WHOLE
            try:
                content = decode(piece, payload, self._store.content(piece) if payload.base else None)
            except Damaged:
                self.damaged += 1
                return CORRUPTED
        with self._lock:
            push = self._push
            if push is None or not self.admits(token):  # another push has begun, or the token was renewed
                return FORBIDDEN
            if content is not None:
                self._store.write(piece, content)
            if piece not in push.received:
                push.received.add(piece)
                if push.onward is not None:
                    push.onward.enqueue(piece, payload)
        return ACCEPTED

    def _end(self) -> None:
        if self._push is not None:
            for feeder in (self._push.onward, *self._push.helping):
                if feeder is not None:
                    feeder.stop()


class RelayMiddleware:
    """ASGI middleware in front of an application and its key check: offers and pieces have their own token."""

    def __init__(self, app: App, relay: Relay) -> None:
        self._app, self._relay = app, relay
        self._bodies = asyncio.Semaphore(MAX_CONCURRENT_BODIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path not in (OFFER, PIECE):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        token = headers.get(TOKEN_HEADER, "")
        if scope["method"] != "POST" or not self._relay.admits(token):
            await _answer(send, FORBIDDEN, {"message": "the token belongs to no current push"}, close=True)
            return
        async with self._bodies:
            await self._take(path, token, headers, receive, send)

    async def _take(
        self, path: str, token: str, headers: dict[str, str], receive: Receive, send: Send
    ) -> None:
        if (body := await _read(receive, self._relay.silence)) is None:
            message = f"more than {MAX_BODY_BYTES} bytes, or none for {self._relay.silence:g} s"
            await _answer(send, TOO_LARGE, {"message": message}, close=True)
            return
        try:
            if path == OFFER:
                missing = self._relay.missing(decode_locations(json.loads(body)[:PIECES_PER_OFFER]))
                status, answer = ACCEPTED, dict[str, Any](missing=missing)
            else:
                (location,) = decode_locations([json.loads(headers.get(PIECE_HEADER, ""))])
                payload = Payload(headers.get(BASE_HEADER, ""), body)
                status, answer = await asyncio.to_thread(self._relay.take, token, location, payload), {}
        except (ValueError, TypeError, KeyError, RecursionError, Undeclared) as e:
            status, answer = BAD_REQUEST, {"message": f"not a piece: {e!r:.200}"}
        await _answer(send, status, answer)


async def _read(receive: Receive, seconds: float) -> bytes | None:
    """Return the body; None if it is too large, or the sender disconnects or is silent for `seconds`."""
    parts, size, incomplete = [], 0, True
    while incomplete:
        try:
            async with asyncio.timeout(seconds):
                message = await receive()
        except TimeoutError:
            return None
        if message["type"] != "http.request":  # the sender has gone
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            return None
        incomplete = message.get("more_body", False)
    return b"".join(parts)


async def _answer(send: Send, status: int, content: dict[str, Any], *, close: bool = False) -> None:
    """Send a JSON response. `close`: close the connection, because the body was not read."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
