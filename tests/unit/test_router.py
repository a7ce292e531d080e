"""The router against scripted SGLang servers, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.engine.client import EngineClient
from rlsys.errors import RunError, UserError
from rlsys.router.attest import Bounds
from rlsys.router.dispatch import Interruption
from rlsys.router.router import RefusedPrompt, Router
from rlsys.types import Canary, Sample, Status
from tests.helpers.scripted_engine import (
    EOS,
    Network,
    ScriptedEngine,
    canary_logprobs,
    checksums,
    experts,
    logprob,
    token,
)

PROMPT = [1, 5, 6, 7]
A, B = "http://a:1", "http://b:1"
CANARY_IDS = [4, 8, 15, 16, 23]

pytestmark = pytest.mark.virtual_clock


class Rig:
    """Scripted engines, the router before them, and a trainer whose weights are the version's number."""

    def __init__(
        self,
        *engines: ScriptedEngine,
        patience: float = 60.0,
        context: int = 200,
        interruption: Interruption = "abort",
    ) -> None:
        self.engines = list(engines) or [ScriptedEngine(A)]
        network: Any = Network(*self.engines)
        self.router = Router(
            [EngineClient(e.url, network) for e in self.engines],
            vocab_size=128,
            context_length=context,
            stop_ids={EOS},
            bounds=Bounds(1e-6, 1e-4),
            routes=True,
            patience=patience,
            interruption=interruption,
        )
        self.version = 0

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[0]

    async def push(
        self, *, only_stale: bool = False, wrong: tuple[str, ...] = (), sums: dict[str, str] | None = None
    ) -> dict[str, float]:
        """`sums`: the checksums that the trainer expects of every engine."""
        self.version += not only_stale
        for address in await self.router.begin_push(self.version, only_stale=only_stale):
            next(e for e in self.engines if e.url == address.url).load(
                self.version + (50 if address.url in wrong else 0)
            )
        canary = Canary(CANARY_IDS, canary_logprobs(CANARY_IDS, self.version))
        metrics = await self.router.end_push(self.version, [canary], [sums] if sums else [])
        self.router.resume()
        return metrics

    def join(self, engine: ScriptedEngine) -> None:
        self.engines.append(engine)
        network: Any = Network(engine)
        self.router.add_engine(EngineClient(engine.url, network))

    def start(self, s: Sample, budget: int = 100) -> asyncio.Task[Sample]:
        return asyncio.create_task(self.router.generate(s, max_response_tokens=budget, temperature=1.0))

    async def settle(self) -> dict[str, float]:
        await self.router.interrupt()
        return self.router.stats()


def sample(i: int = 0, *, seed: int = 3, group: int | None = None, prompt: list[int] = PROMPT) -> Sample:
    return Sample(i, i if group is None else group, 0, list(prompt), seed=seed)


def check(s: Sample, *, versions: set[int], ends_at: int = 40, budget: int = 100) -> None:
    """It is what one unbroken response would be, with the weights that each token was made with."""
    first = len(s.prompt_ids)
    length = min(ends_at + 1 - first, budget)
    finished = length == ends_at + 1 - first
    assert len(s.response_ids) == length
    assert s.status is (Status.FINISHED if finished else Status.TRUNCATED)
    assert set(s.versions()) == versions
    expected = [token(s.seed, first + i, v) for i, v in enumerate(s.versions())]
    assert s.response_ids == ([*expected[:-1], EOS] if finished else expected)
    assert s.mu == [logprob(s.seed, first + i, v) for i, v in enumerate(s.versions())]
    for span in s.routes:
        positions = range(span.start, span.end)
        assert span.experts == b"".join(e.to_bytes(2, "little") for p in positions for e in experts(p))


def positions_with_routes(s: Sample) -> list[int]:
    return [p for span in s.routes for p in range(span.start, span.end)]


