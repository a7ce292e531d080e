"""Gives pieces to the next host of a chain, a few at a time, while more of them come in.

A host that is gone, refuses, or stays silent for too long is passed by: the one after it is asked what it lacks, and
gets that. So each feeder makes sure of one host, the first of its line that takes pieces, and that one has a feeder
of its own for those behind it.
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
"""Pieces on their way to one host: while one is decoded there, others fill the link."""
MOST_WAITING = 16 * WINDOW * 2**20
"""Bytes of payloads that wait to be sent. Beyond them a piece is encoded again, from the store, in its turn."""
TRIES = 4
"""To bring one piece: the last two times whole, in case what it changes is what is wrong."""
OFFERED = 4096
"""Pieces in one question what a host lacks."""
OFFER, PIECE = "/relay/offer", "/relay/piece"
TOKEN_HEADER, PIECE_HEADER, BEFORE_HEADER = "rlsys-relay-token", "rlsys-piece", "rlsys-before"
TAKEN, WHOLE, AGAIN = 200, 409, 422
"""Answers to a piece: it is held now; the content that it changes is not; it came damaged."""
_BLOCK = 2**16

log = logging.getLogger("rlsys.weights_relay")


class Hop(NamedTuple):
    """A host as the one before it reaches it. `token`: lets bring it pieces of one push, and nothing else."""

    url: str
    token: str


class PassedBy(Exception):
    """Why a host gets no more."""


class Feeder:
    """Owns its threads and what waits to be sent. `put` pieces that the store holds, then `close`."""

    def __init__(
        self,
        line: Sequence[Hop],
        store: Store,
        seconds: float,
        known: Sequence[Piece] = (),
        *,
        closed: bool = False,
    ) -> None:
        """`line`: hosts in order. `seconds`: how long one may be silent. `known`: pieces to begin with; `closed`:
        there will be no others."""
        self._line, self._store, self._seconds = line, store, seconds
        self._known = list(known)
        self._todo: deque[Piece] = deque()
        self._payloads: dict[Piece, Payload] = {}
        self._waiting = 0  # bytes of payloads
        self._changed = threading.Condition()
        self._closed, self._ended = closed, False
        self.passed_by: dict[str, str] = {}
        """URL -> why."""
        self.sent = 0
        """Bytes of payloads, those of pieces that were sent again too."""
        threading.Thread(target=self._run, name="relay", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether somebody has all, or nobody is left."""
        return self._ended

    def put(self, piece: Piece, payload: Payload) -> None:
        """Never waits; see wait_for_room."""
        with self._changed:
            if self._ended:
                return
            self._known.append(piece)
            self._todo.append(piece)
            if self._waiting + len(payload.data) <= MOST_WAITING:
                self._payloads[piece] = payload
                self._waiting += len(payload.data)
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Until another payload of a piece may wait, or nobody takes any."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._waiting < MOST_WAITING // 2)

    def close(self) -> None:
        """No more pieces will come; what has come is still sent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """At once: another push has begun."""
        with self._changed:
            self._closed = self._ended = True
            self._todo.clear()
            self._payloads.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            for hop in self._line:
                try:
                    self._serve(hop)
                    break
                except PassedBy as e:
                    if self._ended:
                        break
                    log.warning("%s is passed by: %s", hop.url, e)
                    self.passed_by[hop.url] = str(e)
        finally:
            self.stop()

    def _serve(self, hop: Hop) -> None:
        """Until it has all pieces and no more will come. Raises PassedBy."""
        with self._changed:
            known = list(self._known)
            self._todo.clear()  # they are among the known
        missing = self._lacks(hop, known)
        with self._changed:
            self._todo.extendleft(reversed(missing))
            left = set(self._todo)
            self._payloads = {piece: payload for piece, payload in self._payloads.items() if piece in left}
            self._waiting = sum(len(payload.data) for payload in self._payloads.values())
            self._changed.notify_all()
        broken, why = threading.Event(), list[str]()
        # Daemons: an engine that ends does not wait for who takes nothing.
        workers = [
            threading.Thread(target=self._work, args=(hop, broken, why), name="relay", daemon=True)
            for _ in range(WINDOW)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if broken.is_set():
            raise PassedBy("; ".join(why[:1]) or "sending failed")

    def _lacks(self, hop: Hop, pieces: Sequence[Piece]) -> list[Piece]:
        if not pieces:
            return []
        missing: list[Piece] = []
        with _Connection(hop, self._seconds) as connection:
            for first in range(0, len(pieces), OFFERED):
                offered = pieces[first : first + OFFERED]
                body = json.dumps([[piece.file, piece.place] for piece in offered]).encode()
                status, said = connection.post(OFFER, {}, body)
                try:
                    if status != TAKEN:
                        raise PassedBy(f"answers {status}: {said[:200]!r}")
                    missing += [offered[i] for i in json.loads(said)["missing"]]
                except (ValueError, TypeError, KeyError, IndexError):
                    raise PassedBy(f"not an answer of a relay: {said[:200]!r}") from None
        return missing

    def _work(self, hop: Hop, broken: threading.Event, why: list[str]) -> None:
        ended = False
        try:
            with _Connection(hop, self._seconds) as connection:
                while (turn := self._next(broken)) is not None:
                    self._give(connection, *turn)
            ended = True
        except PassedBy as e:
            why.append(str(e))
        finally:  # the others need not go on when one cannot
            with self._changed:
                if not ended:
                    broken.set()
                self._changed.notify_all()

    def _next(self, broken: threading.Event) -> tuple[Piece, Payload | None] | None:
        """None: no more for this host."""
        with self._changed:
            self._changed.wait_for(lambda: self._todo or self._closed or broken.is_set())
            if broken.is_set() or not self._todo:
                return None
            piece = self._todo.popleft()
            payload = self._payloads.pop(piece, None)
            if payload is not None:
                self._waiting -= len(payload.data)
                self._changed.notify_all()
            return piece, payload

    def _give(self, connection: _Connection, piece: Piece, payload: Payload | None) -> None:
        for attempt in range(TRIES):
            if payload is None or attempt >= TRIES // 2:
                try:
                    payload = encode(piece, self._store.content(piece), None, "")
                except Undeclared as e:
                    raise PassedBy(str(e)) from None
            headers = {PIECE_HEADER: json.dumps([piece.file, piece.place]), BEFORE_HEADER: payload.before}
            status, said = connection.post(PIECE, headers, payload.data)
            with self._changed:
                self.sent += len(payload.data)
            if status == TAKEN:
                return
            if status == WHOLE:
                payload = None
            elif status != AGAIN:
                raise PassedBy(f"answers {status}: {said[:200]!r}")
        raise PassedBy(f"got piece {piece.place} of file {piece.file} damaged {TRIES} times")


class _Connection:
    """To one host, kept open. Raises PassedBy when it is gone or silent."""

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
        """Once more over a new connection when one that was kept breaks: servers close idle ones."""
        kept = self._http.sock is not None
        try:
            return self._post(path, headers, body)
        except TimeoutError as e:
            raise PassedBy(f"silent: {e}") from None
        except (OSError, http.client.HTTPException) as e:
            self._http.close()
            if not kept:
                raise PassedBy(f"gone: {e!r:.200}") from None
        try:
            return self._post(path, headers, body)
        except (OSError, http.client.HTTPException) as e:
            raise PassedBy(f"gone: {e!r:.200}") from None

    def _post(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        length = {"Content-Length": str(len(body))}
        # In blocks: the time limit is on each of them, so a slow link is not taken for a dead host.
        self._http.request("POST", path, _blocks(body), {**self._headers, **headers, **length})
        answer = self._http.getresponse()
        return answer.status, answer.read()


def _blocks(body: bytes) -> Iterator[memoryview]:
    view = memoryview(body)
    for start in range(0, len(body), _BLOCK):
        yield view[start : start + _BLOCK]
