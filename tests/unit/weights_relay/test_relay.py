"""Weights over relays: real processes, real sockets, the real wire format; no engine."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.core.weight_updates import EngineAddress
from rlsys.weights.buckets import StagingBuffers, send_in_buckets
from rlsys.weights.relay_push import RelayPush
from rlsys.weights_relay.feeder import OFFER, PIECE, PIECE_HEADER, TOKEN_HEADER
from rlsys.weights_relay.pieces import (
    PIECE_BYTES,
    Damaged,
    FileSpec,
    Piece,
    decode,
    decode_file_spec,
    decode_locations,
    digest,
    encode,
    pieces_in,
)
from tests.helpers.relay_host import Host, hosts
from tests.helpers.slow_link import SlowLink

Tensors = dict[str, Tensor]
BUCKET = 6 * 2**20
SECONDS = 20.0


def model(
    seed: int, dtype: torch.dtype = torch.float32, megabytes: int = 12, steps: int = 0, only: str = "layer"
) -> Tensors:
    """After so many steps of training, each of which changes what is called so: a little, everywhere."""
    generator = torch.Generator().manual_seed(seed)
    rows = megabytes * 2**20 // 5 // 256 // dtype.itemsize
    tensors = {f"layer{i}.weight": torch.randn(rows, 256, generator=generator) for i in range(5)}
    return {n: (t * (1 + 2e-5 * steps * n.startswith(only))).to(dtype) for n, t in tensors.items()}


def expected(tensors: Tensors) -> dict[str, str]:
    return {
        name: hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, t in tensors.items()
    }


class Sender:
    """Pushes to hosts, which take every push for begun."""

    def __init__(
        self, there: Sequence[Host], *, urls: Sequence[str] | None = None, seconds: float = SECONDS
    ) -> None:
        self.hosts = there
        self.urls = list(urls or [host.url for host in there])
        self.near = {url: host.url for url, host in zip(self.urls, there, strict=True)}
        self.relays = RelayPush([range(len(there))], seconds, SECONDS, self.near)
        self.epoch = 0

    def addresses(self, only: Sequence[int] | None = None) -> list[EngineAddress]:
        self.epoch += 1
        chosen = range(len(self.hosts)) if only is None else only
        for i in chosen:
            if self.hosts[i].process.poll() is None:
                self.hosts[i].begin(self.epoch)
        return [EngineAddress(self.urls[i], 1, -1, i, epoch=self.epoch) for i in chosen]

    def push(self, tensors: Tensors, version: int, only: Sequence[int] | None = None) -> dict[str, str]:
        self.relays.begin(self.addresses(only), version)
        send_in_buckets(tensors.items(), BUCKET, StagingBuffers(shared=False), self.relays.send)
        self.relays.end()
        return self.relays.excluded

    def close(self) -> None:
        self.relays.close()


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with hosts(3) as relay_hosts:
        yield relay_hosts


def piece_of(content: np.ndarray, width: int = 4) -> Piece:
    return Piece(0, len(content), width, 0, digest(content))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 7, 4096, 100003])
def test_a_piece_round_trips_unchanged(width: int, length: int) -> None:
    rng = np.random.default_rng(0)
    old, new = (rng.integers(0, 256, length, dtype=np.uint8) for _ in "ab")
    piece = piece_of(new, width)
    for base, base_digest in ((None, ""), (old, digest(old))):
        payload = encode(piece, new, base, base_digest)
        assert np.array_equal(decode(piece, payload, base), new)
    assert encode(piece, new, new, piece.digest).data == b""


def test_small_changes_encode_to_small_payloads() -> None:
    for dtype, most in ((torch.bfloat16, 0.05), (torch.float32, 0.6)):
        tensors, next_tensors = model(1, dtype), model(1, dtype, steps=1)
        old, new = (
            torch.cat([t.view(-1).view(torch.uint8) for t in state.values()])[:PIECE_BYTES].numpy()
            for state in (tensors, next_tensors)
        )
        assert not np.array_equal(old, new)
        payload = encode(piece_of(new, dtype.itemsize), new, old, digest(old))
        assert len(payload.data) < most * len(new)


def test_damaged_or_foreign_pieces_are_refused() -> None:
    content = np.arange(5000, dtype=np.int32).view(np.uint8)
    piece = piece_of(content)
    payload = encode(piece, content, None, "")
    for position in (0, len(payload.data) // 2, len(payload.data) - 1):
        hurt = bytearray(payload.data)
        hurt[position] ^= 1
        with pytest.raises(Damaged):
            decode(piece, payload._replace(data=bytes(hurt)), None)
    with pytest.raises(Damaged):
        decode(piece, payload._replace(data=payload.data[:-3]), None)
    bomb = encode(piece_of(np.zeros(2**26, np.uint8)), np.zeros(2**26, np.uint8), None, "")
    assert len(bomb.data) < 2**16
    with pytest.raises(Damaged, match="declare 67108864 bytes; expected"):
        decode(piece, bomb, None)


def test_specifications_and_locations_are_checked() -> None:
    spec = FileSpec(PIECE_BYTES + 1, 4, ("0" * 32, "f" * 32))
    assert decode_file_spec(json.loads(json.dumps(spec.encoded()))) == spec
    odd_specs: Sequence[Any] = (
        None, 7, [], [8, 4], [8, 4, []], [8, 3, ["0" * 32]], [0, 4, []], [-8, 4, ["0" * 32]], [8.0, 4, ["0" * 32]],
        [8, 4, ["0" * 31]], [8, 4, ["g" * 32]], [8, 4, [5]], [8, 4, ["0" * 32] * 2], [2**42, 1, ["0" * 32]],
    )  # fmt: skip
    for odd in odd_specs:
        with pytest.raises(ValueError):
            decode_file_spec(odd)
    assert decode_locations([[0, 3], [1, 0]]) == [(0, 3), (1, 0)]
    odd_locations: Sequence[Any] = (None, 7, {}, [7], [[1]], [[1, "0"]], [[1, 0, 0]], [[1.0, 0]])
    for odd in odd_locations:
        with pytest.raises(ValueError):
            decode_locations(odd)


@pytest.mark.gate
def test_all_hosts_get_all_tensors_and_the_link_carries_them_once(three: list[Host]) -> None:
    sender, first, second = Sender(three), model(0), model(0, steps=1, only="layer1")
    assert sender.push(first, 1) == {}
    full_bytes = sender.relays.sent_bytes
    assert [host.state()["tensors"] for host in three] == [expected(first)] * 3
    assert 0.5 < full_bytes / sum(t.nbytes for t in first.values()) < 1.01
    assert sender.push(second, 2) == {}
    assert [host.state()["tensors"] for host in three] == [expected(second)] * 3
    assert sender.relays.sent_bytes < 0.3 * full_bytes, "one tensor of five, as what has changed in it"
    assert sender.push(second, 3) == {} and sender.relays.sent_bytes == 0
    assert [host.state()["loads"] for host in three] == [3] * 3
    sender.close()


@pytest.mark.gate
def test_a_joined_host_is_the_end_of_the_chain(three: list[Host]) -> None:
    """The trainer's link carries as much as before."""
    sender, first, second = Sender(three), model(0), model(0, steps=1)
    sender.relays = RelayPush([range(2)], SECONDS, SECONDS)
    for version, tensors in ((1, first), (2, second)):
        addresses = sender.addresses()
        addresses[2] = replace(addresses[2], index=None, chain=0)
        sender.relays.begin(addresses[::-1], version)
        assert [m.engine.url for m in sender.relays._members.values()] == sender.urls
        send_in_buckets(tensors.items(), BUCKET, StagingBuffers(shared=False), sender.relays.send)
        sender.relays.end()
        assert sender.relays.excluded == {}
        assert [host.state()["tensors"] for host in three] == [expected(tensors)] * 3
        assert sender.relays.sent_bytes < 1.01 * sum(t.nbytes for t in tensors.values())
    sender.close()


