"""A pinned engine answers an evaluation with the weights that it has, while the others get pushes and samples."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlsys.core.types import Segment
from rlsys.router.dispatch import Interruption
from rlsys.router.router import PinLost
from tests.helpers.router_rig import PROMPT, A, B, Rig, check, routing, sample
from tests.helpers.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.virtual_clock


def ask(r: Rig, seed: int = 7, tokens: int = 60) -> asyncio.Task[Segment]:
    return asyncio.create_task(r.router.probe(PROMPT, tokens, 0.5, seed, evaluation=True))


def pinned(r: Rig) -> ScriptedEngine:
    (url,) = (url for url, state in r.router.engine_states().items() if state.startswith("evaluates"))
    return next(e for e in r.engines if e.url == url)


def two(**options: Any) -> Any:
    return routing(ScriptedEngine(A), ScriptedEngine(B), **options)


@pytest.mark.parametrize("interruption", ["abort", "retract", "in_place"])
async def test_pushes_skip_a_pinned_engine_and_its_answers_have_one_version(
    interruption: Interruption,
) -> None:
    async with two(interruption=interruption) as r:
        samples, tasks = await r.start_samples(4)
        assert r.router.pin()
        engine = pinned(r)
        answers = [ask(r, seed) for seed in range(3)]
        await asyncio.sleep(0.1)
        await r.push()
        await r.push()
        assert r.router.engine_metrics()[engine.url]["weight_version"] == 1
        for answer in await asyncio.gather(*answers):
            assert {s.version for s in answer.spans} == {1}
        await asyncio.gather(*tasks)
        for (
            sample
        ) in samples:  # those that it had were parked by the first push, and went on in the other engine
            assert sample.spans[-1].version in (1, 2, 3)
        r.router.unpin()
        assert r.router.stale_engines == [engine.url]
        await r.push(only_stale=True)
        assert r.router.stale_engines == [] and r.router.engine_metrics()[engine.url]["weight_version"] == 3
        stats = await r.settle()
        assert stats["lost"] == 0 and stats["evaluation_tokens"] == sum(len(a.result().ids) for a in answers)


async def test_a_pinned_engine_gets_no_other_requests() -> None:
    async with two() as r:
        await r.push()
        assert r.router.pin()
        engine = pinned(r)
        other_engine = next(e for e in r.engines if e is not engine)
        tasks = [r.start(sample(i)) for i in range(6)]
        judge = asyncio.create_task(r.router.probe(PROMPT, 5, 0.0, 1))
        await asyncio.gather(judge, *tasks)
        assert {s.engine for s in [t.result() for t in tasks]} == {other_engine.url}
        assert not r.router.pin()  # one at a time
        r.router.unpin()
        r.router.unpin()
        assert len(r.router.stale_engines) == 0  # no push was missed


async def test_a_push_moves_samples_of_the_pinned_engine_to_other_engines() -> None:
    async with two() as r:
        samples, tasks = await r.start_samples(4)
        assert r.router.pin()
        engine = pinned(r)
        pinned_samples = [s for s in samples if s.engine == engine.url]
        assert pinned_samples
        await r.push()
        await asyncio.gather(*tasks)
        for sample in pinned_samples:
            check(sample, versions={1, 2})
            assert sample.engine != engine.url


async def test_an_only_engine_is_not_spared() -> None:
    async with routing(ScriptedEngine(A)) as r:
        await r.push()
        assert not r.router.pin()
        assert (await ask(r, tokens=5)).spans[0].version == 1  # by any engine, as without a pin


async def test_the_death_of_the_pinned_engine_ends_the_evaluation() -> None:
    async with two() as r:
        await r.push()
        assert r.router.pin()
        answer = ask(r)
        await asyncio.sleep(0.1)
        pinned(r).die()
        with pytest.raises(PinLost, match="no longer serves weight version 1; its state: dead"):
            await answer
        r.router.unpin()
        await r.push()
