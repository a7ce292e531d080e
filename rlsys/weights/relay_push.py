"""Trainer side of a relayed push (rlsys/weights_relay): the weights cross a slow link once per chain of engines.

Rank 0 keeps the last version that it pushed, and sends only the differences to the first host of each chain. Before
it sends a file, it declares the file's size and digests to every host, so that a host can verify the pieces that
another host forwards. Once a host has all pieces, it loads the weights from its own memory, as from a folder. If a
host stops receiving, because its predecessor is dead or hangs, another host of the chain that has all pieces sends
them; if there is none, the trainer does.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlsys.core.errors import RunError
from rlsys.core.weight_updates import EngineAddress
from rlsys.engine.weight_calls import (
    Call,
    declare_to_relay,
    feed_from_relay,
    load_relayed,
    open_relay,
    relay_state,
    renew_relay,
)
from rlsys.weights.buckets import FlatBucket
from rlsys.weights.receivers import EngineUnreachable, Receivers, post
from rlsys.weights_relay.feeder import WINDOW, Feeder, Hop
from rlsys.weights_relay.pieces import Bytes, FileSpec, Payload, Piece, digest, encode, pieces_in
from rlsys.weights_relay.store import Store

POLL_SECONDS = 0.1
"""Interval between queries of an engine's progress."""
MAX_REFEEDS = 3
"""Number of times that another host sends the pieces to a stalled engine, before the engine is excluded."""
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
"""Names of dtypes in safetensors files."""


@dataclass
class _Member:
    """An engine of the push. Times are those of `time.monotonic`.

    Attributes:
        engine: address.
        token: authorizes a sender to send pieces to the engine.
        chain: index of the engine's chain.
        received: number of pieces that the engine has.
        progress_time: time of the last progress, or of the last refeed.
        refeeds: number of times that another host has sent the pieces again.
        token_renewed: whether `token` is the second one.
        request: the query or load request in progress.
        loading: whether the engine loads the weights.
        next_query: time of the next query.
    """

    engine: EngineAddress
    token: str
    chain: int
    received: int = 0
    progress_time: float = 0.0
    refeeds: int = 0
    token_renewed: bool = False
    request: Future[dict[str, Any]] | None = None
    loading: bool = False
    next_query: float = 0.0