@pytest.mark.gate
def test_a_host_that_returns_gets_the_weights_from_its_neighbours(three: list[Host]) -> None:
    """It holds nothing; what is sent to all is what has changed."""
    with hosts(1) as (fresh,):
        sender, first = Sender(three), model(0, torch.bfloat16)
        assert sender.push(first, 1) == {}
        full_bytes = sender.relays.sent_bytes
        three[1].process.kill()
        three[1].process.wait()
        sender.hosts = [three[0], fresh, three[2]]
        sender.urls[1] = fresh.url
        assert sender.push(first, 1, only=[1]) == {}
        assert sender.relays.sent_bytes == full_bytes, "the same version: others of its chain have it"
        assert fresh.state()["tensors"] == expected(first)
        sender.close()


@pytest.mark.gate
def test_a_host_without_the_previous_version_adds_no_traffic_to_the_link(three: list[Host]) -> None:
    sender, first = Sender(three), model(0, torch.bfloat16)
    assert sender.push(first, 1, only=[0, 2]) == {}
    second = model(0, torch.bfloat16, steps=1)
    assert sender.push(second, 2) == {}
    assert [host.state()["tensors"] for host in three] == [expected(second)] * 3
    assert sender.relays.sent_bytes < 0.2 * sum(t.nbytes for t in first.values())
    sender.close()


@pytest.mark.gate
def test_a_damaged_piece_is_refused_and_requested_again() -> None:
    hurt: list[int] = []

    def damage(passed: int) -> bool:
        if passed > (1 + 2 * len(hurt)) * 2**20 and len(hurt) < 3:
            hurt.append(passed)
            return True
        return False

    link = SlowLink(1e9, damage)
    with hosts(2) as relay_hosts:
        sender, tensors = Sender(relay_hosts, urls=[link.through(host.url) for host in relay_hosts]), model(3)
        assert sender.push(tensors, 1) == {}
        first, second = (host.state()["damaged"] for host in relay_hosts)
        assert 1 <= first <= len(hurt) and second == 0, "refused by the first, not passed on"
        assert [host.state()["tensors"] for host in relay_hosts] == [expected(tensors)] * 2
        sender.close()
    link.close()