@asynccontextmanager
async def routing(*engines: ScriptedEngine, **options: Any) -> AsyncIterator[Rig]:
    """A rig whose router watches its engines."""
    rig = Rig(*engines, **options)
    watch = asyncio.create_task(rig.router.watch())
    try:
        yield rig
    finally:
        watch.cancel()


# One sample


async def test_nothing_is_sent_before_the_first_push() -> None:
    async with routing() as rig:
        rig.router.resume()
        task = rig.start(sample())
        await asyncio.sleep(5)
        assert not rig.engine.started
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


async def test_a_request_aborted_in_the_queue_repeats_nothing() -> None:
    """SGLang answers it with its last token again; what it made and had not sent is made again."""

    async with routing(ScriptedEngine(A, chunk=4)) as rig:
        await rig.push()
        s = sample()
        task = rig.start(s)
        await asyncio.sleep(0.1)
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
        ([1, 128], "token id 128 is outside the vocabulary of 128"),
        ([-1], "token id -1 is outside the vocabulary of 128"),
        ([1] * 94, "the prompt has 94 tokens; there is room for 93"),
    ],
)
async def test_a_prompt_that_could_kill_an_engine_is_refused(prompt: list[int], why: str) -> None:
    async with routing(context=100) as rig:
        await rig.push()
        s = sample(prompt=prompt)
        with pytest.raises(RefusedPrompt, match=f"^{why}$"):
            await rig.start(s)
        assert (s.status, rig.engine.started, rig.router.stats()["refused"]) == (Status.PARKED, [], 1)


async def test_a_response_ends_where_the_context_does() -> None:
    """And short enough that it could be sent again as a prompt at any length."""

    async with routing(ScriptedEngine(A, ends_at=lambda seed: 1000), context=50) as rig:
        await rig.push()
        check(await rig.start(sample()), versions={1}, ends_at=1000, budget=50 - 6 - 4)


async def test_a_refusal_by_the_engine_stops_the_run() -> None:
    async with routing() as rig:
        await rig.push()
        rig.engine._step = lambda request: {"type": "abort", "status_code": 400, "message": "no"}  # type: ignore
        with pytest.raises(RunError, match=r"sample 0: http://a:1/generate: 400 no"):
            await rig.start(sample())


# All samples


async def test_the_oldest_goes_on_first() -> None:
    async with routing(ScriptedEngine(A, ends_at=lambda seed: 30)) as rig:
        await rig.push()
        await rig.router.interrupt()
        tasks = [rig.start(sample(i, prompt=[1, 10 + i])) for i in (2, 0, 3, 1)]
        await asyncio.sleep(0.05)
        rig.router.resume()
        await asyncio.gather(*tasks)
        assert [ids[1] for ids in rig.engine.started] == [10, 11, 12, 13]


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


async def test_evaluation_needs_no_open_gate_and_stays_outside_the_figures() -> None:
    async with routing() as rig:
        await rig.push()
        await rig.router.interrupt()
        held = rig.start(sample())
        evaluation = asyncio.create_task(rig.router.greedy(PROMPT, 10))
        await asyncio.sleep(1)
        assert not rig.engine.started, "an interrupt stops evaluation too"
        rig.version += 1
        await rig.router.begin_push(rig.version)
        rig.engine.load(rig.version)
        await rig.router.end_push(rig.version, [])
        segment = await evaluation
        assert (len(segment.ids), segment.finish) == (10, "length")
        assert not held.done()
        stats = rig.router.stats()
        assert (stats["evaluation_tokens"], stats["received_tokens"], stats["prefilled_tokens"]) == (
            10,
            10,
            0,
        )
        rig.router.resume()
        await held


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


async def test_a_group_that_spreads_over_engines_stays_where_its_prefixes_are() -> None:
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


