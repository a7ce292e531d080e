"""Feeder of the next host of a chain: sends pieces, a few concurrently, while more of them arrive.

A host that is unreachable, refuses, or is silent for too long is skipped; the feeder then asks the next host for its
missing pieces and sends those. So each feeder serves one host, the first of its line that accepts pieces, and that
host has its own feeder for the following ones.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from rlsys.weights_relay.pieces import Payload, Piece, encode
from rlsys.weights_relay.store import Store, Undeclared

WINDOW = 4
"""Number of pieces in flight to one host, which keeps the link busy while the host decodes a piece."""
MAX_QUEUED_BYTES = 16 * WINDOW * 2**20
"""Maximum bytes of queued payloads. Further pieces are encoded again from the store when they are sent."""
TRIES = 4
"""Number of attempts to send a piece; the second half sends it whole, in case the base content is wrong."""
PIECES_PER_OFFER = 4096
"""Number of pieces in one request for the missing pieces of a host."""
OFFER, PIECE = "/relay/offer", "/relay/piece"
TOKEN_HEADER, PIECE_HEADER, BASE_HEADER = "rlsys-relay-token", "rlsys-piece", "rlsys-before"
ACCEPTED, NEEDS_WHOLE, CORRUPTED = 200, 409, 422
"""Status of a piece: accepted; refused without its base content; arrived damaged."""
_BLOCK = 2**16

log = logging.getLogger("rlsys.weights_relay")


class Hop(NamedTuple):
    """Address of a host for its predecessor. `token`: authorises only the pieces of one push."""

    url: str
    token: str


class HostSkipped(Exception):
    """Reason why a host gets no more pieces."""


class Feeder:
    """Sender of pieces to the first host of a line: `enqueue` stored pieces, then `close`. Owns threads and queue."""

    def __init__(
        self,
        line: Sequence[Hop],
        store: Store,
        seconds: float,
        pieces: Sequence[Piece] = (),
        *,
        closed: bool = False,
    ) -> None:
        """Start the threads.

        Args:
            line: hosts in order.
            seconds: maximum silence of a host.
            pieces: initial pieces.
            closed: whether no more pieces follow.
        """
        self._line, self._store, self._seconds = line, store, seconds
        self._pieces = list(pieces)
        self._queue: deque[Piece] = deque()
        self._payloads: dict[Piece, Payload] = {}
        self._queued_bytes = 0  # bytes of payloads
        self._condition = threading.Condition()
        self._closed, self._done = closed, False
        self.skipped: dict[str, str] = {}
        """URL -> reason."""
        self.sent_bytes = 0
        """Bytes of payloads, repeated ones included."""
        threading.Thread(target=self._run, name="relay", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Return whether a host has all pieces, or all hosts were skipped."""
        return self._done

    def enqueue(self, piece: Piece, payload: Payload) -> None:
        """Queue a piece. Never waits; see wait_for_room."""
        with self._condition:
            if self._done:
                return
            self._pieces.append(piece)
            self._queue.append(piece)
            if self._queued_bytes + len(payload.data) <= MAX_QUEUED_BYTES:
                self._payloads[piece] = payload
                self._queued_bytes += len(payload.data)
            self._condition.notify_all()

    def wait_for_room(self) -> None:
        """Wait until the queue accepts another payload, or the feeder is done."""
        with self._condition:
            self._condition.wait_for(lambda: self._done or self._queued_bytes < MAX_QUEUED_BYTES // 2)

    def close(self) -> None:
        """Declare that no more pieces follow; queued ones are still sent."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def stop(self) -> None:
        """Stop immediately, because another push has started."""
        with self._condition:
            self._closed = self._done = True
            self._queue.clear()
            self._payloads.clear()
            self._condition.notify_all()

    def _run(self) -> None:
        try:
            for hop in self._line:
                try:
                    self._serve(hop)
                    break
                except HostSkipped as e:
                    if self._done:
                        break
                    log.warning("weight relay: %s is skipped: %s", hop.url, e)
                    self.skipped[hop.url] = str(e)
        finally:
            self.stop()

    def _serve(self, hop: Hop) -> None:
        """Send all pieces to a host until the feeder is closed. Raises HostSkipped."""
        with self._condition:
            pieces = list(self._pieces)
            self._queue.clear()  # they are among the pieces
        missing = self._missing(hop, pieces)
        with self._condition:
            self._queue.extendleft(reversed(missing))
            queued = set(self._queue)
            self._payloads = {piece: payload for piece, payload in self._payloads.items() if piece in queued}
            self._queued_bytes = sum(len(payload.data) for payload in self._payloads.values())
            self._condition.notify_all()
        failed, reasons = threading.Event(), list[str]()
        # Daemons, so that an engine's exit does not wait for a host that accepts nothing.
        workers = [
            threading.Thread(target=self._send_pieces, args=(hop, failed, reasons), name="relay", daemon=True)
            for _ in range(WINDOW)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failed.is_set():
            raise HostSkipped("; ".join(reasons[:1]) or "sending failed")

    def _missing(self, hop: Hop, pieces: Sequence[Piece]) -> list[Piece]:
        if not pieces:
            return []
        missing: list[Piece] = []
        with _Connection(hop, self._seconds) as connection:
            for first in range(0, len(pieces), PIECES_PER_OFFER):
                offered = pieces[first : first + PIECES_PER_OFFER]
                body = json.dumps([[piece.file, piece.index] for piece in offered]).encode()
                status, answer = connection.post(OFFER, {}, body)
                try:
                    if status != ACCEPTED:
                        raise HostSkipped(f"answers {status}: {answer[:200]!r}")
                    missing += [offered[i] for i in json.loads(answer)["missing"]]
                except (ValueError, TypeError, KeyError, IndexError):
                    raise HostSkipped(f"expected a relay's response, got {answer[:200]!r}") from None
        return missing

    def _send_pieces(self, hop: Hop, failed: threading.Event, reasons: list[str]) -> None:
        complete = False
        try:
            with _Connection(hop, self._seconds) as connection:
                while (turn := self._next(failed)) is not None:
                    self._send(connection, *turn)
            complete = True
        except HostSkipped as e:
            reasons.append(str(e))
        finally:  # the others stop when one fails
            with self._condition:
                if not complete:
                    failed.set()
                self._condition.notify_all()

    def _next(self, failed: threading.Event) -> tuple[Piece, Payload | None] | None:
        """Return the next piece; None: no more for this host."""
        with self._condition:
            self._condition.wait_for(lambda: self._queue or self._closed or failed.is_set())
            if failed.is_set() or not self._queue:
                return None
            piece = self._queue.popleft()
            payload = self._payloads.pop(piece, None)
            if payload is not None:
                self._queued_bytes -= len(payload.data)
                self._condition.notify_all()
            return piece, payload

    def _send(self, connection: _Connection, piece: Piece, payload: Payload | None) -> None:
        for attempt in range(TRIES):
            if payload is None or attempt >= TRIES // 2:
                try:
                    payload = encode(piece, self._store.content(piece), None, "")
                except Undeclared as e:
                    raise HostSkipped(str(e)) from None
            headers = {PIECE_HEADER: json.dumps([piece.file, piece.index]), BASE_HEADER: payload.base}
            status, answer = connection.post(PIECE, headers, payload.data)
            with self._condition:
                self.sent_bytes += len(payload.data)
            if status == ACCEPTED:
                return
            if status == NEEDS_WHOLE:
                payload = None
            elif status != CORRUPTED:
                raise HostSkipped(f"answers {status}: {answer[:200]!r}")
        raise HostSkipped(f"received piece {piece.index} of file {piece.file} damaged {TRIES} times")


class _Connection:
    """Persistent connection to one host. Requests raise HostSkipped if the host is unreachable or silent."""

    def __init__(self, hop: Hop, seconds: float) -> None:
        parts = urlsplit(hop.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._http = kind(parts.hostname or "", parts.port, timeout=seconds)
        self._headers = {TOKEN_HEADER: hop.token}

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def post(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Send a request; repeat it over a new connection if a kept one breaks, since servers close idle ones."""
        reused = self._http.sock is not None
        try:
            return self._post(path, headers, body)
        except TimeoutError as e:
            raise HostSkipped(f"silent: {e}") from None
        except (OSError, http.client.HTTPException) as e:
            self._http.close()
            if not reused:
                raise HostSkipped(f"gone: {e!r:.200}") from None
        try:
            return self._post(path, headers, body)
        except (OSError, http.client.HTTPException) as e:
            raise HostSkipped(f"gone: {e!r:.200}") from None

    def _post(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        length = {"Content-Length": str(len(body))}
        # In blocks, to each of which the time limit applies: a slow link must not count as a dead host.
        self._http.request("POST", path, _blocks(body), {**self._headers, **headers, **length})
        answer = self._http.getresponse()
        return answer.status, answer.read()


def _blocks(body: bytes) -> Iterator[memoryview]:
    view = memoryview(body)
    for start in range(0, len(body), _BLOCK):
        yield view[start : start + _BLOCK]
