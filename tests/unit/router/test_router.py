"""What becomes of samples in the router, on scripted SGLang servers and a virtual clock."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.core.errors import RunError
from rlsys.core.types import Status
from rlsys.router.router import RefusedPrompt
from tests.helpers.router_rig import (
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


async def test_nothing_is_sent_before_the_first_push() -> None:
    async with routing() as rig:
        rig.router.resume()
        task = rig.start(sample())
        await asyncio.sleep(5)
        assert not rig.engine.prompts
        await rig.push()
        check(await task, versions={1})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 0.2), max_size=6), st.integers(1, 50))
async def test_interrupted_anywhere_equals_unbroken(pauses: list[float], budget: int) -> None:
    """Also before the request is registered, and in the middle of a chunk; the budget counts over all segments."""

    async with routing() as rig:
        await rig.push()
        s = sample()
        task = rig.start(s, budget)
        for pause in pauses:
            await asyncio.sleep(pause)
            await rig.router.interrupt()
            assert s.status is not Status.IN_FLIGHT
            assert rig.router.stats()["in_flight"] == 0
            rig.router.resume()
        check(await task, versions={1}, budget=budget)
        assert positions_with_routes(s) == list(range(len(PROMPT) + len(s.response_ids) - 1))
        assert (await rig.settle())["lost"] == 0


async def test_versions_follow_the_pushes() -> None:
    async with routing() as rig:
        await rig.push()
        s = sample()
        task = rig.start(s)
        for _ in range(2):
            await asyncio.sleep(0.095)
            await rig.push()
        check(await task, versions={1, 2, 3})
        assert s.resumes == 2
        assert s.prefilled_tokens == 4 + sum(4 + span.start for span in s.spans[1:])


async def test_a_request_aborted_in_the_queue_repeats_no_tokens() -> None:
    """SGLang answers it with its last token again; what it made and had not sent is made again."""

    async with routing(ScriptedEngine(A, chunk=4)) as rig:
        (s,), (task,) = await rig.start_samples()
        rig.engine.preempt()
        await rig.router.interrupt()
        assert len(s.response_ids) in (4, 8)
        rig.router.resume()
        check(await task, versions={1})
        stats = await rig.settle()
        assert stats["lost"] == 0
        assert stats["received_tokens"] == len(s.response_ids)
        # The engine leaves such a request out of its count.
        assert rig.router._pool.engines[0].received == rig.engine.generated < len(s.response_ids)


async def test_cached_prompt_tokens_are_counted_by_their_origin() -> None:
    async with routing(ScriptedEngine(A)) as rig:
        (s,), (task,) = await rig.start_samples()
        await rig.router.interrupt()
        tokens_before = len(s.response_ids)
        rig.engine.cached_tokens = 3
        rig.router.resume()
        await task
        counted = rig.router.tally()[1]
        assert counted["sibling"] == (0, len(PROMPT))
        assert counted["resume"] == (3, len(PROMPT) + tokens_before)


async def test_waiting_in_the_engines_queue_costs_no_token() -> None:
    async with routing(ScriptedEngine(A, max_running=1)) as rig:
        await rig.push()
        samples = [sample(i) for i in range(3)]
        tasks = [rig.start(s) for s in samples]
        await asyncio.sleep(0.1)
        await rig.router.interrupt()
        assert [bool(s.response_ids) for s in samples] == [True, False, False]
        rig.router.resume()
        for task in tasks:
            check(await task, versions={1})
        assert [s.resumes for s in samples] == [1, 0, 0]


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([], "the prompt is empty"),
        ([1, 128], "token id 128 is outside the vocabulary of 128 ids"),
        ([-1], "token id -1 is outside the vocabulary of 128 ids"),
        ([1] * 94, "the prompt has 94 tokens; expected at most 93"),
    ],
)
async def test_a_prompt_that_could_kill_an_engine_is_refused(prompt: list[int], why: str) -> None:
    async with routing(context=100) as rig:
        await rig.push()
        s = sample(prompt=prompt)
        with pytest.raises(RefusedPrompt, match=f"^{why}$"):
            await rig.start(s)
        assert (s.status, rig.engine.prompts, rig.router.stats()["refused"]) == (Status.PARKED, [], 1)


async def test_a_response_ends_where_the_context_does() -> None:
    """And short enough that it could be sent again as a prompt at any length."""

    async with routing(ScriptedEngine(A, ends_at=lambda seed: 1000), context=50) as rig:
        await rig.push()
        check(await rig.start(sample()), versions={1}, ends_at=1000, budget=50 - 6 - 4)


async def test_a_refusal_by_the_engine_stops_the_run() -> None:
    async with routing() as rig:
        await rig.push()
        rig.engine._generate_token = lambda request: {"type": "abort", "status_code": 400, "message": "no"}  # type: ignore
        with pytest.raises(RunError, match=r"sample 0: http://a:1/generate: HTTP 400: no"):
            await rig.start(sample())


async def test_the_oldest_sample_resumes_first() -> None:
    async with routing(ScriptedEngine(A, ends_at=lambda seed: 30)) as rig:
        await rig.push()
        await rig.router.interrupt()
        tasks = [rig.start(sample(i, prompt=[1, 10 + i])) for i in (2, 0, 3, 1)]
        await asyncio.sleep(0.05)
        rig.router.resume()
        await asyncio.gather(*tasks)
        assert [ids[1] for ids in rig.engine.prompts] == [10, 11, 12, 13]


async def test_an_abort_that_overtakes_its_request_is_repeated() -> None:
    async with routing() as rig:
        await rig.push()
        s = sample()
        task = rig.start(s)
        await asyncio.sleep(0)  # on its way
        await rig.router.interrupt()
        assert rig.engine.calls.count("abort_request") >= 2
        assert s.status is Status.PARKED
        rig.router.resume()
        check(await task, versions={1})


async def test_evaluation_runs_with_a_closed_gate_and_is_counted_separately() -> None:
    async with routing() as rig:
        await rig.push()
        await rig.router.interrupt()
        training_task = rig.start(sample())
        evaluation = asyncio.create_task(rig.router.greedy(PROMPT, 10))
        await asyncio.sleep(1)
        assert not rig.engine.prompts, "an interrupt stops evaluation too"
        rig.version += 1
        await rig.router.begin_push(rig.version)
        rig.engine.load(rig.version)
        await rig.router.end_push(rig.version, [])
        segment = await evaluation
        assert (len(segment.ids), segment.finish) == (10, "length")
        assert not training_task.done()
        stats = rig.router.stats()
        assert (stats["evaluation_tokens"], stats["received_tokens"], stats["prefilled_tokens"]) == (
            10,
            10,
            0,
        )
        rig.router.resume()
        await training_task


async def test_siblings_share_an_engine_and_a_sample_returns_to_its_own() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        await rig.push()
        samples = [sample(i, group=i // 4) for i in range(16)]
        tasks = [rig.start(s) for s in samples]
        await asyncio.sleep(0.1)
        first = [s.engine for s in samples]
        assert all(len(set(first[i : i + 4])) == 1 for i in range(0, 16, 4))
        assert first.count(A) == first.count(B)
        await rig.router.interrupt()
        rig.router.resume()
        await asyncio.sleep(0.05)
        assert [s.engine for s in samples] == first
        await asyncio.gather(*tasks)


async def test_samples_of_a_spread_group_resume_on_the_engines_of_their_prefixes() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        await rig.push()
        samples = [sample(i, group=0) for i in range(20)]
        tasks = [rig.start(s) for s in samples]
        await asyncio.sleep(0.1)
        first = [s.engine for s in samples]
        assert set(first) == {A, B}
        await rig.router.interrupt()
        rig.router.resume()
        await asyncio.sleep(0.05)
        assert [s.engine for s in samples] == first
        await asyncio.gather(*tasks)


async def test_prompt_log_probs_survive_aborts_and_engine_deaths() -> None:
    async with routing() as rig:
        waiting = asyncio.create_task(rig.router.prompt_logprobs(PROMPT))
        await asyncio.sleep(1)
        assert not waiting.done()  # nothing was attested yet
        await rig.push()
        assert await waiting == canary_logprobs(PROMPT, 1)
        rig.engine.pending_aborts = 1  # by an interrupt
        assert await rig.router.prompt_logprobs(PROMPT) == canary_logprobs(PROMPT, 1)
        rig.engine.die()
        asyncio.get_running_loop().call_later(5, rig.engine.restart)
        waiting = asyncio.create_task(rig.router.prompt_logprobs(PROMPT))
        await asyncio.sleep(20)
        await rig.push(only_stale=True)
        assert await waiting == canary_logprobs(PROMPT, 1)
        assert (await rig.settle())["lost"] == 0
        with pytest.raises(RefusedPrompt):
            await rig.router.prompt_logprobs([1, 10**6])


@pytest.mark.parametrize("seed", range(5))
async def test_chaos(seed: int) -> None:
    """Interrupts, pushes, deaths, restarts and preemptions at random: every sample is what it would have been."""

    async with routing(
        *(ScriptedEngine(url, ends_at=lambda s: 20 + s % 60, max_running=12) for url in (A, B))
    ) as rig:
        rng = random.Random(seed)
        await rig.push()
        samples = [sample(i, seed=rng.randrange(1000), group=i // 4) for i in range(60)]
        tasks = [rig.start(s, budget=50) for s in samples]
        while not all(t.done() for t in tasks):
            await asyncio.sleep(rng.random() * 0.3)
            engine = rng.choice(rig.engines)
            event = rng.choice(["interrupt", "push", "die", "restart", "preempt", "nothing"])
            if event == "interrupt":
                await rig.router.interrupt()
                assert not any(s.status is Status.IN_FLIGHT for s in samples)
                rig.router.resume()
            elif event == "die":
                engine.die()
                await asyncio.sleep(1.5)
            elif event == "preempt":
                engine.preempt()
                await rig.router.interrupt()
                rig.router.resume()
            elif event == "restart":
                engine.restart()
            elif event == "push":
                for dead in rig.engines:
                    if dead.dead:
                        dead.restart()
                await rig.push()
            if rig.router.stale_engines:
                await rig.push(only_stale=True)
            if all(e.dead for e in rig.engines):
                engine.restart()
        for s in samples:
            check(s, versions=set(s.versions()), ends_at=20 + s.seed % 60, budget=50)
        assert (await rig.settle())["in_flight"] == 0