@pytest.mark.gate
def test_a_dead_host_is_passed_by(three: list[Host]) -> None:
    sender, tensors = Sender(three), model(4)
    three[1].process.kill()
    three[1].process.wait()
    assert list(sender.push(tensors, 1)) == [three[1].url]
    assert [three[i].state()["tensors"] for i in (0, 2)] == [expected(tensors)] * 2
    sender.close()


@pytest.mark.gate
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_dies_or_hangs_during_a_push_is_bypassed(
    place: int, how: signal.Signals, tmp_path: Path
) -> None:
    """It has taken a piece, and not passed on the others."""
    with hosts(3, [tmp_path if i == place else None for i in range(3)]) as relay_hosts:
        sender, tensors = Sender(relay_hosts, seconds=3.0), model(5, megabytes=24)
        addresses = sender.addresses()
        sender.relays.begin(addresses, 1)

        def strike() -> None:
            while not (tmp_path / "taken").exists():
                threading.Event().wait(0.01)
            relay_hosts[place].process.send_signal(how)

        striking = threading.Thread(target=strike)
        striking.start()
        send_in_buckets(tensors.items(), BUCKET, StagingBuffers(shared=False), sender.relays.send)
        striking.join()
        sender.relays.end()
        assert list(sender.relays.excluded) == [relay_hosts[place].url]
        living = [host for i, host in enumerate(relay_hosts) if i != place]
        assert [host.state()["tensors"] for host in living] == [expected(tensors)] * 2
        assert sender.relays.sent_bytes < 1.7 * sum(t.nbytes for t in tensors.values())
        if how == signal.SIGSTOP:  # it goes on with what it had of the push before, amid the next one
            (tmp_path / "go").touch()
            next_tensors = model(5, megabytes=24, steps=1)
            relay_hosts[place].process.send_signal(signal.SIGCONT)
            assert sender.push(next_tensors, 2) == {}
            assert [host.state()["tensors"] for host in relay_hosts] == [expected(next_tensors)] * 3
        sender.close()


@pytest.mark.gate
def test_the_sender_of_an_earlier_push_is_fenced_off(three: list[Host]) -> None:
    """It goes on sending after another one has begun: nothing of its tensors gets in."""
    stale, sender = Sender(three), Sender(three)
    old, new = model(6), model(7)
    stale.relays.begin(stale.addresses(), 1)
    sender.epoch = 10
    assert sender.push(new, 2) == {}
    send_in_buckets(old.items(), BUCKET, StagingBuffers(shared=False), stale.relays.send)
    stale.relays.end()
    assert len(stale.relays.excluded) == 3
    assert all("was superseded" in reason for reason in stale.relays.excluded.values()), stale.relays.excluded
    assert [host.state() for host in three] == [{"loads": 1, "tensors": expected(new), "damaged": 0}] * 3
    stale.close()
    sender.close()


@pytest.mark.gate
def test_a_token_ends_when_the_push_is_loaded(three: list[Host]) -> None:
    """Before: the token was valid until the next push."""
    sender, tensors = Sender(three), model(8)
    sender.relays.begin(sender.addresses(), 1)
    tokens = {member.engine.url: member.token for member in sender.relays._members.values()}
    send_in_buckets(tensors.items(), BUCKET, StagingBuffers(shared=False), sender.relays.send)
    sender.relays.end()
    assert sender.relays.excluded == {}
    for url, token in tokens.items():
        for path in (OFFER, PIECE):
            request = urllib.request.Request(
                url + path, b"[[0, 0]]", {PIECE_HEADER: "[0, 0]", TOKEN_HEADER: token}
            )
            with pytest.raises(urllib.error.HTTPError) as e:
                urllib.request.urlopen(request)
            assert e.value.code == 403
    sender.close()


@pytest.mark.gate
def test_pieces_without_the_push_token_are_refused(three: list[Host]) -> None:
    content = np.zeros(100, np.uint8)
    piece = piece_of(content)
    sender = Sender(three)
    for opened in (False, True):
        if opened:
            sender.relays.begin(sender.addresses(), 1)
        for token in ("", "guess"):
            headers = {PIECE_HEADER: json.dumps([0, 0]), TOKEN_HEADER: token}
            request = urllib.request.Request(
                three[0].url + PIECE, encode(piece, content, None, "").data, headers
            )
            with pytest.raises(urllib.error.HTTPError) as e:
                urllib.request.urlopen(request)
            assert e.value.code == 403
    sender.relays.end()
    sender.close()


def test_pieces_of_a_file() -> None:
    size = 2 * PIECE_BYTES + 5
    spans = [Piece(0, size, 4, i, "").span for i in range(pieces_in(size))]
    assert [(s.start, s.stop) for s in spans] == [
        (0, PIECE_BYTES), (PIECE_BYTES, 2 * PIECE_BYTES), (2 * PIECE_BYTES, size)
    ]  # fmt: skip
