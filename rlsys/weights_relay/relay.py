"""Relay on a host of a chain: receives, verifies, stores and forwards pieces of weights, all at the same time.

    POST /relay/open     start a push: the sender's token, and the next hosts
    POST /relay/declare  declare sizes and digests of more files of the push
    POST /relay/renew    replace the sender's token
    POST /relay/state    return whether all pieces are stored, and their folder, for `update_weights_from_disk`
    POST /relay/feed     send all stored pieces to hosts that lost their predecessor
    POST /relay/offer    return which of these pieces are missing
    POST /relay/piece    receive one piece

The relay runs in the engine's HTTP server (rlsys/engine/server.py). The trainer calls the first five routes; they
require the engine's admin key, and its fence checks them. The preceding host calls the last two, with the token of
the latest push. The trainer replaces the token after the engine has loaded the weights, so that no host has a valid
token. A host allocates memory and descriptors only for declared files, and stores only content with a declared
digest, so the engine loads only verified content.
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
"""Maximum number of request bodies that are read at the same time."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass
class _Push:
    """A push.

    Attributes:
        token: authorizes a sender to send pieces to this host.
        max_silence: maximum seconds between two parts of a body that a sender sends.
        feeder: sends the pieces to the next host; None for the last host of a chain.
        refeeders: send the pieces to hosts that lost their predecessor.
        received: pieces received in this push.
    """

    token: str
    max_silence: float
    feeder: Feeder | None
    refeeders: list[Feeder] = field(default_factory=list)
    received: set[Piece] = field(default_factory=set)


