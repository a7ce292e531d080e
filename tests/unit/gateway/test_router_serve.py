"""The process of `rlsys router`: it listens, ends when asked to, and says in one line why it cannot begin."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import replace

import aiohttp
import pytest

from rlsys.cli import router
from rlsys.cli.main import main
from rlsys.core.errors import RunError, UserError
from rlsys.gateway.fleet import Fleet
from rlsys.gateway.front import FrontLimits
from rlsys.gateway.serve import RouterOptions, Tokens, serve

Handlers = dict[int, Callable[[], None]]


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Handlers:
    """Of signals; this process keeps its own."""
    signal_handlers: Handlers = {}
    monkeypatch.setattr(
        asyncio.SelectorEventLoop,
        "add_signal_handler",
        lambda self, number, call: signal_handlers.update({number: call}),
    )
    return signal_handlers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_listens_until_a_signal_ends_it(
    number: signal.Signals, handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    running = asyncio.ensure_future(serve(RouterOptions([], port=0), Tokens()))
    while not (messages := [r.getMessage() for r in caplog.records if "listening on" in r.getMessage()]):
        await asyncio.wait({running}, timeout=0.01)
        assert not running.done(), running.exception()
    (line,) = messages
    assert line.endswith(" with 0 engines")
    url = line.split()[2]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/engines") as answer:
            assert answer.status in (200, 404)
        handlers[number]()
        await running
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{url}/engines")


async def test_a_port_in_use_and_an_invalid_host_are_user_errors(handlers: Handlers) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"^--port {port}: the port is in use on 127.0.0.1; 0 selects"):
            await serve(RouterOptions([], port=port), Tokens())
    with pytest.raises(UserError, match=r"^--host 192\.0\.2\.1 --port 0: "):  # an address of nobody's machine
        await serve(RouterOptions([], port=0, host="192.0.2.1"), Tokens("token"))
    with pytest.raises(UserError, match=r"^--host a{64}\.org: expected a host name or address$"):
        await serve(RouterOptions([], port=0, host="a" * 64 + ".org"), Tokens("token"))


async def test_a_watch_that_fails_ends_it_with_the_error(
    handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: Fleet) -> None:
        raise RunError("nobody watches the engines any more")

    monkeypatch.setattr(Fleet, "watch", fails)
    with pytest.raises(RunError, match="nobody watches"):
        await serve(RouterOptions([], port=0), Tokens())


def test_the_command_line_sets_the_router_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[RouterOptions] = []
    monkeypatch.setattr(router, "run_router", options.append)
    assert main(["router", "--port", "7", "--engine", "http://a:1", "--engine", "http://b:2"]) == 0
    words = "--host localhost --strategy least_tokens --interruption abort --vocab-size 9 --queue-seconds 0.5"
    words += " --max-body-mb 1.5 --concurrency 3 --queue 0"
    assert main(["router", "--port", "0", *words.split()]) == 0
    assert options == [
        RouterOptions(["http://a:1", "http://b:2"], 7),
        RouterOptions(
            [],
            0,
            "localhost",
            strategy="least_tokens",
            interruption="abort",
            vocab_size=9,
            queue_seconds=0.5,
            limits=replace(FrontLimits(), body_bytes=3 * 2**19, concurrency=3, queue=0),
        ),
    ]
