"""The trainer's side of a push through relays (rlsys/weights_relay): a chain of engines crosses a slow link once.

Rank 0 keeps what it pushed last, and sends what has changed in it to the first host of each chain. Every host takes
its weights from its own memory, as from a folder, once it holds all of them. A host that gets no more, because the
one before it is gone or hangs, is fed by one of its chain that has all, and by the trainer when there is none.
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
from rlsys.engine.weight_calls import feed_from_relay, load_relayed, open_relay, relay_state, renew_relay
from rlsys.weights.buckets import Flat
from rlsys.weights.receivers import Gone, Receivers, post
from rlsys.weights_relay.feeder import WINDOW, Feeder, Hop
from rlsys.weights_relay.pieces import Bytes, Payload, Piece, digest, encode, pieces_in
from rlsys.weights_relay.store import Store

LOOK_SECONDS = 0.1
"""Between two questions whether an engine has all."""
HELPINGS = 3
"""How often an engine that gets no more is fed by somebody else before it is left out."""
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
"""As safetensors calls them."""


@dataclass
class _Member:
    """An engine of the push. `token`: by which it takes pieces. `chain`: its place in the list of chains."""

    engine: EngineAddress
    token: str
    chain: int
    taken: int = 0
    since: float = 0.0
    """When `taken` last grew, or when it was last helped."""
    helped: int = 0
    renewed: bool = False
    asked: Future[dict[str, Any]] | None = None
    loading: bool = False
    ask_at: float = 0.0


class RelayPush:
    """Lasts from push to push. Owns the store, which is as large as the model, and the feeders of the first hosts."""

    def __init__(
        self,
        chains: Sequence[Sequence[int]],
        seconds: float,
        work: float,
        near: Mapping[str, str] | None = None,
    ) -> None:
        """`chains`: indices of engines, each in the order of a chain. `seconds`: how long a host may be silent.
        `work`: what loading may take. `near`: the trainer's URL of an engine -> the one by which others of its chain
        reach it, where that is another one."""
        self._place = {index: (chain, i) for chain, of in enumerate(chains) for i, index in enumerate(of)}
        self._seconds, self._work, self._near = seconds, work, near or {}
        self._stall = seconds / 10
        self._store = Store()
        self._threads = ThreadPoolExecutor(WINDOW, thread_name_prefix="encode")
        self._holders: dict[str, tuple[int, EngineAddress]] = {}
        """URL -> chain and address of engines that have all of the version that is pushed."""
        self._version = -1
        self._files = 0
        self._whole = False
        """Whether the store has all of that version."""
        self._members: dict[str, _Member] = {}
        self._feeders: list[Feeder] = []
        self.left_out: dict[str, str] = {}
        """URL -> why, of the last push."""
        self.sent = 0
        """Bytes over the link for the version that was pushed last: for all chains together."""

    def begin(self, engines: Sequence[EngineAddress], version: int) -> None:
        """Open a chain with those of `engines` that answer."""
        again = version == self._version and self._whole
        if not again:
            self._holders.clear()
            self._whole = False
        self._version, self._files = version, self._files if again else 0
        self.left_out, self.sent = {}, self.sent if again else 0
        order = sorted(engines, key=self._placed)
        members = [_Member(e, secrets.token_urlsafe(24), self._placed(e)[0]) for e in order]
        self._members = {member.engine.url: member for member in members}
        with Receivers(order, self._seconds) as receivers:
            receivers.settle(
                receivers.ask(
                    [open_relay(m.token, self._line(self._after(m)), self._seconds) for m in members]
                )
            )
        for url, why in receivers.left_out.items():
            self._leave_out(self._members[url], why)
        self._stop()  # where a push was broken off
        if again:
            return  # somebody has all that they need
        for chain in sorted({member.chain for member in self._members.values()}):
            line = [Hop(m.engine.url, m.token) for m in self._members.values() if m.chain == chain]
            self._feeders.append(Feeder(line, self._store, self._seconds))

    def _placed(self, engine: EngineAddress) -> tuple[int, int, str]:
        """Its chain, and how it is sorted there: who joined comes last."""
        if engine.chain is not None:
            return engine.chain, len(self._place), engine.url
        assert engine.index is not None, "one that joined has a chain"
        return *self._place[engine.index], engine.url

    def send(self, flat: Flat) -> None:
        """A bucket, as a file of safetensors. Returns when it is on its way, or waits for its turn there."""
        if self._whole:
            return
        content, width = _as_file(flat)
        file, size = self._files, len(content)
        self._files += 1

        def prepare(place: int) -> tuple[Piece, Payload]:
            blank = Piece(file, size, width, place, "")
            new = content[blank.span]
            piece = Piece(file, size, width, place, digest(new))
            before = self._store.held(piece)
            old = self._store.content(piece)
            payload = encode(piece, new, old if before else None, before)
            if before != piece.after:
                self._store.write(piece, new)
            return piece, payload

        for first in range(0, pieces_in(size), WINDOW):
            for feeder in self._feeders:
                feeder.wait_for_room()
            some = range(first, min(first + WINDOW, pieces_in(size)))
            for piece, payload in self._threads.map(prepare, some):
                for feeder in self._feeders:
                    feeder.put(piece, payload)

    def end(self) -> None:
        """Until every engine of the push has loaded what was sent, or is left out."""
        begun = bool(self._feeders)
        for feeder in self._feeders:
            feeder.close()
        self._whole = True
        root, waiting = self._store.root(self._files), dict(self._members)
        for member in waiting.values():
            member.since = time.monotonic() if begun else -self._stall
        threads = ThreadPoolExecutor(max(1, len(waiting)), thread_name_prefix="push")
        try:
            while waiting:
                now = time.monotonic()
                for member in waiting.values():
                    if member.asked is None and now >= member.ask_at:
                        call = relay_state(self._files, root)
                        member.asked = threads.submit(post, member.engine, call, self._seconds)
                asked = [member.asked for member in waiting.values() if member.asked is not None]
                wait(asked, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
                for member in list(waiting.values()):
                    if member.asked is not None and member.asked.done():
                        self._hear(member, waiting, threads)
                self._help([m for m in waiting.values() if self._stuck(m)], waiting)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        self.sent += sum(feeder.sent for feeder in self._feeders)
        self._stop()

    def _stop(self) -> None:
        for feeder in self._feeders:
            feeder.stop()
        self._feeders = []

    def close(self) -> None:
        self._stop()
        self._threads.shutdown(wait=False)
        self._store.close()

    def _hear(self, member: _Member, waiting: dict[str, _Member], threads: ThreadPoolExecutor) -> None:
        assert member.asked is not None
        asked, member.asked = member.asked, None
        try:
            said = asked.result()
        except (Gone, RunError) as e:
            self._leave_out(member, str(e))
            waiting.pop(member.engine.url)
            return
        if member.loading:
            waiting.pop(member.engine.url)
        elif (folder := said.get("folder")) is not None:
            self._holders[member.engine.url] = member.chain, member.engine
            member.loading = True
            member.asked = threads.submit(post, member.engine, load_relayed(str(folder)), self._work)
        else:
            now = time.monotonic()
            member.ask_at = now + LOOK_SECONDS
            if (taken := int(said.get("taken", 0))) > member.taken:
                member.taken, member.since = taken, now

    def _stuck(self, member: _Member) -> bool:
        """One that answers, and gets no more. One that does not answer is left out when its time is up."""
        return not member.loading and member.asked is None and time.monotonic() - member.since > self._stall

    def _help(self, stuck: Sequence[_Member], waiting: dict[str, _Member]) -> None:
        """Somebody of their chain who has all feeds them one by one: the first may be the one that hangs. When nobody
        has all, the trainer begins once more, when it has done with the chain as it was."""
        mine: dict[int, list[_Member]] = {}
        for member in stuck:
            member.since, held = time.monotonic(), self._fed_by_a_holder(member)
            if not held and not all(feeder.ended for feeder in self._feeders):
                continue
            member.helped += 1
            if member.helped > HELPINGS:
                self._leave_out(member, f"took no more pieces of weights, {HELPINGS} times")
                waiting.pop(member.engine.url)
            elif not held and self._renew(member):
                mine.setdefault(member.chain, []).append(member)
        for of in mine.values():
            line = [Hop(member.engine.url, member.token) for member in of]
            self._feeders.append(
                Feeder(line, self._store, self._seconds, self._store.pieces(self._files), closed=True)
            )

    def _renew(self, member: _Member) -> bool:
        """Give it another token, once: the host before it, which may bring what is wrong, brings no more. Returns
        whether it answers."""
        if member.renewed:
            return True
        token = secrets.token_urlsafe(24)
        try:
            post(member.engine, renew_relay(token), self._seconds)
        except (Gone, RunError):
            return False
        member.token, member.renewed = token, True
        return True

    def _fed_by_a_holder(self, member: _Member) -> bool:
        for url, (chain, holder) in list(self._holders.items()):
            if chain != member.chain or url == member.engine.url:
                continue
            if not self._renew(member):
                return False
            call = feed_from_relay(self._files, self._line([member]), self._seconds)
            try:
                post(holder, call, self._seconds)
            except (Gone, RunError):
                del self._holders[url]  # started anew since, or dead
                continue
            return True
        return False

    def _after(self, member: _Member) -> list[_Member]:
        chain = [m for m in self._members.values() if m.chain == member.chain]
        return chain[chain.index(member) + 1 :]

    def _line(self, members: Sequence[_Member]) -> list[tuple[str, str]]:
        """As other engines reach them."""
        return [(self._near.get(m.engine.url, m.engine.url), m.token) for m in members]

    def _leave_out(self, member: _Member, why: str) -> None:
        self.left_out[member.engine.url] = why
        self._members.pop(member.engine.url, None)


def _as_file(flat: Flat) -> tuple[Bytes, int]:
    """The bytes of a safetensors file, and the width of its numbers."""
    told, start = {}, 0
    for name, dtype, shape in flat.parts:
        size = shape.numel() * dtype.itemsize
        told[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(told).encode()
    text += b" " * (-len(text) % 8)
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    return np.concatenate([head, flat.memory.cpu().numpy()]), flat.parts[0][1].itemsize
