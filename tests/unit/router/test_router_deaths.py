"""Engines of a router that die or hang: no token is lost that was streamed, none is made twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.core.types import Status
from rlsys.core.weight_updates import Canary
from tests.helpers.router_rig import (
    CANARY_IDS,
    PROMPT,
    A,
    B,
    check,
    positions_with_routes,
    routing,
    sample,
)
from tests.helpers.scripted_engine import (
    ScriptedEngine,
    canary_logprobs,
)

pytestmark = pytest.mark.virtual_clock


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 0.5))
async def test_tokens_streamed_before_an_engine_death_are_kept(moment: float) -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        await rig.push()
        samples = [sample(i, group=0) for i in range(3)]
        tasks = [rig.start(s) for s in samples]
        await asyncio.sleep(moment)
        lengths = [len(s.response_ids) for s in samples]
        next(e for e in rig.engines if e.prompts or moment < 0.01).die()
        for s, task, length in zip(samples, tasks, lengths, strict=True):
            prefix = s.response_ids[:length]
            check(await task, versions={1})
            assert s.response_ids[:length] == prefix
            missing = set(range(len(PROMPT) + len(s.response_ids) - 1)) - set(positions_with_routes(s))
            assert missing == set(range(s.routes[0].start)), "only what died with the engine"
        assert (await rig.settle())["lost"] == 0


async def test_a_sample_survives_the_death_and_return_of_the_only_engine() -> None:
    async with routing() as rig:
        await rig.push()
        s = sample()
        task = rig.start(s)
        await asyncio.sleep(0.15)
        rig.engine.die()
        await asyncio.sleep(10)
        token_count = len(s.response_ids)
        assert (s.status, token_count, rig.router.stale_engines) == (Status.PARKED, 12, [])
        rig.engine.restart()
        await asyncio.sleep(5)
        assert rig.router.stale_engines == [A]
        assert len(s.response_ids) == token_count, "nothing comes from an engine without the current weights"
        await rig.push(only_stale=True)
        check(await task, versions={1})
        stats = await rig.settle()
        assert (stats["lost"], stats["engine_deaths"], s.resumes) == (0, 1, 1)


async def test_a_restart_between_two_probes_is_noticed() -> None:
    async with routing() as rig:
        await rig.push()
        await asyncio.sleep(0.3)  # the next probe is not yet
        rig.engine.restart()
        s = sample()
        task = rig.start(s)
        await asyncio.sleep(0.1)
        assert (list(s.response_ids), s.status) == ([], Status.PARKED)
        assert rig.router.stats()["discarded_tokens"] == 4
        assert rig.router.stale_engines == [A]
        await rig.push(only_stale=True)
        check(await task, versions={1})


async def test_an_idle_restart_is_noticed_by_a_probe() -> None:
    async with routing() as rig:
        await rig.push()
        rig.engine.restart()
        await asyncio.sleep(3)
        assert rig.router.stale_engines == [A]


async def test_an_engine_that_hangs_does_not_hold_up_an_interrupt() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        samples, tasks = await rig.start_samples(4)
        rig.engines[0].hung = True
        await rig.router.interrupt()
        assert rig.router.engine_states()[A] == "dead"
        assert {s.status for s in samples} == {Status.PARKED}
        rig.router.resume()
        for task in tasks:
            check(await task, versions={1})


async def test_probes_detect_a_hung_engine(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody interrupts: without them its samples would wait for ever, while another engine has room."""

    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        _, tasks = await rig.start_samples(4)
        rig.engines[0].hung = True
        await asyncio.sleep(20)
        assert rig.router.engine_states()[A] == "version 1", "it may still come to itself"
        await asyncio.sleep(20)
        assert rig.router.engine_states()[A] == "dead"
        assert f"{A}: has not answered 5 probes of 5 s" in caplog.messages
        for task in tasks:
            check(await task, versions={1})
        rig.engines[0].wake()
        await asyncio.sleep(40)
        assert rig.router.engine_states()[A] == "version 1", "it has its weights still"
        assert rig.router.stats()["engine_deaths"] == 1
        assert (await rig.settle())["lost"] == 0


@pytest.mark.parametrize("busy", ["prefill", "stutter"])
async def test_an_engine_that_only_takes_long_is_no_dead_one(busy: str) -> None:
    """Its scheduler is another process than the one that answers probes; one late answer is no silence."""

    async with routing() as rig:
        _, (task,) = await rig.start_samples()
        for _ in range(10):
            if busy == "prefill":
                rig.engine.paused = "retract"
            else:
                rig.engine.hung = True
            await asyncio.sleep(20)
            rig.engine.paused = None
            rig.engine.wake()
            await asyncio.sleep(7)  # a probe of that time stays without an answer
        check(await task, versions={1})
        assert rig.router.stats()["engine_deaths"] == 0