async def test_a_prompt_is_scored_by_what_serves_whatever_happens_and_nothing_is_lost() -> None:
    async with routing() as rig:
        waiting = asyncio.create_task(rig.router.prompt_logprobs(PROMPT))
        await asyncio.sleep(1)
        assert not waiting.done()  # nothing was attested yet
        await rig.push()
        assert await waiting == canary_logprobs(PROMPT, 1)
        rig.engine.aborting = 1  # by an interrupt
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


# Pushes


async def test_a_push_keeps_its_order() -> None:
    async with routing() as rig:
        await rig.push()
        task = rig.start(sample())
        await asyncio.sleep(0.1)
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
        assert (s.resumes, len(rig.engine.started)) == (0, 1)
        seam = len(PROMPT) + s.spans[1].start - 1
        last = len(PROMPT) + len(s.response_ids) - 1
        assert positions_with_routes(s) == list(range(seam, last)), "older routes left with the first pass"
        assert (await rig.settle())["lost"] == 0


async def test_what_must_not_be_kept_comes_back() -> None:
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


async def test_nothing_is_taken_from_an_engine_that_kept_requests_and_got_wrong_weights() -> None:
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


# Engines that come and go


async def test_an_engine_that_joins_gets_the_weights_before_it_serves() -> None:
    async with routing(ScriptedEngine(A)) as rig:
        await rig.push()
        joiner = ScriptedEngine(B)
        rig.join(joiner)
        await asyncio.sleep(3)
        await asyncio.gather(*(rig.start(sample(i)) for i in range(8)))
        assert not joiner.started
        assert rig.router.stale_engines == [B]
        await rig.push(only_stale=True)
        await asyncio.gather(*(rig.start(sample(10 + i)) for i in range(8)))
        assert joiner.started


async def test_an_engine_that_is_removed_ends_what_it_has_and_leaves() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        await rig.push()
        samples = [sample(i) for i in range(4)]
        tasks = [rig.start(s) for s in samples]
        await asyncio.sleep(0.05)
        rig.router.remove_engine(B)
        later = [rig.start(sample(10 + i)) for i in range(4)]
        assert rig.router.engine_states()[B] == "draining: 2 requests"
        for task in tasks + later:
            check(await task, versions={1})
        assert {s.resumes for s in samples} == {0}
        assert len(rig.engines[1].started) == 2
        made = rig.engines[1].generated
        await asyncio.sleep(3)
        assert rig.router.engine_states() == {A: "version 1"}
        assert made
        with pytest.raises(UserError, match=r"http://b:1 is not in the pool"):
            rig.router.remove_engine(B)


async def test_a_server_fault_costs_a_back_off_and_no_token() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        await rig.push()
        step = rig.engines[0]._step
        rig.engines[0]._step = lambda request: {"type": "abort", "status_code": 500, "message": "oom"}  # type: ignore
        samples = [sample(i) for i in range(4)]
        tasks = [rig.start(s) for s in samples]
        for task in tasks:
            check(await task, versions={1})
        assert rig.router.stats()["engine_faults"] == 2
        assert {s.engine for s in samples} == {B}
        rig.engines[0]._step = step  # type: ignore
        await asyncio.sleep(3)
        done = [await rig.start(sample(10 + i)) for i in range(2)]
        assert done[0].engine == A, "tried again after the back-off"


async def test_an_update_that_was_left_open_is_ended_first() -> None:
    async with routing() as rig:
        rig.engine.update_open = True
        await rig.push()
        check(await rig.start(sample()), versions={1})


async def test_a_tensor_with_another_checksum_is_found_where_its_kind_is_known() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
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
        assert not rig.engines[1].started
        with pytest.raises(
            RunError,
            match=r"no engine can serve weight version 2: .*mean 2.* \(bound 1e-06: weights.canary_mean\)",
        ):
            await rig.push(wrong=(A,))


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


async def test_a_push_does_not_wait_for_ever() -> None:
    async with routing(patience=40.0) as rig:
        rig.engine.die()
        with pytest.raises(
            RunError, match=r"no engine was there for weight version 1 within 40 s: http://a:1 dead"
        ):
            await rig.push()