class RelayPush:
    """Sends weights to the chains of engines. Owns the store, which is as large as the model, and the feeders."""

    def __init__(
        self,
        chains: Sequence[Sequence[int]],
        seconds: float,
        load_seconds: float,
        peer_urls: Mapping[str, str] | None = None,
    ) -> None:
        """Create the store.

        Args:
            chains: for each chain, the indices of its engines in their order.
            seconds: time without progress after which a host counts as failed.
            load_seconds: time limit for loading.
            peer_urls: URL of an engine for the trainer -> its URL for other engines of the chain, if they differ.
        """
        self._positions = {
            index: (chain, position)
            for chain, indices in enumerate(chains)
            for position, index in enumerate(indices)
        }
        self._seconds, self._load_seconds, self._peer_urls = seconds, load_seconds, peer_urls or {}
        self._stall = seconds / 10
        self._store = Store()
        self._threads = ThreadPoolExecutor(WINDOW, thread_name_prefix="encode")
        self._holders: dict[str, tuple[int, EngineAddress]] = {}
        """URL of each engine that has all pieces of the pushed version -> index of its chain, and its address."""
        self._version = -1
        self._complete = False
        """Whether the store has all pieces of `_version`."""
        self._members: dict[str, _Member] = {}
        self._feeders: list[Feeder] = []
        self.excluded: dict[str, str] = {}
        """URL -> reason, for the last push."""
        self.sent_bytes = 0
        """Bytes that the trainer has sent of the last version, to all chains."""

    def begin(self, engines: Sequence[EngineAddress], version: int) -> None:
        """Start a push: open the chains with those of `engines` that respond."""
        same_version = version == self._version and self._complete
        if not same_version:
            self._holders.clear()
            self._complete = False
            self.sent_bytes = 0
        self._version = version
        self.excluded = {}
        order = sorted(engines, key=self._position)
        members = [_Member(e, secrets.token_urlsafe(24), self._position(e)[0]) for e in order]
        self._members = {member.engine.url: member for member in members}
        self._post_to_members(
            [open_relay(m.token, self._hops(self._successors(m)), self._seconds) for m in members]
        )
        self._stop()  # after an aborted push
        if same_version:
            self._declare(0, self._store.specs())
            return  # an engine that has all pieces sends them
        self._store.begin()
        for chain in sorted({member.chain for member in self._members.values()}):
            hops = [Hop(m.engine.url, m.token) for m in self._members.values() if m.chain == chain]
            self._feeders.append(Feeder(hops, self._store, self._seconds))

    def _declare(self, first: int, files: Sequence[FileSpec]) -> None:
        """Declare files to all engines of the push. `first`: number of the first file."""
        call = declare_to_relay(first, [spec.encoded() for spec in files])
        self._post_to_members([call] * len(self._members))

    def _post_to_members(self, calls: Sequence[Call]) -> None:
        """Send one request to each engine of the push, and exclude those that fail or refuse."""
        with Receivers([m.engine for m in self._members.values()], self._seconds) as receivers:
            receivers.wait_all(receivers.post_all(calls))
        for url, reason in receivers.excluded.items():
            self._exclude(self._members[url], reason)

    def _position(self, engine: EngineAddress) -> tuple[int, int, str]:
        """Return the engine's sort key: chain, position in the chain, URL. Engines that joined later come last."""
        if engine.chain is not None:
            return engine.chain, len(self._positions), engine.url
        assert engine.index is not None, "an engine without index has a chain"
        return *self._positions[engine.index], engine.url

    def send(self, flat: FlatBucket) -> None:
        """Send a bucket as a safetensors file. Return once all its pieces are queued or in transfer."""
        if self._complete:
            return
        content, width = _as_file(flat)
        file, size = self._store.declared, len(content)
        indices = range(pieces_in(size))
        spans = [Piece(file, size, width, index, "").span for index in indices]
        digests = self._threads.map(lambda span: digest(content[span]), spans)
        spec = FileSpec(size, width, tuple(digests))
        self._store.declare([spec])
        self._declare(file, [spec])

        def prepare(index: int) -> tuple[Piece, Payload]:
            piece, new_bytes = self._store.piece(file, index), content[spans[index]]
            old_digest = self._store.current_digest(piece)
            old_bytes = self._store.content(piece) if old_digest else None
            payload = encode(piece, new_bytes, old_bytes, old_digest)
            self._store.write(piece, new_bytes)
            return piece, payload

        for first in indices[::WINDOW]:
            for feeder in self._feeders:
                feeder.wait_for_room()
            for piece, payload in self._threads.map(prepare, indices[first : first + WINDOW]):
                for feeder in self._feeders:
                    feeder.enqueue(piece, payload)

    def end(self) -> None:
        """Wait until every engine of the push has loaded the weights, or is excluded."""
        sending = bool(self._feeders)
        for feeder in self._feeders:
            feeder.close()
        self._complete = True
        waiting = dict(self._members)
        for member in waiting.values():
            member.progress_time = time.monotonic() if sending else -self._stall
        threads = ThreadPoolExecutor(max(1, len(waiting)), thread_name_prefix="push")
        try:
            while waiting:
                self._query(waiting.values(), threads)
                for member in list(waiting.values()):
                    if member.request is not None and member.request.done():
                        self._on_response(member, waiting, threads)
                self._refeed([m for m in waiting.values() if self._is_stalled(m)], waiting)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        self.sent_bytes += sum(feeder.sent_bytes for feeder in self._feeders)
        self._stop()
        self._revoke_tokens()

    def _query(self, members: Collection[_Member], threads: ThreadPoolExecutor) -> None:
        """Query the progress of the members whose next query is due; wait for a response, or POLL_SECONDS."""
        current_time = time.monotonic()
        for member in members:
            if member.request is None and current_time >= member.next_query:
                call = relay_state(self._store.declared)
                member.request = threads.submit(post, member.engine, call, self._seconds)
        requests = [member.request for member in members if member.request is not None]
        wait(requests, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)

    def _revoke_tokens(self) -> None:
        """Replace the token of each engine that has loaded the weights by a token that nobody else has."""
        with Receivers([m.engine for m in self._members.values()], self._seconds) as receivers:
            calls = [renew_relay(secrets.token_urlsafe(24)) for _ in receivers.present]
            # An engine that fails here has loaded the weights, so only attestation decides whether it serves.
            receivers.wait_all(receivers.post_all(calls))

    def _stop(self) -> None:
        """Stop all feeders, also in the middle of a transfer."""
        for feeder in self._feeders:
            feeder.stop()
        self._feeders = []

    def close(self) -> None:
        """Stop all transfers, and release the store."""
        self._stop()
        self._threads.shutdown(wait=False)
        self._store.close()

    def _on_response(self, member: _Member, waiting: dict[str, _Member], threads: ThreadPoolExecutor) -> None:
        """Handle an engine's response.

        - after an error, exclude the engine
        - when it has all pieces, let it load them
        - when it has loaded them, remove it from `waiting`
        - otherwise, record its progress
        """
        assert member.request is not None
        request, member.request = member.request, None
        try:
            response = request.result()
        except (EngineUnreachable, RunError) as e:
            self._exclude(member, str(e))
            waiting.pop(member.engine.url)
            return
        if member.loading:
            waiting.pop(member.engine.url)
        elif (folder := response.get("folder")) is not None:
            self._holders[member.engine.url] = member.chain, member.engine
            member.loading = True
            member.request = threads.submit(
                post, member.engine, load_relayed(str(folder)), self._load_seconds
            )
        else:
            current_time = time.monotonic()
            member.next_query = current_time + POLL_SECONDS
            if (received := int(response.get("taken", 0))) > member.received:
                member.received, member.progress_time = received, current_time

    def _is_stalled(self, member: _Member) -> bool:
        """Return whether an engine responds, but receives no more pieces. A timeout excludes one that is silent."""
        has_no_progress = time.monotonic() - member.progress_time > self._stall
        return not member.loading and member.request is None and has_no_progress

    def _refeed(self, stalled: Sequence[_Member], waiting: dict[str, _Member]) -> None:
        """Send the pieces again to stalled engines, and exclude those that have stalled more than MAX_REFEEDS times.

        A host of the chain that has all pieces sends them, to one engine at a time, because any stalled engine may
        hang. If there is no such host, the trainer sends them as soon as its feeders have ended.
        """
        members_by_chain: dict[int, list[_Member]] = {}
        for member in stalled:
            member.progress_time = time.monotonic()
            has_feeder = self._feed_from_holder(member)
            if not has_feeder and not all(feeder.is_done for feeder in self._feeders):
                continue
            member.refeeds += 1
            if member.refeeds > MAX_REFEEDS:
                self._exclude(
                    member,
                    f"received no piece for {self._stall:g} s, also after {MAX_REFEEDS} further attempts",
                )
                waiting.pop(member.engine.url)
            elif not has_feeder and self._renew_token(member):
                members_by_chain.setdefault(member.chain, []).append(member)
        for members in members_by_chain.values():
            hops = [Hop(member.engine.url, member.token) for member in members]
            self._feeders.append(Feeder(hops, self._store, self._seconds, self._store.pieces(), closed=True))

    def _renew_token(self, member: _Member) -> bool:
        """Give an engine a second token, so that it refuses further pieces of its predecessor, which may be wrong.

        Returns:
            Whether the engine accepts the token, also in an earlier call.
        """
        if member.token_renewed:
            return True
        token = secrets.token_urlsafe(24)
        try:
            post(member.engine, renew_relay(token), self._seconds)
        except (EngineUnreachable, RunError):
            return False
        member.token, member.token_renewed = token, True
        return True

    def _feed_from_holder(self, member: _Member) -> bool:
        """Make another host of the chain that has all pieces send them to `member`.

        Returns:
            Whether a host accepted the request; False if no host did, or if `member` did not accept a new token.
        """
        for url, (chain, holder) in list(self._holders.items()):
            if chain != member.chain or url == member.engine.url:
                continue
            if not self._renew_token(member):
                return False
            call = feed_from_relay(self._hops([member]), self._seconds)
            try:
                post(holder, call, self._seconds)
            except (EngineUnreachable, RunError):
                del self._holders[url]  # The host has restarted or is dead.
                continue
            return True
        return False

    def _successors(self, member: _Member) -> list[_Member]:
        """Return the members after `member` in its chain."""
        chain = [m for m in self._members.values() if m.chain == member.chain]
        return chain[chain.index(member) + 1 :]

    def _hops(self, members: Sequence[_Member]) -> list[tuple[str, str]]:
        """Return (URL for other engines, token) of each member."""
        return [(self._peer_urls.get(m.engine.url, m.engine.url), m.token) for m in members]

    def _exclude(self, member: _Member, reason: str) -> None:
        self.excluded[member.engine.url] = reason
        self._members.pop(member.engine.url, None)


def _as_file(flat: FlatBucket) -> tuple[Bytes, int]:
    """Return the bucket as the bytes of a safetensors file, and the number of bytes per element."""
    header, start = {}, 0
    for name, dtype, shape in flat.parts:
        size = shape.numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    prefix = np.frombuffer(len(header_bytes).to_bytes(8, "little") + header_bytes, np.uint8)
    return np.concatenate([prefix, flat.memory.cpu().numpy()]), flat.parts[0][1].itemsize