async def test_an_engine_that_recovers_returns_its_requests() -> None:
    """The abort that it never answered is repeated; it is as alive as before, and costs no push."""

    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        samples, tasks = await rig.start_samples(4)
        rig.engines[0].hung = True
        asyncio.get_running_loop().call_later(15, rig.engines[0].wake)
        await rig.router.interrupt()
        assert rig.router.engine_states() == {A: "version 1", B: "version 1"}
        assert not any(s.status is Status.IN_FLIGHT for s in samples)
        assert rig.router.stats()["lost"] == 0
        rig.router.resume()
        for task in tasks:
            check(await task, versions={1})


async def test_a_push_continues_without_a_hung_engine() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B), push_timeout_s=100) as rig:
        await rig.push()
        rig.engines[0].hung = True
        rig.engines[1].die()
        asyncio.get_running_loop().call_later(25, rig.engines[1].restart)
        await rig.push()
        assert rig.router.engine_states() == {A: "dead", B: "version 2"}
        figures = rig.router.engine_metrics()
        assert [(figures[e]["serving"], figures[e]["weight_version"]) for e in (A, B)] == [
            (False, 1),
            (True, 2),
        ]
        rig.engines[0].wake()
        await asyncio.sleep(5)
        assert rig.router.stale_engines == [A]


async def test_tokens_generated_but_not_received_count_as_lost() -> None:
    """Its own count tells, and no later death makes it forgotten."""

    async with routing() as rig:
        _, (task,) = await rig.start_samples()
        rig.engine.generated += 5
        assert (await rig.settle())["lost"] == 5
        rig.engine.restart()
        await asyncio.sleep(3)
        await rig.push()
        check(await task, versions={1, 2})
        assert (await rig.settle())["lost"] == 5


async def test_an_engine_on_trial_works_for_all_again_after_its_first_tokens() -> None:
    async with routing(ScriptedEngine(A, ends_at=lambda s: 180)) as rig:
        await rig.push()
        tasks = [rig.start(sample(i), budget=175) for i in range(8)]
        await asyncio.sleep(0.1)
        rig.router._pool.engines[0].mark_dead()  # a connection broke
        await asyncio.sleep(1.4)
        assert rig.router.stats()["in_flight"] == 8
        for task in tasks:
            check(await task, versions={1}, ends_at=180, budget=175)


async def test_a_trainer_that_dies_in_an_evaluation_or_a_push_loses_no_token() -> None:
    async with routing(ScriptedEngine(A, chunk=4)) as rig:
        await rig.push()
        asking = asyncio.create_task(rig.router.greedy(PROMPT, 30))
        await asyncio.sleep(0.1)
        await stopped(asking)
        rig.version += 1
        await rig.router.begin_push(rig.version)
        rig.engine.load(rig.version)
        ending = asyncio.create_task(
            rig.router.end_push(
                rig.version, [Canary(CANARY_IDS, canary_logprobs(CANARY_IDS, rig.version))] * 3
            )
        )
        answer = rig.engine._generate

        def one_and_no_more(body: dict[str, Any]) -> tuple[int, str]:
            rig.engine.hung = True
            return answer(body)

        rig.engine._generate = one_and_no_more  # type: ignore[method-assign]
        await asyncio.sleep(1)
        await stopped(ending)
        rig.engine._generate = answer  # type: ignore[method-assign]
        rig.engine.wake()
        await rig.push()
        check(await rig.start(sample()), versions={3})
        assert (await rig.settle())["lost"] == 0


async def stopped(task: asyncio.Task[Any]) -> None:
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_tokens_cut_off_by_a_broken_connection_are_generated_again() -> None:
    """A broken connection counts as a death: tokens that were not streamed yet are no loss, though it counts them."""

    async with routing(ScriptedEngine(A, chunk=4)) as rig:
        (s,), (task,) = await rig.start_samples()
        rig.router._pool.engines[0].mark_dead()  # as after a failed request of somebody else
        await asyncio.sleep(3)
        check(await task, versions={1})
        assert s.resumes == 1
        assert 0 < rig.engine.generated - len(s.response_ids) < 4
        assert (await rig.settle())["lost"] == 0
        await rig.push()
        check(await rig.start(sample(1)), versions={2})
        figures = await rig.settle()
        assert figures["lost"] == 0
        assert figures["engine_tokens"] == figures["received_tokens"] + 2  # canaries
