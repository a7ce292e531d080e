"""Engines behind the front of a stand-alone router: they join, are brought up to date, and leave."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlsys.core.identity import Identity
from rlsys.gateway.fleet import FleetInterruption
from tests.helpers.front_rig import PROMPT, generate, serving
from tests.helpers.http_engine import HttpEngine


async def test_engines_join_are_brought_up_to_date_and_leave() -> None:
    async with serving() as rig:
        await rig.post("/update_weights_from_disk", {"model_path": "next", "weight_version": 7})
        joiner = HttpEngine()
        url = await joiner.start()
        assert await rig.post("/engines", {"url": url}) == (201, {"url": url})
        status, answer = await rig.post("/engines", {"url": url})
        assert (status, answer["error"]["message"]) == (400, f"{url} is already in the pool")
        await rig.until(lambda: len(rig.fleet.pool.serving()) == 2)
        assert (joiner.loads, joiner.version) == (["next"], 7)
        async with rig.client.delete("/engines", json={"url": rig.urls[0]}) as response:
            assert response.status == 202
        await rig.until(lambda: len(rig.fleet.pool.engines) == 1)
        async with rig.client.get("/engines") as listed:
            rows = (await listed.json())["engines"]
        assert [(r["url"], r["state"]) for r in rows] == [(url, "version 7")]
        assert (await rig.post("/generate", generate()))[0] == 200
        assert len(joiner.requests) == 1
        for bad in ({"url": "ftp://x"}, {"url": 3}, {}):
            assert (await rig.post("/engines", bad))[0] == 400
        assert (await rig.client.delete("/engines?url=http://nobody:1")).status == 400
        await joiner.stop()


async def test_a_slow_weight_load_does_not_block_other_engines() -> None:
    async with serving() as rig:
        await rig.post("/update_weights_from_disk", {"model_path": "next"})
        slow, quick = HttpEngine(), HttpEngine()
        slow.may_load.clear()
        urls = [await e.start() for e in (slow, quick)]
        for url in urls:
            await rig.post("/engines", {"url": url})
        await rig.until(lambda: slow.loads == ["next"] and len(rig.fleet.pool.serving()) == 2)
        slow.version = 1  # it has them, and its cache is not flushed yet
        await rig.fleet.pool.probe()
        assert len(rig.fleet.pool.serving()) == 2
        later = asyncio.create_task(rig.post("/update_weights_from_disk", {"model_path": "later"}))
        await asyncio.sleep(0.05)
        assert not later.done(), "one load after the other"
        slow.may_load.set()
        assert (await later)[1]["weight_version"] == 2
        assert (slow.loads, quick.loads) == (["next", "later"], ["next", "later"])
        quick.may_load.clear()
        last = asyncio.create_task(rig.post("/update_weights_from_disk", {"model_path": "last"}))
        await rig.until(lambda: "last" in quick.loads)
        state = rig.fleet.pool.find(urls[1])
        assert state is not None
        state.mark_dead()  # as probes find
        assert (await last)[1]["weight_version"] == 3
        quick.may_load.set()
        for engine in (slow, quick):
            await engine.stop()


async def test_an_engine_with_other_weights_waits_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as rig:
        stale_engine = HttpEngine(version=3)
        url = await stale_engine.start()
        await rig.post("/engines", {"url": url})
        message = (
            f"engine {url} has weight version 3; expected 0; it serves no requests until POST "
            "/update_weights_from_disk"
        )
        await rig.until(lambda: message in caplog.messages)
        for _ in range(3):
            rig.fleet._load_stale()
        assert caplog.messages.count(message) == 1
        assert len(rig.fleet.pool.serving()) == 1
        await rig.post("/update_weights_from_disk", {"model_path": "next"})
        assert len(rig.fleet.pool.serving()) == 2
        await stale_engine.stop()


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (200, "{}", "is not an SGLang server"),
        (200, "<html>", "is not an SGLang server"),
        (404, "gone", "404: gone"),
    ],
)
async def test_a_server_that_is_no_engine_is_named(status: int, body: str, told: str) -> None:
    async def model_info(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    async with serving() as rig:
        app = web.Application()
        app.router.add_get("/model_info", model_info)
        async with TestServer(app) as stranger:
            url = str(stranger.make_url("")).rstrip("/")
            rig.fleet.add(url)
            state = rig.fleet.pool.find(url)
            assert state is not None
            await rig.until(lambda: told in state.state)
            assert state.state.startswith("dead: ") and not state.alive


async def test_an_unloadable_folder_changes_nothing() -> None:
    async with serving(interruption="retract") as rig:
        status, answer = await rig.post("/update_weights_from_disk", {"model_path": "bad"})
        assert status == 500 and "no engine could load bad" in answer["error"]["message"]
        assert (await rig.post("/generate", generate()))[0] == 200
        assert rig.fleet.pool.version == 0
        status, answer = await rig.post("/update_weights_from_disk", {"model_path": "a", "weight_version": 0})
        assert status == 400 and "expected more than 0" in answer["error"]["message"]


@pytest.mark.parametrize("interruption", ["abort", "retract"])
async def test_no_prefix_outlives_the_weights_that_read_it(interruption: FleetInterruption) -> None:
    async with serving(2, interruption=interruption) as rig:
        await rig.post("/update_weights_from_disk", {"model_path": "a"})
        for engine in rig.engines:
            assert engine.calls.index("flush_cache") > engine.calls.index("update_weights_from_disk")


async def test_prometheus_reads_it() -> None:
    async with serving(2) as rig:
        await rig.post("/generate", generate())
        await rig.post("/generate", {"input_ids": [1000]})
        async with rig.client.get("/metrics") as answer:
            text = await answer.text()
        assert 'rlsys_router_requests_total{code="200",path="/generate"} 1.0' in text
        assert "rlsys_router_refused_total 1.0" in text
        assert f'rlsys_router_engine_up{{engine="{rig.urls[0]}"}} 1.0' in text


async def test_requests_with_a_common_prefix_use_the_same_engine() -> None:
    async with serving(2) as rig:
        for _ in range(3):
            for first in (1, 2):
                await rig.post("/generate", {**generate(), "input_ids": [first, *PROMPT]})
        for engine in rig.engines:
            assert len({tuple(b["input_ids"]) for _, b in engine.requests}) <= 2
        owners = {
            first: {i for i, e in enumerate(rig.engines) for _, b in e.requests if b["input_ids"][0] == first}
            for first in (1, 2)
        }
        assert all(len(o) == 1 for o in owners.values())


CLIENT = {"Authorization": "Bearer the-clients-own-token"}
ADMIN = {"Authorization": "Bearer the-admins-own-token"}


async def test_clients_change_neither_engines_nor_weights() -> None:
    """Before: one token for all; a client could add an engine of his own, which then got others' prompts."""
    async with serving(token="the-clients-own-token") as rig:
        for path, body in (
            ("/engines", {"url": rig.urls[0]}),
            ("/update_weights_from_disk", {"model_path": "x"}),
        ):
            status, answer = await rig.post(path, body, headers=CLIENT)
            assert (status, answer["error"]["code"]) == (403, 403)
        async with rig.client.get("/engines", headers=CLIENT) as listed:
            assert listed.status == 403
        async with rig.client.delete(f"/engines?url={rig.urls[0]}", headers=CLIENT) as response:
            assert response.status == 403
        assert (await rig.post("/generate", generate(), headers=CLIENT))[0] == 200
        assert (len(rig.fleet.pool.engines), rig.engines[0].loads) == (1, [])