async def test_an_engine_that_dies_in_a_push_gets_the_next_one() -> None:
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


# Deaths


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 0.5))
async def test_what_was_streamed_before_a_death_is_kept(moment: float) -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        await rig.push()
        samples = [sample(i, group=0) for i in range(3)]
        tasks = [rig.start(s) for s in samples]
        await asyncio.sleep(moment)
        lengths = [len(s.response_ids) for s in samples]
        next(e for e in rig.engines if e.started or moment < 0.01).die()
        for s, task, length in zip(samples, tasks, lengths, strict=True):
            kept = s.response_ids[:length]
            check(await task, versions={1})
            assert s.response_ids[:length] == kept
            missing = set(range(len(PROMPT) + len(s.response_ids) - 1)) - set(positions_with_routes(s))
            assert missing == set(range(s.routes[0].start)), "only what died with the engine"
        assert (await rig.settle())["lost"] == 0


async def test_the_only_engine_dies_and_comes_back() -> None:
    async with routing() as rig:
        await rig.push()
        s = sample()
        task = rig.start(s)
        await asyncio.sleep(0.15)
        rig.engine.die()
        await asyncio.sleep(10)
        kept = len(s.response_ids)
        assert (s.status, kept, rig.router.stale_engines) == (Status.PARKED, 12, [])
        rig.engine.restart()
        await asyncio.sleep(5)
        assert rig.router.stale_engines == [A]
        assert len(s.response_ids) == kept, "nothing comes from an engine without the current weights"
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
        assert (s.response_ids, s.status) == ([], Status.PARKED)
        assert rig.router.stats()["discarded_tokens"] == 4
        assert rig.router.stale_engines == [A]
        await rig.push(only_stale=True)
        check(await task, versions={1})


async def test_engines_rest_while_the_trainer_works_and_wake_in_two_parts() -> None:
    async with routing() as rig:
        await rig.push()
        s = sample()
        task = rig.start(s)
        await asyncio.sleep(0.1)
        await rig.router.interrupt()
        rig.engine.calls.clear()
        await rig.router.rest_engines()
        await rig.router.rest_engines()  # a step that is taken again
        assert rig.engine.released == {"weights", "kv_cache"}
        await asyncio.sleep(3)  # probes find a live engine that must not serve
        assert rig.engine.calls == ["flush_cache", "update_weight_version", "release_memory_occupation"]
        assert rig.router.stale_engines == [A]
        rig.version += 1
        await rig.router.begin_push(rig.version)
        assert rig.engine.released == {"kv_cache"}
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
        await rig.router.rest_engines()
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
        await rig.router.rest_engines()
        rig.engine.restart()
        await rig.push()
        check(await rig.start(sample()), versions={2})


async def test_tokens_made_for_an_earlier_rollout_process_are_not_ours() -> None:
    async with routing() as rig:
        rig.engine.generated = 500
        await rig.push()
        s = await rig.start(sample())
        stats = await rig.settle()
        canary = 1
        assert (stats["engine_tokens"], stats["lost"]) == (len(s.response_ids) + canary, 0)


async def test_an_idle_restart_is_noticed_by_a_probe() -> None:
    async with routing() as rig:
        await rig.push()
        rig.engine.restart()
        await asyncio.sleep(3)
        assert rig.router.stale_engines == [A]


async def test_an_engine_that_hangs_does_not_hold_up_an_interrupt() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        await rig.push()
        samples = [sample(i) for i in range(4)]
        tasks = [rig.start(s) for s in samples]
        await asyncio.sleep(0.1)
        rig.engines[0].hung = True
        await rig.router.interrupt()
        assert rig.router.engine_states()[A] == "dead"
        assert {s.status for s in samples} == {Status.PARKED}
        rig.router.resume()
        for task in tasks:
            check(await task, versions={1})