class Relay:
    """Owner of the store, the folder with links to its files, and the current push. Thread-safe.

    The methods for the trainer return the response: `success`, and if it is False, `message`.
    """

    def __init__(self) -> None:
        self._store = Store()
        self._push: _Push | None = None
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self.damaged = 0
        """Number of damaged pieces that this process has received."""

    def open(self, token: str, chain: Sequence[Hop], seconds: float) -> dict[str, Any]:
        """Start a push.

        Args:
            token: authorizes a sender to send pieces to this host.
            chain: the next host, then its substitutes; empty for the last host of a chain.
            seconds: maximum silence of a host.
        """
        with self._lock:
            self._stop_feeders()
            self._store.begin()
            self._push = _Push(token, seconds, Feeder(chain, self._store, seconds) if chain else None)
        return {"success": True}

    def declare(self, first: int, files: Sequence[FileSpec]) -> dict[str, Any]:
        """Declare the next files of the push.

        Args:
            first: index of the first of these files in the push.
            files: sizes and digests.

        Raises:
            TooLarge: the files exceed the machine's resources.
        """
        with self._lock:
            if self._push is None:
                return _no_push()
            if first != self._store.declared:
                message = f"first = {first}: expected {self._store.declared}, the number of declared files"
                return {"success": False, "message": message}
            self._store.declare(files)
        return {"success": True}

    def renew(self, token: str) -> dict[str, Any]:
        """Replace the token, so that this host refuses pieces from holders of the old token."""
        with self._lock:
            if self._push is None:
                return _no_push()
            self._push.token = token
        return {"success": True}

    def state(self, files: int) -> dict[str, Any]:
        """Return the progress of the push.

        Args:
            files: number of files of the push.

        Returns:
            folder: path of the folder with the files; None until all pieces are stored.
            taken: number of pieces received in this push.
            damaged: number of damaged pieces that this process has received.
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

    def feed(self, chain: Sequence[Hop], seconds: float) -> dict[str, Any]:
        """Send all stored pieces to the first host of `chain` that accepts them.

        Args:
            chain: the receiving host, then its substitutes.
            seconds: maximum silence of a host.
        """
        with self._lock:
            if self._push is None:
                return _no_push()
            pieces = self._store.pieces()
            self._push.refeeders.append(Feeder(chain, self._store, seconds, pieces, closed=True))
        return {"success": True}

    def accepts_token(self, token: str) -> bool:
        """Return whether `token` is the token of the current push."""
        push = self._push
        return push is not None and hmac.compare_digest(token.encode(), push.token.encode())

    @property
    def max_silence(self) -> float:
        """Maximum seconds between two parts of a body; 0 without a push."""
        return self._push.max_silence if self._push is not None else 0.0

    def missing(self, locations: Sequence[tuple[int, int]]) -> list[int]:
        """Return the indices in `locations` of the pieces that are not stored.

        Args:
            locations: (index of the file, index of the piece in the file) of each piece.

        Raises:
            Undeclared: the push has no such piece.
        """
        pieces = [self._store.piece(*location) for location in locations]
        return [i for i, piece in enumerate(pieces) if self._store.current_digest(piece) != piece.digest]

    def receive_piece(self, token: str, location: tuple[int, int], payload: Payload) -> int:
        """Store a piece, and forward it to the next host.

        Args:
            token: the sender's token.
            location: index of the file, and index of the piece in the file.
            payload: content of the piece, or its difference to the stored content.

        Returns:
            ACCEPTED, NEEDS_WHOLE, CORRUPTED or FORBIDDEN.

        Raises:
            Undeclared: the push has no such piece.
        """
        piece = self._store.piece(*location)
        content = None
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
            if push is None or not self.accepts_token(
                token
            ):  # meanwhile, a push began or the token was replaced
                return FORBIDDEN
            if content is not None:
                self._store.write(piece, content)
            if piece not in push.received:
                push.received.add(piece)
                if push.feeder is not None:
                    push.feeder.enqueue(piece, payload)
        return ACCEPTED

    def _stop_feeders(self) -> None:
        """Stop the feeders of the current push. The caller holds the lock."""
        if self._push is not None:
            for feeder in (self._push.feeder, *self._push.refeeders):
                if feeder is not None:
                    feeder.stop()


def _no_push() -> dict[str, Any]:
    """Return the response to a request that needs a push."""
    return {"success": False, "message": "no push is open; expected /relay/open first"}


class RelayMiddleware:
    """ASGI middleware that answers offers and pieces, and passes all other requests to the application.

    It is in front of the application's key check, because the sender of a piece has only the token of the push.
    """

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
        if scope["method"] != "POST" or not self._relay.accepts_token(token):
            message = f"{path}: expected a POST request with the token of the current push in {TOKEN_HEADER}"
            await _answer(send, FORBIDDEN, {"message": message}, close=True)
            return
        async with self._bodies:
            await self._respond(path, token, headers, receive, send)

    async def _respond(
        self, path: str, token: str, headers: dict[str, str], receive: Receive, send: Send
    ) -> None:
        """Read the body of an offer or a piece, and answer it."""
        if (body := await _read(receive, self._relay.max_silence)) is None:
            message = (
                f"{path}: the body is incomplete; expected at most {MAX_BODY_BYTES} bytes, and no pause of more than "
                f"{self._relay.max_silence:g} s"
            )
            await _answer(send, TOO_LARGE, {"message": message}, close=True)
            return
        try:
            if path == OFFER:
                missing = self._relay.missing(decode_locations(json.loads(body)[:PIECES_PER_OFFER]))
                status, answer = ACCEPTED, dict[str, Any](missing=missing)
            else:
                (location,) = decode_locations([json.loads(headers.get(PIECE_HEADER, ""))])
                payload = Payload(headers.get(BASE_HEADER, ""), body)
                status = await asyncio.to_thread(self._relay.receive_piece, token, location, payload)
                answer = {}
        except (ValueError, TypeError, KeyError, RecursionError, Undeclared) as e:
            status, answer = BAD_REQUEST, {"message": f"{path}: invalid request: {e!r:.200}"}
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
        if message["type"] != "http.request":  # the sender has disconnected
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            return None
        incomplete = message.get("more_body", False)
    return b"".join(parts)


async def _answer(send: Send, status: int, content: dict[str, Any], *, close: bool = False) -> None:
    """Send a JSON response. `close`: whether to close the connection, because the body was not read."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
