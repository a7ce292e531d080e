"""Samples of tenants under which an engine dies: one try more, then refused; over starts of the server, too (A2)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlsys.core.identity import ANONYMOUS
from rlsys.engine.wire import DEFAULT_LIMITS, make_session
from rlsys.tenants.ledger import Ledger
from rlsys.tenants.requests import Sample
from rlsys.tenants.sampler import Engine, build_body
from rlsys.tenants.service import Service, Tenant
from rlsys.tenants.work import Work

DEADLY = 66
"""The token of which this engine dies."""


class DyingEngine:
    """Cuts every connection when it gets the token DEADLY, and serves again at once."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self._open: list[web.Request] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._healthy)
        return app

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body["input_ids"])
        self._open.append(request)
        await asyncio.sleep(0.02)
        if DEADLY in body["input_ids"]:
            for open_request in self._open:
                if open_request.transport is not None:
                    open_request.transport.abort()
            self._open.clear()
        meta = {"output_token_logprobs": [[-0.5, 7, None]], "finish_reason": {"type": "length"}}
        return web.json_response({"meta_info": meta})


def sample_body(ids: list[int], **params: Any) -> bytes:
    prompt = {"chunks": [{"tokens": ids, "type": "encoded_text"}]}
    body = {"sampling_session_id": "s:sample:0", "seq_id": 0, "prompt": prompt}
    params = {"max_tokens": 1, **params}
    return Sample.model_validate({**body, "sampling_params": params}).model_dump_json().encode()


@asynccontextmanager
async def serving(folder: Path, fake: DyingEngine) -> AsyncIterator[tuple[Service, Tenant]]:
    """A service without a trainer."""
    async with TestServer(fake.app()) as server, make_session() as session:
        engine = Engine(str(server.make_url("")).rstrip("/"), session, ANONYMOUS, DEFAULT_LIMITS, 10.0)
        with ThreadPoolExecutor(1) as thread:
            ledgers = {"bob": Ledger(folder)}
            service = Service(ledgers, cast(Work, None), thread, engine, 4, lambda _: None)
            running = asyncio.create_task(service.run())
            await asyncio.sleep(0)
            try:
                yield service, service.tenants["bob"]
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


async def result(service: Service, tenant: Tenant, number: int) -> tuple[bool, str]:
    for _ in range(100):
        outcome = await service.result(tenant, f"s:sample:0:{number}", 0.2)
        if outcome is not None:
            return outcome[1], outcome[2].decode(errors="replace")
    raise AssertionError("no result")


async def until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def test_a_sample_that_kills_the_engine_is_retried_once(tmp_path: Path) -> None:
    """Before: three times; and its neighbours were given up with it."""
    fake = DyingEngine()
    async with serving(tmp_path, fake) as (service, bob):
        await service.new_sampler(bob, "s:sample:0", None)
        await service.submit(bob, "s:sample:0", 0, "sample", sample_body([1, DEADLY]))
        for number in (1, 2):
            await service.submit(bob, "s:sample:0", number, "sample", sample_body([number]))
        failed, message = await result(service, bob, 0)
        assert fake.asked.count([1, DEADLY]) == 2
        assert failed and "died" in message and "s:sample:0:0" in message, message
        assert [(await result(service, bob, number))[0] for number in (1, 2)] == [False, False]


async def test_an_engines_death_counts_over_starts_of_the_server(tmp_path: Path) -> None:
    """Before: the next server asked at once, its engine died, and the launch ended."""
    ledger = Ledger(tmp_path)
    ledger.add_sampler("s:sample:0", None)
    fake = DyingEngine()

    async def gone(*_: Any) -> None:
        await asyncio.sleep(3600)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_wait_healthy", gone)  # it ends with the server
        async with serving(tmp_path, fake) as (service, bob):
            await service.submit(bob, "s:sample:0", 0, "sample", sample_body([DEADLY]))
            await until(lambda: len(fake.asked) == 1)
            await asyncio.sleep(0.1)
    async with serving(tmp_path, fake) as (service, bob):
        failed, message = await result(service, bob, 0)
        assert failed and "s:sample:0:0" in message
        assert len(fake.asked) == 1


async def test_a_sample_that_stood_first_at_too_many_starts_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add_sampler("s:sample:0", None)
    ledger.accept("s:sample:0", 0, "sample", sample_body([1]))
    for _ in range(3):
        ledger.unfinished()
    fake = DyingEngine()
    async with serving(tmp_path, fake) as (service, bob):
        failed, message = await result(service, bob, 0)
    assert failed and json.loads(message)["category"] == "server"
    assert not fake.asked


def test_each_of_a_tenants_samples_has_a_seed_of_its_own() -> None:
    """Before: none without the client's, which a deterministic engine takes for 42 (W29)."""

    def seed(number: int, **params: Any) -> Any:
        sample = Sample.model_validate_json(sample_body([1], **params))
        return build_body(sample, None, number)["sampling_params"].get("sampling_seed")

    seeds = [seed(number) for number in range(4)]
    assert all(isinstance(s, int) for s in seeds), seeds
    assert len(set(seeds)) == 4
    assert seeds == [seed(number) for number in range(4)], "made again it is the same"
    assert seed(1, seed=5) == 6


def test_a_ledger_of_an_earlier_version_counts_deaths_from_now_on(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger._db.execute("ALTER TABLE requests DROP COLUMN deaths")
    ledger.accept("s:sample:0", 0, "sample", b"{}")
    ledger.close()
    again = Ledger(tmp_path)
    (request,) = again.unfinished()
    assert (request.deaths, again.add_death(request), again.add_death(request)) == (0, 1, 2)
    assert [r.deaths for r in Ledger(tmp_path).unfinished()] == [2]


async def test_sampling_after_a_restart_reports_the_recovery_of_the_engine(tmp_path: Path) -> None:
    """Its restarts are then forgiven: before, a server that only samples had launch.max_restarts in all."""
    fake, worked = DyingEngine(), list[bool]()
    async with serving(tmp_path, fake) as (service, bob):
        service._on_recovery = lambda: worked.append(True)
        await service.new_sampler(bob, "s:sample:0", None)
        for number, ids in enumerate(([1], [DEADLY], [2], [3])):
            await service.submit(bob, "s:sample:0", number, "sample", sample_body(ids))
            await result(service, bob, number)
        assert len(worked) == 1