async def test_an_engine_that_is_stopped_is_found_by_probes() -> None:
    """Nobody interrupts: without them its samples would wait for ever, while another engine has room."""

    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        await rig.push()
        samples = [sample(i) for i in range(4)]
        tasks = [rig.start(s) for s in samples]
        await asyncio.sleep(0.1)
        rig.engines[0].hung = True
        await asyncio.sleep(20)
        assert rig.router.engine_states()[A] == "version 1", "it may still come to itself"
        await asyncio.sleep(20)
        assert rig.router.engine_states()[A] == "dead"
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
        await rig.push()
        task = rig.start(sample())
        await asyncio.sleep(0.1)
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


async def test_an_engine_that_comes_to_itself_gives_its_requests_back() -> None:
    """The abort that it never answered is repeated; it is as alive as before, and costs no push."""

    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as rig:
        await rig.push()
        samples = [sample(i) for i in range(4)]
        tasks = [rig.start(s) for s in samples]
        await asyncio.sleep(0.1)
        rig.engines[0].hung = True
        asyncio.get_running_loop().call_later(15, rig.engines[0].wake)
        await rig.router.interrupt()
        assert rig.router.engine_states() == {A: "version 1", B: "version 1"}
        assert not any(s.status is Status.IN_FLIGHT for s in samples)
        assert rig.router.stats()["lost"] == 0
        rig.router.resume()
        for task in tasks:
            check(await task, versions={1})


async def test_a_push_goes_on_without_an_engine_that_hangs() -> None:
    async with routing(ScriptedEngine(A), ScriptedEngine(B), patience=100) as rig:
        await rig.push()
        rig.engines[0].hung = True
        rig.engines[1].die()
        asyncio.get_running_loop().call_later(25, rig.engines[1].restart)
        await rig.push()
        assert rig.router.engine_states() == {A: "dead", B: "version 2"}
        rig.engines[0].wake()
        await asyncio.sleep(5)
        assert rig.router.stale_engines == [A]


async def test_tokens_that_an_engine_made_and_nobody_got_are_lost() -> None:
    """Its own count tells, and no later death makes it forgotten."""

    async with routing() as rig:
        await rig.push()
        task = rig.start(sample())
        await asyncio.sleep(0.1)
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
        rig.router._pool.engines[0].died()  # a connection broke
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


async def test_what_was_cut_off_in_an_engine_that_lives_is_made_again() -> None:
    """A broken connection counts as a death: tokens that were not streamed yet are no loss, though it counts them."""

    async with routing(ScriptedEngine(A, chunk=4)) as rig:
        await rig.push()
        s = sample()
        task = rig.start(s)
        await asyncio.sleep(0.1)
        rig.router._pool.engines[0].died()  # as after a failed request of somebody else
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
            what = rng.choice(["interrupt", "push", "die", "restart", "preempt", "nothing"])
            if what == "interrupt":
                await rig.router.interrupt()
                assert not any(s.status is Status.IN_FLIGHT for s in samples)
                rig.router.resume()
            elif what == "die":
                engine.die()
                await asyncio.sleep(1.5)
            elif what == "preempt":
                engine.preempt()
                await rig.router.interrupt()
                rig.router.resume()
            elif what == "restart":
                engine.restart()
            elif what == "push":
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


def test_canary_gaps_are_quantiles() -> None:
    from rlsys.router.attest import Agreement

    near_tie = Agreement.of([-1.0] * 5000, [-1.0] * 4999 + [-1.002])
    assert near_tie.within(Bounds(1e-6, 1e-4))
    assert not Agreement.of([-1.0] * 100, [-1.0] * 99 + [float("nan")]).within(Bounds(1e-6, 1e-4))
    assert Agreement.of([-20.0], [-20.002]).mean == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="2 canary log-probs expected, 1 seen"):
        Agreement.of([0.0, 0.0], [0.0])