async def test_administrators_have_a_token_of_their_own() -> None:
    async with serving(token="the-clients-own-token", admin_token="the-admins-own-token") as rig:
        assert (await rig.post("/engines", {"url": rig.urls[0]}, headers=CLIENT))[0] == 403
        assert (await rig.post("/engines", {"url": rig.urls[0]}))[0] == 401
        assert (await rig.post("/update_weights_from_disk", {"model_path": "x"}, headers=ADMIN))[0] == 200
        for headers in (CLIENT, ADMIN):
            assert (await rig.post("/generate", generate(), headers=headers))[0] == 200
    async with serving(admin_token="the-admins-own-token") as rig:  # loopback: clients need none
        assert (await rig.post("/generate", generate()))[0] == 200
        assert (await rig.post("/engines", {"url": rig.urls[0]}))[0] == 401


@pytest.mark.parametrize(
    ("url", "may"),
    [
        ("http://10.1.2.3:30000", True),
        ("http://gpu-7:30000", True),
        ("http://10.2.2.3:30000", False),
        ("http://169.254.169.254:80", False),
        ("http://gpu-7.evil.org:30000", False),
        ("http://10.1.2.3@evil.org:80", False),
        ("http://evil.org:80/10.1.2.3", False),
    ],
)
async def test_engines_join_from_allowed_hosts_only(url: str, may: bool) -> None:
    """Before: the router asked whatever address it was given, and showed the answer."""
    async with serving(allowed=["10.1.0.0/16", "gpu-7"]) as rig:
        status, answer = await rig.post("/engines", {"url": url})
        assert status == (201 if may else 400)
        assert may or "its host is not allowed" in str(answer) or "expected http://HOST:PORT" in str(answer)
        assert (rig.fleet.pool.find(url) is not None) == may


async def test_by_default_engines_join_only_from_hosts_of_the_pool() -> None:
    async with serving(allowed=()) as rig:
        assert (await rig.post("/engines", {"url": "http://127.0.0.1:9"}))[0] == 201
        assert (await rig.post("/engines", {"url": "http://127.0.0.2:9"}))[0] == 400


async def test_engines_receive_their_keys_and_clients_do_not() -> None:
    keys = Identity(api_key="the engines' key", admin_key="their admins' key")
    async with serving(identity=keys) as rig:
        rig.engines[0].secrets = {"api_key": keys.api_key, "admin_api_key": keys.admin_key}
        await rig.post("/generate", generate())
        await rig.post("/update_weights_from_disk", {"model_path": "next"})
        engine_keys = rig.engines[0].keys
        assert engine_keys["/generate"] == engine_keys["/model_info"] == {"Bearer the engines' key"}
        assert (
            engine_keys["/update_weights_from_disk"]
            == engine_keys["/flush_cache"]
            == {"Bearer their admins' key"}
        )
        async with rig.client.get("/server_info") as answer:
            text = await answer.text()
        assert "incremental_streaming_output" in text
        assert "key" not in text
