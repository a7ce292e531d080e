"""What one tenant can take from the others: time of the event loop, places, turns, bytes on the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from rlsys.core.errors import UserError
from rlsys.tenants import ledger as ledgers
from rlsys.tenants import service as services
from rlsys.tenants.ledger import Change, Ledger, LimitExceeded
from rlsys.tenants.messages import read_request
from rlsys.tenants.requests import Sample, read
from rlsys.tenants.sample_slots import SampleSlots
from rlsys.tenants.service import Service
from rlsys.tenants.wire import BadMessage, packed, put_bytes
from rlsys.tenants.work import Model


@pytest.mark.parametrize("field", [b"\x1a\x00", b"\x10\x01"], ids=["empty data", "numbers"])
def test_security_a06_a_message_of_millions_of_fields_is_refused_early(field: bytes) -> None:
    with pytest.raises(BadMessage, match="a message of more than 4096 fields"):
        read_request(field * 2**24)


def test_security_a06_a_datum_of_many_parts_is_refused() -> None:
    chunk = put_bytes(1, b"")
    assert len(read_request(put_bytes(3, chunk * 64)).data()) == 1
    with pytest.raises(BadMessage, match="more than 64 fields"):
        read_request(put_bytes(3, chunk * 65)).data()


def test_packed_numbers_are_read_in_their_order_and_bounded() -> None:
    assert packed(b"\x05\x96\x01", 2) == [5, 150]
    with pytest.raises(BadMessage, match="more than 1 numbers"):
        packed(b"\x05\x05", 1)
    with pytest.raises(BadMessage, match="more than 10 bytes"):
        packed(b"\xff" * 2**20, 8)


def test_security_a06_a_prompt_of_millions_of_chunks_is_refused() -> None:
    chunks = b",".join([b'{"tokens": []}'] * 1025)
    body = b'{"sampling_session_id": "s", "seq_id": 0, "sampling_params": {}, "prompt": {"chunks": [%b]}}'
    with pytest.raises(UserError, match=r"prompt\.chunks: List should have at most 1024 items"):
        read(Sample, body % chunks)


def test_security_a06_request_bodies_no_longer_needed_are_deleted(tmp_path: Path) -> None:
    """Before: all were kept for ever."""
    ledger = Ledger(tmp_path)
    ledger.add_model("m")
    for seq, kind in enumerate(("create_model", "forward_backward", "forward", "forward_backward")):
        assert ledger.accept("m", seq, kind, kind.encode())
    requests = ledger.unfinished()
    ledger.finish(requests[0], b"", change=Change("m", 0, "a"))
    ledger.finish(requests[1], b"")
    ledger.finish(requests[2], b"")
    ledger.finish(requests[3], b"", failed=True)
    assert [ledger.body(r) for r in requests] == [b"", b"forward_backward", b"", b""]
    assert [ledger.body(r) for r in ledger.done_since("m", 0, "forward_backward")] == [b"forward_backward"]
    assert not ledger.accept("m", 1, "forward_backward", b"forward_backward"), "it is still known"
    ledger.accept("m", 4, "optim_step", b"step")
    ledger.finish(ledger.unfinished()[0], b"", change=Change("m", 1, "b"))
    assert not any(ledger.body(r) for r in requests)


def test_security_a06_bodies_that_wait_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "MAX_BODY_BYTES", 100)
    ledger = Ledger(tmp_path)
    assert ledger.accept("m", 0, "forward", b"x" * 60)
    with pytest.raises(LimitExceeded, match="60 bytes of requests wait for a result"):
        ledger.accept("m", 1, "forward", b"x" * 60)
    ledger.finish(ledger.unfinished()[0], b"")
    assert ledger.accept("m", 1, "forward", b"x" * 60)


async def test_concurrent_requests_do_not_exceed_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("MAX_ROWS", "MAX_MODELS", "MAX_PENDING"):
        monkeypatch.setattr(services, limit, 2)
    with ThreadPoolExecutor(1) as thread:
        service = Service(
            {"bob": Ledger(tmp_path)}, cast(Any, None), thread, cast(Any, None), 1, lambda _: None
        )
        bob = service.tenants["bob"]
        bob.models["m"] = Model("m", bob.ledger)
        additions: list[tuple[Callable[[int], Awaitable[object]], Sized]] = [
            (lambda i: service.new_session(bob), bob.sessions),
            (lambda i: service.new_sampler(bob, f"s{i}", None), bob.samplers),
            (lambda i: service.submit(bob, "m", i + 9, "forward", b""), bob.pending),
            (lambda i: service.new_model(bob, f"n{i}"), bob.models),
        ]
        for add, present in additions:
            results = await asyncio.gather(*(add(i) for i in range(6)), return_exceptions=True)
            assert len(present) == 2
            assert sum(isinstance(r, LimitExceeded) for r in results) >= 4, results
        assert len(bob.ledger.sessions()) == len(bob.ledger.samplers()) == 2


class Line:
    """Who has places, by name, in the order in which they got them."""

    def __init__(self, samples: int, adapters: int) -> None:
        self.places = SampleSlots(samples, adapters)
        self.inside: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def ask(self, name: str, tenant: str, adapter: str | None, samples: int = 1) -> None:
        async def hold() -> None:
            async with self.places.take(tenant, adapter, samples):
                self.inside.append(name)
                await self._ends[name].wait()

        self._ends[name] = asyncio.Event()
        self._tasks.append(asyncio.create_task(hold()))
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_security_a06_many_samples_of_one_tenant_do_not_starve_another() -> None:
    line = Line(samples=4, adapters=8)
    await line.ask("b0", "bob", None, samples=128)  # all places
    for i in range(1, 4):
        await line.ask(f"b{i}", "bob", None, samples=4)
    await line.ask("a0", "alice", None)
    assert line.inside == ["b0"]
    await line.end("b0")
    assert line.inside == ["b0", "b1"]
    await line.end("b1")
    assert line.inside == ["b0", "b1", "a0"], "alice's turn; b2 does not fit beside it"
    await line.end("a0")
    assert line.inside == ["b0", "b1", "a0", "b2"]


async def test_security_a21_adapters_beyond_those_of_a_batch_wait_and_others_pass() -> None:
    line = Line(samples=9, adapters=2)
    for i in range(3):
        await line.ask(f"lora{i}", "bob", f"adapter{i}")
    await line.ask("base", "bob", None)
    await line.ask("again", "alice", "adapter0")
    assert line.inside == ["lora0", "lora1", "base"], (
        "the third adapter is next: none of the two goes before it"
    )
    await line.end("lora1")
    assert line.inside == ["lora0", "lora1", "base", "lora2", "again"]
