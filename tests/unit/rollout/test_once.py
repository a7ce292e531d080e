"""Connections between trainer and rollout process break: a command is carried out once, and its answer arrives."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsys.core.errors import RunError
from rlsys.core.messages import encode
from rlsys.core.owner import KEY_HEADER, START_HEADER
from rlsys.rollout import client as client_module
from rlsys.rollout.client import RolloutClient
from rlsys.rollout.command_dedup import CommandDedup
from rlsys.rollout.protocol import RECONNECT_SECONDS, REQUEST_HEADER, StepRequest
from tests.helpers.proxy import Proxy
from tests.helpers.rollout_rig import ids, make_config, rig, settle
from tests.helpers.service_rig import OWNER, served, ticking


@pytest.fixture
def proxies() -> Iterator[list[Proxy]]:
    open_proxies: list[Proxy] = []
    yield open_proxies
    for proxy in open_proxies:
        proxy.close()


def behind(client: RolloutClient, proxies: list[Proxy]) -> RolloutClient:
    """The same rollout process, through a proxy that can cut."""
    socket_path = client._socket.with_name(f"proxy{len(proxies)}")
    proxies.append(Proxy(lambda: client._socket, socket_path))
    return RolloutClient(socket_path, OWNER.key)


async def test_a_take_survives_a_broken_connection(
    tmp_path: Path, proxies: list[Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    """Before: a RunError of the trainer, which ended the launch."""
    caplog.set_level(logging.WARNING)
    async with rig(make_config(tmp_path)) as r, served(r) as direct:
        client = behind(direct, proxies)
        await ticking(r, client.restore, 0)
        await r.start()
        takes = []
        plain = r.manager.take

        async def take(step: int) -> object:
            takes.append(step)
            return await plain(step)

        r.manager.take = take  # type: ignore[method-assign,assignment]
        take_task = asyncio.ensure_future(asyncio.to_thread(client.take, 1))
        for _ in range(3):
            while not r.manager._command.locked():
                await asyncio.sleep(0.001)
            proxies[0].cut()
            await asyncio.sleep(0.01)
            proxies[0].heal()
        while not take_task.done():
            r.router.tick()
            await asyncio.sleep(0.001)
        batch = await take_task
        assert batch is not None and ids(batch.groups) == [0, 1]
        assert takes == [1]
    retries = [m for m in caplog.messages if "retrying" in m]
    assert retries and "in take; retrying" in retries[0]


async def test_a_result_lost_with_its_connection_is_sent_again(tmp_path: Path, proxies: list[Proxy]) -> None:
    """The work was done when the connection broke: begin_push hands out one version, not two."""
    async with rig(make_config(tmp_path)) as r, served(r) as direct:
        client = behind(direct, proxies)
        await ticking(r, client.restore, 0)
        plain = client._http
        broken: list[tuple[int, bytes]] = []

        def breaks(*args: object, **kwargs: object) -> tuple[int, bytes]:
            answer = plain(*args, **kwargs)  # type: ignore[arg-type]
            if not broken:
                broken.append(answer)
                raise client_module.ConnectionBroken("IncompleteRead")
            return answer

        client._http = breaks  # type: ignore[method-assign,assignment]
        ticket = await ticking(r, client.begin_push)
        assert ticket.weight_version == 1 == r.buffer.versions.newest
        assert r.router.calls.count("begin 1") == 1


async def test_a_repeated_command_raises_the_original_error(tmp_path: Path) -> None:
    dedup, raised = CommandDedup(), []

    async def fail() -> None:
        raised.append(1)
        raise RunError("no")

    for _ in range(2):
        with pytest.raises(RunError, match="no"):
            await dedup.run_once("a", fail)
    assert len(raised) == 1


async def endless(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("ended")


async def gone(once: CommandDedup, name: str, ended: list[str]) -> None:
    """A command whose connection breaks while it is carried out."""
    task = asyncio.ensure_future(once.run_once(name, lambda: endless(ended)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def test_another_command_ends_the_one_of_a_trainer_that_was_replaced() -> None:
    """A take that waits for samples would keep the restore of the next trainer waiting."""
    dedup, endings = CommandDedup(), list[str]()
    await gone(dedup, "take of the old one", endings)
    assert not endings
    await dedup.run_once("restore of the new one", lambda: asyncio.sleep(0))
    assert endings


async def test_two_connections_with_one_name_wait_for_one_work() -> None:
    """Both come while the command before is still being ended, which takes a moment."""
    dedup, end_event, carried_out = CommandDedup(), asyncio.Event(), []

    async def ends_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await end_event.wait()

    async def push() -> dict[str, float]:
        carried_out.append(1)
        return {}

    earlier_command = asyncio.ensure_future(dedup.run_once("take", ends_slowly))
    await settle()
    pushes = [asyncio.ensure_future(dedup.run_once("push", push)) for _ in range(2)]
    await settle()
    end_event.set()
    assert await asyncio.gather(*pushes) == [{}, {}]
    assert len(carried_out) == 1
    assert earlier_command.cancelled()


@pytest.mark.virtual_clock
async def test_a_command_is_cancelled_if_its_client_does_not_reconnect() -> None:
    dedup, endings = CommandDedup(), list[str]()
    await gone(dedup, "take", endings)
    await asyncio.sleep(RECONNECT_SECONDS - 1)
    assert not endings
    await gone(dedup, "take", endings)  # came back, and broke again: the time begins anew
    await asyncio.sleep(RECONNECT_SECONDS - 1)
    assert not endings
    await asyncio.sleep(2)
    assert endings


@pytest.mark.virtual_clock
async def test_a_command_runs_again_if_its_client_reconnects_too_late() -> None:
    dedup, endings = CommandDedup(), list[str]()
    await gone(dedup, "take", endings)
    await asyncio.sleep(RECONNECT_SECONDS + 1)
    assert await dedup.run_once("take", lambda: asyncio.sleep(0, {"a": 1.0})) == {"a": 1.0}


async def test_a_trainer_replaced_during_a_take_does_not_block_its_successor(tmp_path: Path) -> None:
    """Over HTTP, with a name: the command outlives its connection, until the next trainer restores."""
    async with rig(make_config(tmp_path)) as r, served(r) as client:
        await ticking(r, client.restore, 0)
        await r.start()
        _, writer = await asyncio.open_unix_connection(client._socket)
        body = encode(StepRequest(1))
        headers = (
            f"Host: x\r\n{KEY_HEADER}: {OWNER.key}\r\n{START_HEADER}: 1\r\n{REQUEST_HEADER}: old\r\n"
            f"Content-Length: {len(body)}"
        )
        writer.write(f"POST /take HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body)
        await writer.drain()
        while not r.manager._command.locked():
            await asyncio.sleep(0.001)
        writer.close()
        await asyncio.sleep(0.05)
        assert r.manager._command.locked()
        # No ticks: the engine gives no answers, so the take cannot end before the restore cancels it.
        await asyncio.to_thread(RolloutClient(client._socket, OWNER.key, start=2).restore, 0)
        assert not r.manager._command.locked()
        assert r.buffer.last_taken_step == 0


async def test_a_trainer_replaced_while_sending_a_command_is_refused(tmp_path: Path) -> None:
    """It was paused between the head of its command and the body; before: its push interrupted the new one's."""
    async with rig(make_config(tmp_path)) as r, served(r) as client:
        await ticking(r, client.restore, 0)
        reader, writer = await asyncio.open_unix_connection(client._socket)
        body = encode(None)
        headers = (
            f"Host: x\r\n{KEY_HEADER}: {OWNER.key}\r\n{START_HEADER}: 1\r\n{REQUEST_HEADER}: old\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close"
        )
        writer.write(f"POST /begin_push HTTP/1.1\r\n{headers}\r\n\r\n".encode())
        await writer.drain()
        await ticking(r, RolloutClient(client._socket, OWNER.key, start=2).restore, 0)
        writer.write(body)
        answer = await reader.read()
        writer.close()
        assert b"was replaced by start 2" in answer
        assert r.buffer.versions.newest == 0


def test_a_rollout_process_unreachable_for_too_long_is_reported_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time, in one sentence; a status that is asked for is tried again, too."""
    current_time = [0.0]
    monkeypatch.setattr(client_module.time, "monotonic", lambda: current_time[0])
    monkeypatch.setattr(
        client_module.time, "sleep", lambda s: current_time.__setitem__(0, current_time[0] + s)
    )
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "rollout"))  # nobody listens
        client = RolloutClient(tmp_path / "rollout", "")
        with pytest.raises(
            RunError, match="rollout process: take: no connection for 30 s: ConnectionRefusedError"
        ):
            client.take(1)
        assert RECONNECT_SECONDS <= current_time[0] < RECONNECT_SECONDS + 1
        with pytest.raises(
            RunError, match="rollout process: status: no connection for 30 s: ConnectionRefusedError"
        ):
            client.leaving()
