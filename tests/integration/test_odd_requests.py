"""No request ends an engine: odd requests go to two real SGLang servers behind `rlsys router`."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from rlsys.config import Config
from rlsys.engine.wire import make_session
from tests.helpers.odd_requests import (
    PROMPT,
    OddRequest,
    edge_requests,
    odd_requests,
    random_requests,
    subset,
)
from tests.helpers.servers import running_engine, running_router

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PLAIN = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 7},
}
QUESTION = [{"role": "user", "content": "3+4="}]
MOST_ODD = 120
ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class Servers:
    """URLs."""

    engines: tuple[str, ...]
    router: str


@pytest.fixture(scope="module")
def servers(engine_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two engines, and a router."""
    folder = tmp_path_factory.mktemp("odd")
    for name in "ab":
        (folder / name).mkdir()
    with (
        running_engine(engine_config, folder / "a") as a,
        running_engine(engine_config, folder / "b") as b,
        running_router(folder, "--engine", a, "--engine", b) as router,
    ):
        yield Servers((a, b), router)


def processes(url: str) -> set[int]:
    """Of the engine: it, its scheduler, its detokenizer."""
    port = int(url.rsplit(":", 1)[1])
    (listener,) = {
        c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port
    }
    assert listener is not None
    return {listener, *(p.pid for p in psutil.Process(listener).children(recursive=True))}


async def ask(session: aiohttp.ClientSession, url: str, odd: OddRequest) -> tuple[int, bytes]:
    async with asyncio.timeout(ANSWER_SECONDS), session.post(url + odd.path, data=odd.raw) as answer:
        return answer.status, await answer.read()


def fault_of(status: int, body: bytes) -> str:
    """Return what is wrong with an answer; empty: it is a result, or a refusal in one line."""
    if status == 200:
        if body.startswith(b"data: "):
            return "" if body.endswith(b"data: [DONE]\n\n") else "a stream without an end"
        return "" if isinstance(json.loads(body), dict | list) else "no result"
    if not 400 <= status < 500:
        return f"status {status}"
    error = json.loads(body)["error"]
    message = error["message"] if isinstance(error, dict) else error
    return (
        "" if message and "\n" not in message and "Traceback" not in message else f"not one line: {message!r}"
    )


@pytest.mark.parametrize("kind", ["table", "random"])
async def test_every_odd_request_is_answered_and_the_engines_live(servers: Servers, kind: str) -> None:
    initial_processes = [processes(engine) for engine in servers.engines]
    table = (
        [*edge_requests(), *subset(odd_requests(), MOST_ODD)] if kind == "table" else random_requests(200, 39)
    )
    wrong: list[Any] = []
    statuses = Counter[int]()
    async with make_session() as session:

        async def plain(url: str) -> list[int]:
            async with asyncio.timeout(ANSWER_SECONDS), session.post(f"{url}/generate", json=PLAIN) as answer:
                assert answer.status == 200, await answer.text()
                ids: list[int] = (await answer.json())["output_ids"]
                return ids

        tokens = await plain(servers.router)
        for i, odd in enumerate(table):
            status, body = await ask(session, servers.router, odd)
            statuses[status] += 1
            if fault := fault_of(status, body):
                wrong.append((odd.name, odd.raw[:300], fault, body[:200]))
            if i % 10 == 9:
                assert [await plain(url) for url in (servers.router, *servers.engines)] == [tokens] * 3, (
                    odd.name
                )
    print(f"{kind}: {len(table)} requests, {dict(sorted(statuses.items()))}")
    assert not wrong
    assert [processes(engine) for engine in servers.engines] == initial_processes
    assert len(table) >= 200 and statuses[200] > 10 < statuses[400]


async def test_n_answers_differ_and_a_seed_gives_them_again(servers: Servers) -> None:
    """Before: n equal answers at temperature 1 (W29)."""
    router = servers.router
    options = {"max_tokens": 24, "temperature": 1.0, "n": 8}
    chat = {"messages": QUESTION, **options}
    async with make_session() as session:

        async def texts(path: str, body: dict[str, Any]) -> list[str]:
            async with session.post(router + path, json=body) as answer:
                assert answer.status == 200, await answer.text()
                payload = await answer.json()
            if path == "/generate":
                return [a["text"] for a in payload]
            assert [c["index"] for c in payload["choices"]] == list(range(8))
            assert payload["usage"]["completion_tokens"] <= 8 * 24
            return [c["text"] if "text" in c else c["message"]["content"] for c in payload["choices"]]

        for path, body, seed in (
            ("/v1/chat/completions", chat, {"seed": 3}),
            ("/v1/completions", {"prompt": "3+4=", **options}, {"seed": 3}),
        ):
            assert len(set(await texts(path, body))) > 4
            assert await texts(path, {**body, **seed}) == await texts(path, {**body, **seed})
        sampling = {"max_new_tokens": 24, "temperature": 1.0, "n": 8}
        assert len(set(await texts("/generate", {"input_ids": PROMPT, "sampling_params": sampling}))) > 4
        request = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 24, "temperature": 1.0}}
        outputs = []
        for _ in range(6):
            async with session.post(f"{router}/generate", json=request) as answer:
                outputs.append((await answer.json())["text"])
        assert len(set(outputs)) > 3


async def test_a_streamed_choice_is_the_whole_one(servers: Servers, tmp_path: Path) -> None:
    router = servers.router
    body = {"messages": QUESTION, "max_tokens": 16, "temperature": 1.0, "n": 3, "seed": 11}
    async with make_session() as session:
        async with session.post(f"{router}/v1/chat/completions", json=body) as answer:
            response = await answer.json()
        stream_body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with session.post(f"{router}/v1/chat/completions", json=stream_body) as answer:
            events = (await answer.text()).split("\n\n")[:-1]
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(e[6:]) for e in events[:-1]]
    pieces: dict[int, str] = {}
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        pieces[choice["index"]] = pieces.get(choice["index"], "") + (choice["delta"].get("content") or "")
    assert [pieces[i] for i in range(3)] == [c["message"]["content"] for c in response["choices"]]
    assert chunks[-1]["usage"] == response["usage"]
