"""Weight pushes through the router: order, requests that are kept, wrong weights, engines that rest meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from rlsys.core.types import Status
from rlsys.core.weight_updates import Canary
from rlsys.engine.client import EngineClient
from rlsys.router.attest import Bounds
from rlsys.router.dispatch import Interruption
from tests.helpers.router_rig import (
    CANARY_IDS,
    PROMPT,
    A,
    B,
    Rig,
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


async def test_a_push_keeps_its_order() -> None:
    async with routing() as rig:
        _, (task,) = await rig.start_samples()
        rig.engine.calls.clear()
        await rig.push()
        assert rig.engine.calls == [
            "abort_request", "begin_weight_update", "tensors", "end_weight_update", "flush_cache",
            "update_weight_version", "generate",
        ]  # fmt: skip
        await task


@pytest.mark.parametrize("how", ["retract", "in_place"])
async def test_an_engine_may_keep_its_requests_through_a_push(how: Interruption) -> None:
    async with routing(interruption=how) as rig:
        await rig.push()
        s = sample()
        task = rig.start(s)
        await asyncio.sleep(0.15)
        rig.engine.calls.clear()
        await rig.push()
        flush = ["flush_cache"] if how == "retract" else []
        assert rig.engine.calls == [
            "pause_generation", "begin_weight_update", "tensors", "end_weight_update", *flush,
            "update_weight_version", "continue_generation", "generate",
        ]  # fmt: skip
        assert s.status is Status.IN_FLIGHT
        check(await task, versions={1, 2})
        assert (s.resumes, len(rig.engine.prompts)) == (0, 1)
        seam = len(PROMPT) + s.spans[1].start - 1
        last = len(PROMPT) + len(s.response_ids) - 1
        assert positions_with_routes(s) == list(range(seam, last)), "older routes left with the first pass"
        assert (await rig.settle())["lost"] == 0


@pytest.mark.parametrize("how", ["retract", "in_place"])
async def test_only_samples_of_the_same_first_version_meet_in_a_cache_that_outlives_a_push(
    how: Interruption,
) -> None:
    async with routing(interruption=how) as rig:
        await rig.push()
        task = rig.start(sample(0))
        await asyncio.sleep(0.15)
        await rig.router.interrupt()
        await rig.push()
        await task
        await rig.start(sample(1))
        expected = ["1", "1", "2"] if how == "in_place" else [None, None, None]
        assert [request.cache_key for request in rig.engine.history] == expected


async def test_samples_prefilled_again_do_not_reuse_the_cache_of_older_weights() -> None:
    """And what stays in its engine goes on there."""
    async with routing(interruption="in_place", recompute_prefix=True) as rig:
        await rig.push()
        long, short = sample(0, seed=3), sample(1, seed=4)
        tasks = [rig.start(long), rig.start(short)]
        await asyncio.sleep(0.15)
        await rig.router.interrupt(keep=lambda s: s is long)
        assert (long.status, short.status) == (Status.IN_FLIGHT, Status.PARKED)
        await rig.push()
        for task in tasks:
            check(await task, versions={1, 2})
        assert (long.resumes, short.resumes) == (0, 1)
        assert [request.cache_key for request in rig.engine.history] == ["1", "1", "2"]


async def test_samples_that_must_not_be_kept_are_parked() -> None:
    async with routing(interruption="retract") as rig:
        await rig.push()
        young, old = sample(0, seed=3), sample(1, seed=4)
        tasks = [rig.start(young), rig.start(old)]
        await asyncio.sleep(0.15)
        await rig.router.interrupt(keep=lambda s: s is young)
        assert (young.status, old.status) == (Status.IN_FLIGHT, Status.PARKED)
        await asyncio.sleep(1)
        assert len(young.response_ids) < 20, "its engine pauses"
        await rig.push()
        for task in tasks:
            check(await task, versions={1, 2})


@pytest.mark.parametrize("how", ["retract", "in_place"])
async def test_an_interrupt_for_good_reaches_requests_in_a_paused_engine(how: Interruption) -> None:
    async with routing(interruption=how) as rig:
        await rig.push()
        s = sample()
        task = rig.start(s)
        await asyncio.sleep(0.15)
        await rig.router.interrupt(keep=lambda _: True)
        await rig.router.interrupt()
        assert s.status is Status.PARKED
        await rig.push()
        check(await task, versions={1, 2})


async def test_requests_kept_in_an_engine_with_wrong_weights_move_to_another() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B), interruption="retract") as rig:
        await rig.push()
        samples = [sample(i, group=i) for i in range(2)]
        tasks = [rig.start(s) for s in samples]
        await asyncio.sleep(0.15)
        assert {s.engine for s in samples} == {A, B}
        await rig.push(wrong=(B,))
        for task in tasks:
            check(await task, versions={1, 2})
        assert {s.engine for s in samples} == {A}
        assert rig.router.engine_states()[B].startswith("quarantined")


async def test_engines_rest_while_the_trainer_works_and_wake_in_two_parts() -> None:
    async with routing() as rig:
        _, (task,) = await rig.start_samples()
        await rig.router.interrupt()
        rig.engine.calls.clear()
        await rig.router.release_memory()
        await rig.router.release_memory()  # a step that is taken again
        assert rig.engine.released == {"weights", "kv_cache", "cuda_graph"}
        await asyncio.sleep(3)  # probes find a live engine that must not serve
        assert rig.engine.calls == ["flush_cache", "update_weight_version", "release_memory_occupation"]
        assert rig.router.stale_engines == [A]
        rig.version += 1
        await rig.router.begin_push(rig.version)
        assert rig.engine.released == {"kv_cache", "cuda_graph"}
        rig.engine.load(rig.version)
        await rig.router.end_push(rig.version, [Canary(CANARY_IDS, canary_logprobs(CANARY_IDS, rig.version))])
        rig.router.resume()
        check(await task, versions={1, 2})
        assert (await rig.settle())["lost"] == 0


@pytest.mark.parametrize("after", ["take", "begin_push"])
async def test_a_new_rollout_process_wakes_engines_that_rest(after: str) -> None:
    async with routing() as rig:
        await rig.push()
        await rig.router.interrupt()
        await rig.router.release_memory()
        if after == "begin_push":
            await rig.router.begin_push(2)
        again = Rig(rig.engine)
        again.version = 2
        await again.push()
        check(await again.start(sample()), versions={3})
        assert not rig.engine.released


async def test_a_restarted_engine_has_its_memory() -> None:
    async with routing() as rig:
        await rig.push()
        await rig.router.interrupt()
        await rig.router.release_memory()
        rig.engine.restart()
        await rig.push()
        check(await rig.start(sample()), versions={2})


async def test_tokens_of_an_earlier_rollout_process_are_not_counted() -> None:
    async with routing() as rig:
        rig.engine.generated = 500
        await rig.push()
        s = await rig.start(sample())
        stats = await rig.settle()
        canary = 1
        assert (stats["engine_tokens"], stats["lost"]) == (len(s.response_ids) + canary, 0)


async def test_the_token_counter_of_an_idle_engine_is_read_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its counter is slow to read: a push does not wait for it again after the interrupt of the train step."""
    reads: list[str] = []

    async def read(self: EngineClient) -> int:
        reads.append(self.url)
        return await generated_tokens(self)

    generated_tokens = EngineClient.generated_tokens
    monkeypatch.setattr(EngineClient, "generated_tokens", read)
    async with routing() as rig:
        for canaries in (1, 2, 3):
            await rig.push()
            s = await rig.start(sample(canaries))
            reads.clear()
            stats = await rig.settle()
            assert reads == [A]
            assert stats["lost"] == 0
            assert stats["engine_tokens"] == canaries * (len(s.response_ids) + 1)
            await rig.settle()
            assert reads == [A]
        reads.clear()
        await rig.push()
        assert not reads


def test_canary_gaps_are_quantiles() -> None:
    from rlsys.router.attest import Agreement

    near_tie = Agreement.of([-1.0] * 5000, [-1.0] * 4999 + [-1.002])
    assert near_tie.within(Bounds(1e-6, 1e-4))
    assert not Agreement.of([-1.0] * 100, [-1.0] * 99 + [float("nan")]).within(Bounds(1e-6, 1e-4))
    assert Agreement.of([-20.0], [-20.002]).mean == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="1 canary log-probs; expected 2"):
        Agreement.of([0.0, 0.0], [0.0])
