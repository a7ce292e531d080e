"""Trainer side of a relayed push (rlsys/weights_relay): the weights cross a slow link once per chain of engines.

Rank 0 keeps the last version that it pushed, and sends what has changed to the first host of each chain. Before
it sends a file, it declares the file's size and digests to every host, because hosts forward chunks to each other. A
host loads the weights from its own memory, as from a folder, once it has all chunks. A host that stops
receiving, because its predecessor is gone or hangs, is fed by a host of its chain that has all chunks, or by
the trainer if there is none.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
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
"""Number of times that a stalled engine is fed by another host before it is excluded."""
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
"""Names in safetensors."""


@dataclass
class _Member:
    """An engine of the push.

    Attributes:
        engine: its address.
        token: authorises it to receive chunks.
        chain: index of its chain.
        received: number of chunks that it has.
        progress_time: time of the last progress, or of the last refeed.
        refeeds: number of refeeds.
        token_renewed: whether it has a second token.
        request: the query or load request in progress.
        loading: whether it loads the weights.
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
    """Relayed push. Owns the store, which is as large as the model, and the feeders of the first hosts."""

    def __init__(
        self,
        chains: Sequence[Sequence[int]],
        seconds: float,
        load_seconds: float,
        peer_urls: Mapping[str, str] | None = None,
    ) -> None:
        """Create the store.

        Args:
            chains: indices of engines, in the order of each chain.
            seconds: time without progress after which a host counts as failed.
            load_seconds: time limit for loading.
            peer_urls: the trainer's URL of an engine -> the URL for other engines of its chain, if that
                differs.
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
        """URL -> chain and address of the engines that have all chunks of the pushed version."""
        self._version = -1
        self._complete = False
        """Whether the store has all chunks of that version."""
        self._members: dict[str, _Member] = {}
        self._feeders: list[Feeder] = []
        self.excluded: dict[str, str] = {}
        """URL -> reason, for the last push."""
        self.sent_bytes = 0
        """Bytes of the last version over the links of all chains."""

    def begin(self, engines: Sequence[EngineAddress], version: int) -> None:
        """Open the chains with those of `engines` that respond."""
        same_version = version == self._version and self._complete
        if not same_version:
            self._holders.clear()
            self._complete = False
        self._version = version
        self.excluded, self.sent_bytes = {}, self.sent_bytes if same_version else 0
        order = sorted(engines, key=self._position)
        members = [_Member(e, secrets.token_urlsafe(24), self._position(e)[0]) for e in order]
        self._members = {member.engine.url: member for member in members}
        self._post_to_members(
            [open_relay(m.token, self._hops(self._successors(m)), self._seconds) for m in members]
        )
        self._stop()  # after an aborted push
        if same_version:
            self._declare(0, self._store.specs())
            return  # a holder has all chunks
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
        """Return an engine's chain and its sort key in it: engines that joined later come last."""
        if engine.chain is not None:
            return engine.chain, len(self._positions), engine.url
        assert engine.index is not None, "an engine without index has a chain"
        return *self._positions[engine.index], engine.url

    def send(self, flat: FlatBucket) -> None:
        """Send a bucket as a safetensors file. Returns when it is in transfer, or queued."""
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
                current_time = time.monotonic()
                for member in waiting.values():
                    if member.request is None and current_time >= member.next_query:
                        call = relay_state(self._store.declared)
                        member.request = threads.submit(post, member.engine, call, self._seconds)
                requests = [member.request for member in waiting.values() if member.request is not None]
                wait(requests, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                for member in list(waiting.values()):
                    if member.request is not None and member.request.done():
                        self._on_response(member, waiting, threads)
                self._refeed([m for m in waiting.values() if self._stuck(m)], waiting)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        self.sent_bytes += sum(feeder.sent_bytes for feeder in self._feeders)
        self._stop()
        self._revoke_tokens()

    def _revoke_tokens(self) -> None:
        """Replace the tokens of engines that have loaded the weights by unused tokens."""
        with Receivers([m.engine for m in self._members.values()], self._seconds) as receivers:
            calls = [renew_relay(secrets.token_urlsafe(24)) for _ in receivers.present]
            # An engine that fails here holds the weights; the attestation after the push decides about it.
            receivers.wait_all(receivers.post_all(calls))

    def _stop(self) -> None:
        for feeder in self._feeders:
            feeder.stop()
        self._feeders = []

    def close(self) -> None:
        self._stop()
        self._threads.shutdown(wait=False)
        self._store.close()

    def _on_response(self, member: _Member, waiting: dict[str, _Member], threads: ThreadPoolExecutor) -> None:
        """Handle an engine's response: progress, all chunks received, or loaded."""
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

    def _stuck(self, member: _Member) -> bool:
        """Return whether an engine responds without progress. One that does not respond is excluded by a timeout."""
        stalled = time.monotonic() - member.progress_time > self._stall
        return not member.loading and member.request is None and stalled

    def _refeed(self, stuck: Sequence[_Member], waiting: dict[str, _Member]) -> None:
        """Feed stalled engines one by one, since the first may be the one that hangs, from a host of their chain.

        If no host has all chunks, the trainer sends them again once its feeders have ended.
        """
        members_by_chain: dict[int, list[_Member]] = {}
        for member in stuck:
            member.progress_time, has_feeder = time.monotonic(), self._feed_from_holder(member)
            if not has_feeder and not all(feeder.is_done for feeder in self._feeders):
                continue
            member.refeeds += 1
            if member.refeeds > MAX_REFEEDS:
                self._exclude(member, f"stopped receiving weights, {MAX_REFEEDS} times")
                waiting.pop(member.engine.url)
            elif not has_feeder and self._renew_token(member):
                members_by_chain.setdefault(member.chain, []).append(member)
        for members in members_by_chain.values():
            hops = [Hop(member.engine.url, member.token) for member in members]
            self._feeders.append(Feeder(hops, self._store, self._seconds, self._store.pieces(), closed=True))

    def _renew_token(self, member: _Member) -> bool:
        """Give an engine another token, once, so that its predecessor, whose chunks may be wrong, sends no more.

        Returns:
            Whether the engine responds.
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
        """Let a host of the chain that has all chunks feed a member; return whether there is one."""
        for url, (chain, holder) in list(self._holders.items()):
            if chain != member.chain or url == member.engine.url:
                continue
            if not self._renew_token(member):
                return False
            call = feed_from_relay(self._hops([member]), self._seconds)
            try:
                post(holder, call, self._seconds)
            except (EngineUnreachable, RunError):
                del self._holders[url]  # restarted meanwhile, or dead
                continue
            return True
        return False

    def _successors(self, member: _Member) -> list[_Member]:
        chain = [m for m in self._members.values() if m.chain == member.chain]
        return chain[chain.index(member) + 1 :]

    def _hops(self, members: Sequence[_Member]) -> list[tuple[str, str]]:
        """Return URL and token of members, with the URLs that other engines use."""
        return [(self._peer_urls.get(m.engine.url, m.engine.url), m.token) for m in members]

    def _exclude(self, member: _Member, reason: str) -> None:
        self.excluded[member.engine.url] = reason
        self._members.pop(member.engine.url, None)


def _as_file(flat: FlatBucket) -> tuple[Bytes, int]:
    """Return the bytes of a safetensors file, and the bytes per element."""
    header, start = {}, 0
    for name, dtype, shape in flat.parts:
        size = shape.numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    prefix = np.frombuffer(len(header_bytes).to_bytes(8, "little") + header_bytes, np.uint8)
    return np.concatenate([prefix, flat.memory.cpu().numpy()]), flat.parts[0][1].itemsize
