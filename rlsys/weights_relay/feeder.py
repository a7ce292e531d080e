"""Feeder of the next host of a chain: sends pieces, a few concurrently, while more pieces arrive.

The feeder skips a host that is unreachable, refuses, or is silent for too long. It then requests the list of missing
pieces from the next host of the chain, and sends those pieces. So a feeder serves one host, the first that accepts
pieces, and that host's feeder serves the rest of the chain.
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
"""Number of pieces in flight to one host. The link stays busy while the host decodes a piece."""
MAX_QUEUED_BYTES = 16 * WINDOW * 2**20
"""Maximum bytes of queued payloads. A piece without a payload is encoded from the store when it is sent."""
MAX_ATTEMPTS = 4
"""Number of attempts to send a piece. The second half of them sends the whole content, in case the base is wrong."""
PIECES_PER_OFFER = 4096
"""Largest number of pieces in one offer, the request for the list of missing pieces."""
OFFER, PIECE = "/relay/offer", "/relay/piece"
TOKEN_HEADER, PIECE_HEADER, BASE_HEADER = "rlsys-relay-token", "rlsys-piece", "rlsys-before"
ACCEPTED, NEEDS_WHOLE, CORRUPTED = 200, 409, 422
"""HTTP status of a piece: stored; the host lacks the base of the difference; the content is damaged."""
_BLOCK_BYTES = 2**16

log = logging.getLogger("rlsys.weights_relay")


class Hop(NamedTuple):
    """A host of a chain.

    Attributes:
        url: URL of the host for its predecessor in the chain.
        token: authorizes the predecessor to send pieces of one push.
    """

    url: str
    token: str


class HostSkipped(Exception):
    """The host cannot receive pieces; the message says why."""


class Feeder:
    """Sends pieces to the first host of a chain that accepts them. Owns its threads and the queue.

    The user calls `enqueue` for each stored piece, then `close`.
    """

    def __init__(
        self,
        chain: Sequence[Hop],
        store: Store,
        seconds: float,
        pieces: Sequence[Piece] = (),
        *,
        closed: bool = False,
    ) -> None:
        """Start the threads.

        Args:
            chain: the next host, then its substitutes.
            store: contains all enqueued pieces.
            seconds: maximum silence of a host.
            pieces: pieces to send first.
            closed: whether no more pieces follow.
        """
        self._chain, self._store, self._seconds = chain, store, seconds
        self._pieces = list(pieces)
        """All pieces to send, also those that the host has."""
        self._queue: deque[Piece] = deque()
        self._payloads: dict[Piece, Payload] = {}
        """Payloads of some queued pieces."""
        self._queued_bytes = 0
        """Bytes of `_payloads`."""
        self._condition = threading.Condition()
        self._closed, self._done = closed, False
        self.skipped: dict[str, str] = {}
        """URL of each skipped host -> reason."""
        self.sent_bytes = 0
        """Bytes of all sent payloads, including repeated attempts."""
        threading.Thread(target=self._run, name="relay", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Return whether a host has all pieces, or all hosts were skipped."""
        return self._done

    def enqueue(self, piece: Piece, payload: Payload) -> None:
        """Queue a piece without waiting; `wait_for_room` limits the queue.

        Args:
            piece: the piece, which the store contains.
            payload: its content. It is dropped if the queue has MAX_QUEUED_BYTES.
        """
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
        """Wait until less than half of MAX_QUEUED_BYTES is queued, or the feeder is done."""
        with self._condition:
            self._condition.wait_for(lambda: self._done or self._queued_bytes < MAX_QUEUED_BYTES // 2)

    def close(self) -> None:
        """Declare that no more pieces follow. The feeder still sends the queued pieces."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def stop(self) -> None:
        """Stop without sending the queued pieces."""
        with self._condition:
            self._closed = self._done = True
            self._queue.clear()
            self._payloads.clear()
            self._condition.notify_all()

    def _run(self) -> None:
        """Serve the first host of the chain that accepts all pieces."""
        try:
            for hop in self._chain:
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
        """Send a host the pieces that it lacks, until the feeder is closed and the queue empty.

        Raises:
            HostSkipped: the host is unreachable, refuses or is silent.
        """
        self._queue_missing(hop)
        failed, reasons = threading.Event(), list[str]()
        # Daemon threads, so that an engine's exit does not wait for a host that accepts nothing.
        workers = [
            threading.Thread(target=self._send_pieces, args=(hop, failed, reasons), name="relay", daemon=True)
            for _ in range(WINDOW)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failed.is_set():
            raise HostSkipped(reasons[0] if reasons else "a thread failed, see the traceback above")

    def _queue_missing(self, hop: Hop) -> None:
        """Replace the queue by the pieces that a host lacks. Pieces that arrive meanwhile follow them.

        Raises:
            HostSkipped: the host is unreachable, refuses or is silent.
        """
        with self._condition:
            pieces = list(self._pieces)
            self._queue.clear()  # the queued pieces are among `pieces`
        missing = self._missing(hop, pieces)
        with self._condition:
            self._queue.extendleft(reversed(missing))
            queued = set(self._queue)
            self._payloads = {piece: payload for piece, payload in self._payloads.items() if piece in queued}
            self._queued_bytes = sum(len(payload.data) for payload in self._payloads.values())
            self._condition.notify_all()

    def _missing(self, hop: Hop, pieces: Sequence[Piece]) -> list[Piece]:
        """Request from a host which of `pieces` it lacks."""
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
                        raise HostSkipped(f"{OFFER}: HTTP status {status}: {answer[:200]!r}")
                    missing += [offered[i] for i in json.loads(answer)["missing"]]
                except (ValueError, TypeError, KeyError, IndexError):
                    raise HostSkipped(
                        f"{OFFER}: the response is {answer[:200]!r}; expected the indices of missing pieces"
                    ) from None
        return missing

    def _send_pieces(self, hop: Hop, failed: threading.Event, reasons: list[str]) -> None:
        """Send queued pieces to a host, in a thread. If this fails, stop the other threads of the host.

        Args:
            hop: the host.
            failed: set when a thread fails.
            reasons: a HostSkipped's message is added.
        """
        succeeded = False
        try:
            with _Connection(hop, self._seconds) as connection:
                while (queued := self._next(failed)) is not None:
                    self._send(connection, *queued)
            succeeded = True
        except HostSkipped as e:
            reasons.append(str(e))
        finally:
            with self._condition:
                if not succeeded:
                    failed.set()
                self._condition.notify_all()

    def _next(self, failed: threading.Event) -> tuple[Piece, Payload | None] | None:
        """Wait for the next queued piece; return it and its payload, if that is queued.

        Returns:
            None if the feeder is closed and the queue is empty, or `failed` is set.
        """
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
        """Send a piece until the host accepts it.

        Args:
            connection: connection to the host.
            piece: the piece.
            payload: content of the first attempt; None: the whole content.

        Raises:
            HostSkipped: the host refuses the piece, or MAX_ATTEMPTS attempts failed.
        """
        for attempt in range(MAX_ATTEMPTS):
            if payload is None or attempt >= MAX_ATTEMPTS // 2:
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
                raise HostSkipped(f"{PIECE}: HTTP status {status}: {answer[:200]!r}")
        raise HostSkipped(
            f"the host refused piece {piece.index} of file {piece.file} {MAX_ATTEMPTS} times, as damaged or because "
            "it lacks the base content"
        )


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
        """Send a request. If a reused connection breaks, because servers close idle ones, repeat it over a new one.

        Returns:
            status and body of the response.

        Raises:
            HostSkipped: the host is unreachable or silent.
        """
        reused = self._http.sock is not None
        try:
            return self._post(path, headers, body)
        except TimeoutError as e:
            raise HostSkipped(f"{path}: no response: {e}") from None
        except (OSError, http.client.HTTPException) as e:
            self._http.close()
            if not reused:
                raise HostSkipped(f"{path}: unreachable: {e!r:.200}") from None
        try:
            return self._post(path, headers, body)
        except (OSError, http.client.HTTPException) as e:
            raise HostSkipped(f"{path}: unreachable: {e!r:.200}") from None

    def _post(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Send a request once."""
        length = {"Content-Length": str(len(body))}
        # Send the body in blocks: the time limit applies to each, so a slow link does not count as a dead host.
        self._http.request("POST", path, _blocks(body), {**self._headers, **headers, **length})
        answer = self._http.getresponse()
        return answer.status, answer.read()


def _blocks(body: bytes) -> Iterator[memoryview]:
    """Yield the body in blocks of at most _BLOCK_BYTES."""
    view = memoryview(body)
    for start in range(0, len(body), _BLOCK_BYTES):
        yield view[start : start + _BLOCK_BYTES]
