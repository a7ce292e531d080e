"""Engines of a router that join, leave, restart, or hold wrong weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core.errors import RunError, UserError
from rlsys.core.types import Segment, Status
from rlsys.engine.client import EngineClient
from rlsys.router.attest import Bounds
from rlsys.router.dispatch import INTERRUPT_SECONDS
from rlsys.router.pool import Pool
from rlsys.router.push import PROBE_SECONDS
from tests.helpers.router_rig import (
    A,
    B,
    check,
    routing,
    sample,
)
from tests.helpers.scripted_engine import (
    Network,
    ScriptedEngine,
    checksums,
)

pytestmark = pytest.mark.virtual_clock


async def test_an_engine_that_joins_gets_the_weights_before_it_serves() -> None:
    async with routing(ScriptedEngine(A)) as rig:
        await rig.push()
        joiner = ScriptedEngine(B)
        rig.join(joiner)
        await asyncio.sleep(3)
        await asyncio.gather(*(rig.start(sample(i)) for i in range(8)))
        assert not joiner.prompts
        assert rig.router.stale_engines == [B]
        await rig.push(only_stale=True)
        await asyncio.gather(*(rig.start(sample(10 + i)) for i in range(8)))
        assert joiner.prompts


async def test_a_removed_engine_finishes_its_requests_and_leaves() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        await rig.push()
        samples = [sample(i) for i in range(4)]
        tasks = [rig.start(s) for s in samples]
        await asyncio.sleep(0.05)
        rig.router.remove_engine(B)
        later = [rig.start(sample(10 + i)) for i in range(4)]
        assert rig.router.engine_states()[B] == "draining: 2 requests"
        figures = rig.router.engine_metrics()[B]
        assert (figures["serving"], figures["requests"], figures["state"]) == (
            False,
            2,
            "draining: 2 requests",
        )
        for task in tasks + later:
            check(await task, versions={1})
        assert {s.resumes for s in samples} == {0}
        assert len(rig.engines[1].prompts) == 2
        generated_tokens = rig.engines[1].generated
        await asyncio.sleep(3)
        assert rig.router.engine_states() == {A: "version 1"}
        assert generated_tokens
        with pytest.raises(UserError, match=r"http://b:1: no such engine in the pool"):
            rig.router.remove_engine(B)


async def test_a_server_fault_costs_a_back_off_and_no_token() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        await rig.push()
        step = rig.engines[0]._generate_token
        fault = {"type": "abort", "status_code": 500, "message": "oom"}
        rig.engines[0]._generate_token = lambda request: fault  # type: ignore
        samples = [sample(i) for i in range(4)]
        tasks = [rig.start(s) for s in samples]
        for task in tasks:
            check(await task, versions={1})
        assert rig.router.stats()["engine_faults"] == 2
        assert {s.engine for s in samples} == {B}
        rig.engines[0]._generate_token = step  # type: ignore
        await asyncio.sleep(3)
        later_samples = [await rig.start(sample(10 + i)) for i in range(2)]
        assert later_samples[0].engine == A, "tried again after the back-off"


async def test_an_open_weight_update_is_ended_before_a_push() -> None:
    async with routing() as rig:
        rig.engine.update_open = True
        await rig.push()
        check(await rig.start(sample()), versions={1})


async def test_a_wrong_checksum_of_a_comparable_tensor_quarantines_the_engine() -> None:
    bounds = Bounds(1e-6, 1e-4, max_unknown_share=0.5)
    async with routing(ScriptedEngine(A), ScriptedEngine(B), bounds=bounds) as rig:
        metrics = await rig.push(sums=checksums(1) | {"packed": "trainer's"})
        assert (metrics["push_tensors_equal"], metrics["push_tensors_unknown"]) == (2, 1)
        with pytest.raises(RunError, match=r"holds other values in 1 tensor\(s\), first: layers.1.norm"):
            await rig.push(sums=checksums(2) | {"layers.1.norm": "other"})
        assert rig.router.engine_states()[A].startswith("quarantined: holds other values")


async def test_an_engine_with_wrong_weights_is_quarantined() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        metrics = await rig.push(wrong=(B,))
        assert metrics["push_canary_mean"] > 1
        assert rig.router.engine_states()[B].startswith("quarantined: canary log-probs differ")
        await asyncio.gather(*(rig.start(sample(i)) for i in range(4)))
        assert not rig.engines[1].prompts
        with pytest.raises(
            RunError,
            match=r"no engine can serve weight version 2, because .*mean 2.* \(bound 1e-06: weights.canary_mean\)",
        ):
            await rig.push(wrong=(A,))


HALF = Bounds.of(Config.model_validate({"model": {"path": "some/model", "dtype": "bfloat16"}}))


async def test_rounding_is_warned_of_where_tensors_agree() -> None:
    """Half precision: up to five times the bounds, which a model with experts exceeds by rounding alone. Bounds that
    somebody set are kept to, and so is what no checksum speaks for."""
    async with routing(bounds=HALF) as rig:
        metrics = await rig.push(sums=checksums(1), off=0.05)
        assert metrics["push_canary_warnings"] == 1 and metrics["push_canary_mean"] > HALF.mean
        assert rig.router.engine_states() == {A: "version 1"}
        with pytest.raises(RunError, match=r"canary log-probs differ"):
            await rig.push(sums=checksums(2), off=0.8)
    for bounds, sums in ((HALF, None), (Bounds(0.02, 0.5), checksums(1))):
        async with routing(bounds=bounds) as rig:
            with pytest.raises(RunError, match=r"canary log-probs differ"):
                await rig.push(sums=sums, off=0.05)


async def test_a_restart_ends_a_quarantine() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        await rig.push(wrong=(B,))
        rig.engines[1].die()
        await asyncio.sleep(5)
        rig.engines[1].restart()
        await asyncio.sleep(5)
        assert rig.router.stale_engines == [B]
        await rig.push(only_stale=True)
        assert rig.router.stats()["engines_serving"] == 2


async def test_a_push_waits_for_an_engine_that_is_being_restarted() -> None:
    async with routing() as rig:
        await rig.push()
        rig.engine.die()
        asyncio.get_running_loop().call_later(25, rig.engine.restart)
        await rig.push()
        check(await rig.start(sample()), versions={2})


async def test_a_router_makes_one_attempt_to_begin_a_push() -> None:
    """Who waits is the caller, for all routers of a run; until it gives up, no attempt counts as a failed push."""
    async with routing() as rig:
        rig.engine.die()
        assert await rig.router.begin_push(1) == []
        rig.engine.restart()
        rig.engine.hung = True
        for _ in range(4):
            assert await rig.router.begin_push(1) == []
        rig.engine.wake()
        (address,) = await rig.router.begin_push(1)
        assert address.url == A and not rig.router.all_quarantined


async def test_a_push_times_out_and_pauses_between_probes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, probe = [], Pool.probe

    async def counted(self: Pool) -> None:
        looks.append(1)
        await probe(self)

    monkeypatch.setattr(Pool, "probe", counted)
    async with routing(push_timeout_s=40.0) as rig:
        rig.engine.die()
        looks_before = len(looks)
        with pytest.raises(
            RunError, match=r"no engine was ready for weight version 1 within 40 s: http://a:1 dead"
        ):
            await rig.push()
        assert 1 < len(looks) - looks_before <= 2 * (40.0 / PROBE_SECONDS + 1)  # its own, and the watch's


async def test_a_push_succeeds_without_an_engine_that_dies_during_it() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        await rig.push()
        await rig.router.begin_push(2)
        rig.version = 2
        rig.engines[0].load(2)
        rig.engines[1].die()
        await rig.router.end_push(2, [])
        rig.router.resume()
        assert rig.router.engine_states() == {A: "version 2", B: "dead"}
        check(await rig.start(sample()), versions={2})


async def test_an_engine_that_is_slow_to_give_back_is_not_dead() -> None:
    """Its aborts are lost for some seconds; within INTERRUPT_SECONDS that costs nothing."""
    async with routing() as rig:
        samples, tasks = await rig.start_samples(2)
        abort, until = rig.engine._abort_request, asyncio.get_running_loop().time() + INTERRUPT_SECONDS / 2
        rig.engine._generate_token = lambda request: None  # type: ignore[method-assign]  # it makes no token either
        step = ScriptedEngine._generate_token

        def late(body: dict[str, Any]) -> tuple[int, str]:
            if asyncio.get_running_loop().time() < until:
                return 200, ""
            rig.engine._generate_token = partial(step, rig.engine)  # type: ignore[method-assign]
            return abort(body)

        rig.engine._abort_request = late  # type: ignore[method-assign]
        await rig.router.interrupt()
        assert asyncio.get_running_loop().time() >= until
        assert {s.status for s in samples} == {Status.PARKED}
        assert rig.router.stats()["engine_deaths"] == 0
        for task in tasks:
            task.cancel()


async def test_an_interrupt_waits_while_requests_keep_returning() -> None:
    """Before: 60 seconds for all of an engine's samples, however many it had; then it counted as dead."""
    async with routing() as rig:
        samples, tasks = await rig.start_samples(4)
        abort, loop, rids = rig.engine._abort_request, asyncio.get_running_loop(), list(rig.engine.requests)
        rig.engine._generate_token = lambda request: None  # type: ignore[method-assign]
        step, start = ScriptedEngine._generate_token, loop.time()

        def slowly(body: dict[str, Any]) -> tuple[int, str]:
            """One more every 40 seconds."""
            rig.engine._generate_token = lambda request: (  # type: ignore[method-assign]
                step(rig.engine, request) if request.aborted else None
            )
            due = rids[: int((loop.time() - start) / (INTERRUPT_SECONDS * 2 / 3))]
            for rid in set(due) & set(rig.engine.requests):
                abort({"rid": rid})
            return 200, ""

        rig.engine._abort_request = slowly  # type: ignore[method-assign]
        await rig.router.interrupt()
        assert loop.time() - start > 2 * INTERRUPT_SECONDS
        assert {s.status for s in samples} == {Status.PARKED}
        assert rig.router.stats()["engine_deaths"] == 0
        for task in tasks:
            task.cancel()


async def test_requests_of_an_earlier_process_are_aborted_before_the_first_push() -> None:
    """A rollout process was killed; the engine still makes tokens for it when the next one comes."""
    async with routing() as rig:
        network: Any = Network(rig.engine)
        stream = EngineClient(A, network).generate(
            [1, 2], rid="old", max_new_tokens=90, temperature=1.0, seed=3, stop_ids=[]
        )
        await anext(stream)
        assert rig.engine.requests
        drain_task = asyncio.create_task(drain(stream))
        await rig.push()
        assert not rig.engine.requests, "aborted before the first push"
        assert await drain_task == "abort"
        assert rig.router.stats()["lost"] == 0, "what it made before is nobody's loss"


async def drain(stream: AsyncGenerator[Segment, None]) -> str | None:
    """How it ended."""
    finish = None
    async for segment in stream:
        finish = segment.finish
    return finish
