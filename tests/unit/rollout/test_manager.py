"""The manager against a scripted router: what it admits, parks, keeps, drops, gives back, and when it stops."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.core.errors import RunError, UserError
from rlsys.core.seeds import sample_seed
from rlsys.core.spans import RouteSpan
from rlsys.core.types import Prompt, Sample, SampleGroup, Segment, Status
from rlsys.ledger.ledger import Ledger, check_ledger
from rlsys.ledger.reader import RunReader
from rlsys.rollout.run_metrics import quantile
from rlsys.rollout.schedule import admission_capacity
from rlsys.segments.records import SegmentReader
from rlsys.segments.route_records import load_with_routes, read_pointer
from tests.helpers.loaded import load_tokens
from tests.helpers.rollout_rig import (
    APRIL,
    Numbers,
    Rig,
    abandon,
    ids,
    length_reward,
    make_config,
    rig,
    settle,
    slow_group_zero,
)
from tests.helpers.route_cases import chosen, writer

# Admission and seeds


def test_admission_hand_computed() -> None:
    def capacity(step: int, accepted: int, lag: int) -> int:
        return admission_capacity(
            max_staleness=lag, trained_steps=step, groups_per_step=16, accepted=accepted
        )

    assert capacity(0, 0, lag=0) == 16  # the groups of step 1
    assert capacity(0, 16, lag=0) == 0
    assert capacity(1, 16, lag=0) == 16
    assert capacity(3, 48, lag=2) == 48
    # Restart from step 3 after steps 4 and 5 had taken theirs and 8 more were running: none before step 5 is back.
    assert [capacity(s, 16 * 5, lag=0) for s in (3, 4, 5)] == [-16, 0, 16]


@given(st.integers(0, 8), st.integers(1, 64), st.integers(0, 50))
def test_admission_keeps_new_groups_within_max_staleness(lag: int, per_step: int, policy: int) -> None:
    """Trained in order, the last group let in is taken when the weights are `lag` steps further."""
    accepted = (lag + policy + 1) * per_step - 1
    assert (
        admission_capacity(
            max_staleness=lag, trained_steps=policy, groups_per_step=per_step, accepted=accepted
        )
        == 1
    )
    trained_at_step = accepted // per_step + 1
    assert trained_at_step - 1 - policy <= lag


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 1000))
def test_seeds_are_positive_31_bit(run_seed: int, group: int, index: int) -> None:
    assert 1 <= sample_seed(run_seed, group, index) < 2**31


def test_seeds_are_fixed_and_differ() -> None:
    assert sample_seed(0, 0, 0) == 1380431757
    assert len({sample_seed(r, g, i) for r in range(3) for g in range(30) for i in range(8)}) == 720


def test_quantile_is_the_nearest_rank() -> None:
    assert [quantile([1, 2, 3, 4], q) for q in (0.0, 0.25, 0.5, 0.51, 0.99)] == [1, 1, 2, 3, 4]


# Synchronous


async def test_synchronous_steps_are_exactly_their_groups(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path), lambda s: 3 + s.sample_id % 4) as r:
        await r.start()
        for step in (1, 2, 3):
            batch = await r.take(step)
            assert ids(batch.groups) == [2 * step - 2, 2 * step - 1]
            assert batch.weight_version == step
            assert batch.metrics["issued"] == 2 * step
            assert batch.metrics["off_policy_share"] == batch.metrics["staleness_max"] == 0
            mu = [m for g in batch.groups for s in g.samples for m in s.mu]
            assert batch.metrics["sampled_entropy"] == pytest.approx(-sum(mu) / len(mu)) and any(mu)
            assert r.router.in_flight == []
            await r.push()
        assert r.router.most_in_flight == 4


async def test_step_metrics_hand_computed(tmp_path: Path) -> None:
    lengths = {0: 1, 1: 2, 2: 3, 3: 30}
    async with rig(make_config(tmp_path), lambda s: lengths[s.sample_id]) as r:
        await r.start()
        metrics = (await r.take(1)).metrics
        assert metrics["tokens"] == 1 + 2 + 3 + 20  # the last one is cut at the budget
        assert metrics["response_len_mean"] == 6.5
        assert (metrics["response_len_p50"], metrics["response_len_p99"]) == (2, 20)
        assert metrics["truncated_share"] == 0.25
        assert metrics["reward"] == 0.5
        assert metrics["cache_share"] == 0.75


async def test_a_take_returns_prompt_sources_if_teachers_are_chosen_by_source(tmp_path: Path) -> None:
    teacher = {"path": tmp_path, "by_source": {"odd": tmp_path}}
    for algo, expected_sources in (({}, []), ({"loss": ["distill"], "teacher": teacher}, ["even", "odd"])):
        (folder := tmp_path / str(len(expected_sources))).mkdir()
        async with rig(make_config(folder, algo=algo)) as r:
            await r.start()
            batch = await r.take(1)
            assert [batch.sources[i] for i, _ in enumerate(expected_sources)] == expected_sources
            assert len(batch.sources) == len(expected_sources)
            assert [g.prompt_index for g in batch.groups] == [0, 1]


# APRIL


async def test_the_first_finished_groups_are_taken_and_the_others_parked_and_resumed(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path, **APRIL), slow_group_zero) as r:
        await r.start()
        first = await r.take(1)
        assert 0 not in ids(first.groups)
        assert r.router.in_flight == []  # colocated: the engines rest
        straggler = r.buffer.groups[0].samples[0]
        assert straggler.status is Status.PARKED
        parked_ids = list(straggler.response_ids)
        assert len(parked_ids) == 3
        await r.push()
        step = 1
        while r.buffer.groups.get(0) is not None:
            step += 1
            batch = await r.take(step)
            await r.push()
        group = batch.groups[0]
        assert group.group_id == 0
        resumed = group.samples[0]
        assert list(resumed.response_ids) == list(range(8))
        assert list(resumed.response_ids[:3]) == parked_ids
        assert resumed.resumes >= len(resumed.spans) - 1 > 0
        assert batch.metrics["resumed_samples"] == 2
        assert batch.metrics["staleness_max"] == step - 1
        stale_tokens = sum(span.end - span.start for span in resumed.spans if span.version < step)
        assert batch.metrics["off_policy_share"] == 2 * stale_tokens / batch.metrics["tokens"]


async def test_slots_bound_the_samples_in_flight(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path, **APRIL), lambda s: 2 + 5 * (s.index == 1)) as r:
        await r.start()
        for step in range(1, 6):
            await r.take(step)
            await r.push()
        # Half-finished groups leave no slot empty: 8 = 2 * 2 groups of 2.
        assert r.router.most_in_flight == 8


async def test_starting_many_samples_yields_to_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a start of many samples shows to the rest of the loop: a few more each time."""
    monkeypatch.setattr("rlsys.rollout.runner.MAX_STARTS_PER_ITERATION", 3)
    async with rig(make_config(tmp_path, **APRIL)) as r:
        await r.start()
        taking, counts = asyncio.create_task(r.take(1)), [0]
        while r.router.most_in_flight < 8:
            await asyncio.sleep(0)
            counts.append(len(r.router.in_flight))
        assert max(next_count - count for count, next_count in itertools.pairwise(counts)) <= 3
        assert ids((await taking).groups) == [0, 1]


async def test_surplus_groups_are_kept_for_the_next_step(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path, **APRIL)) as r:
        await r.start()
        first = await r.take(1)  # all four groups in flight end with the same token
        assert ids(first.groups) == [0, 1]
        assert ids(r.buffer.ready()) == [2, 3]
        await r.push()
        received = r.router.received
        second = await r.manager.take(2)  # at once, no token needed
        assert second is not None
        assert ids(second.groups) == [2, 3]
        assert r.router.received == received
        assert second.metrics["staleness_max"] == 1


async def test_colocated_engines_only_work_for_a_waiting_take(tmp_path: Path) -> None:
    """An evaluation has them for itself, and a take that has enough does not start what it would interrupt."""
    async with rig(make_config(tmp_path, **APRIL, eval={"prompts": 2}), slow_group_zero) as r:
        await r.start()
        await r.until(r.manager.evaluate())
        assert (r.router.most_in_flight, r.buffer.next_group_id) == (0, 0)
        await r.take(1)
        await r.push()
        while len(r.buffer.ready()) < 2:
            await r.take(r.buffer.last_taken_step + 1)
            await r.push()
        resumes = r.router.resumes
        await r.manager.take(r.buffer.last_taken_step + 1)
        assert r.router.resumes == resumes


async def test_colocated_engines_keep_samples_within_max_staleness_and_return_the_others(
    tmp_path: Path,
) -> None:
    config = make_config(
        tmp_path,
        rollout={"over_provision": 2, "max_staleness": 1},
        router={"interruption": "retract"},
    )
    async with rig(config, slow_group_zero) as r:
        r.router.keeps_samples = True
        await r.start()
        await r.take(1)
        straggler = r.buffer.groups[0].samples[0]
        assert straggler.sample_id in r.router.in_flight and straggler.status is Status.IN_FLIGHT
        await r.push()
        assert (straggler.status, straggler.resumes) == (Status.IN_FLIGHT, 0)
        await r.take(2)
        assert straggler.status is Status.PARKED, "no later step may take it"
        await r.push()
        assert 0 not in r.buffer.groups


async def test_too_old_groups_are_dropped_and_counted(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout={"over_provision": 2, "max_staleness": 1})
    async with rig(config, slow_group_zero) as r:
        await r.start()
        await r.take(1)
        await r.push()
        assert 0 in r.buffer.groups  # one version old: allowed
        await r.take(2)
        await r.push()
        assert 0 not in r.buffer.groups
        ledger = r.buffer.ledger()
        assert ledger.groups["expired"] == 1
        assert ledger.tokens["expired"] > 0
        batch = await r.take(3)
        assert batch.metrics["expired"] == 1
        assert batch.metrics["staleness_max"] <= 1


async def test_disaggregated_generation_continues_while_the_trainer_works(tmp_path: Path) -> None:
    config = make_config(tmp_path, **APRIL, launch={"placement": "disaggregated"})
    async with rig(config, slow_group_zero) as r:
        await r.start()
        await r.take(1)
        assert r.router.in_flight  # nobody was interrupted
        received_before = r.router.received
        r.router.tick()
        assert r.router.received > received_before
        r.router.calls.clear()
        await r.push()
        assert r.router.calls[0] == "interrupt"
        assert r.router.calls[-1] == "end 2"


# Rewards


async def broken_reward(prompt: Prompt, text: str) -> float:
    if prompt.index == 0:
        raise ZeroDivisionError("no such thing")
    if prompt.index == 1:
        return math.nan
    if prompt.index == 2:
        await asyncio.Event().wait()
    return 1.0


async def test_a_reward_that_raises_hangs_or_is_nan_censors_its_group(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout={"reward_timeout": 0.01})
    async with rig(config, reward=broken_reward) as r:
        await r.start()
        samples = {s.group_id: s for g in r.buffer.active() for s in g.samples}
        take = asyncio.create_task(r.manager.take(1))
        while not take.done():  # the hung ones end by the clock
            r.router.tick()
            await asyncio.sleep(0.001)
            samples |= {s.group_id: s for g in r.buffer.active() for s in g.samples}
        batch = take.result()
        assert batch is not None
        assert ids(batch.groups) == [3, 4]
        assert batch.metrics["censored"] == 3
        assert all(samples[i].status is Status.CENSORED and samples[i].reward is None for i in range(3))
        assert (samples[0].censor_reason or "").startswith("reward raised ZeroDivisionError: no such thing (")
        assert samples[1].censor_reason == "reward returned nan; expected a finite number"
        assert samples[2].censor_reason is not None
        assert "reward_timeout = 0.01" in samples[2].censor_reason
        assert r.scorer.timeouts == 2


async def test_a_run_with_only_censored_groups_stops(tmp_path: Path) -> None:
    async def never(prompt: Prompt, text: str) -> float:
        raise OSError("judge is away")

    async with rig(make_config(tmp_path), reward=never) as r:
        await r.start()
        with pytest.raises(RunError, match=r"last 4 groups could not be used; .* OSError: judge is away"):
            await r.take(1)


async def test_refused_prompts_are_censored_and_too_many_are_the_users_mistake(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path)) as r:
        r.router.refuse = lambda s: s.group_id == 1
        await r.start()
        assert ids((await r.take(1)).groups) == [0, 2]
        r.router.refuse = lambda s: True
        await r.push()
        with pytest.raises(UserError, match="prompt refused: the prompt has 900 tokens"):
            await r.take(2)


# When things go wrong


async def test_a_stall_error_names_the_pending_samples_and_engines(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout={"stall_timeout": 0.02})
    async with rig(config) as r:
        await r.start()
        take = asyncio.create_task(r.manager.take(1))
        await settle()
        r.router.add_tokens(0, 1)
        with pytest.raises(RunError) as e:
            await take
        text = str(e.value)
        assert "rollout.stall_timeout = 0.02 s" in text
        assert "sample 0 in_flight with 1 tokens" in text
        assert "http://engine:1 version 1" in text


async def test_a_bug_in_the_background_reaches_the_trainer(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path), lambda s: [][s.sample_id]) as r:
        await r.start()
        await settle()

        async def broken(*_: object, **__: object) -> None:
            raise KeyError("router")

        r.router.generate = broken  # type: ignore[method-assign, assignment]
        await r.manager.restore(0)
        await r.push()
        with pytest.raises(RunError, match="rollout: KeyError"):
            await r.manager.take(1)


async def test_a_returned_engine_gets_the_current_weights_before_the_take_continues(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path)) as r:
        await r.start()
        r.router.stale_engines = ["http://engine:2"]
        assert await r.manager.take(1) is None
        ticket = await r.manager.begin_push()
        assert (ticket.weight_version, [e.url for e in ticket.engines]) == (1, ["http://engine:2"])
        assert r.router.calls[-1] == "begin 1 stale"
        await r.manager.end_push(ticket, [])
        assert ids((await r.take(1)).groups) == [0, 1]


async def test_commands_out_of_order_are_refused(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path)) as r:
        await r.manager.restore(0)
        with pytest.raises(RunError, match=r"take\(1\) after 0 steps: the trainer must push first"):
            await r.manager.take(1)
        await r.push()
        batch = await r.take(1)
        assert await r.take(1) == batch  # asked again: the same
        with pytest.raises(RunError, match=r"take\(2\) after 1 steps: the trainer must push first"):
            await r.manager.take(2)
        ticket = await r.manager.begin_push()
        ticket.weight_version = 1
        with pytest.raises(RunError, match="end_push: weight version 1; expected 2, as in begin_push"):
            await r.manager.end_push(ticket, [])


async def test_lost_tokens_are_counted_in_the_ledger_of_the_run(tmp_path: Path) -> None:
    rig = Rig(make_config(tmp_path), lambda s: 3, length_reward)
    await rig.start()
    rig.router.lost = 5
    assert (await rig.take(1)).metrics["lost"] == 5
    await rig.push()
    assert (await rig.take(2)).metrics["lost"] == 5  # the same five
    await rig.manager.close()
    rig.buffer.close()


async def test_canaries_are_prompts_and_the_longest_responses_of_the_last_step(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path, eval={"prompts": 2}), lambda s: 1 + s.sample_id) as r:
        await r.manager.restore(0)
        assert (await r.manager.begin_push()).canaries == [[1], [1, 1]]
        await r.push()
        await r.take(1)
        responses = [[5, 6, s // 2, *range(1 + s)] for s in (3, 2, 1, 0)]
        assert (await r.manager.begin_push()).canaries == [[1], [1, 1], *responses]


async def test_a_token_that_reaches_no_sample_stops_the_run(tmp_path: Path) -> None:
    rig = Rig(make_config(tmp_path), lambda s: 3, length_reward)
    await rig.start()
    rig.router.received = 1
    with pytest.raises(RunError, match="engines sent 13 tokens of samples, but 12 are saved"):
        await rig.take(1)
    rig.router.received -= 1
    await rig.manager.close()
    rig.buffer.close()


# Evaluation


async def test_evaluation_counts_full_rewards_and_excludes_samples_without_a_reward(tmp_path: Path) -> None:
    async def reward(prompt: Prompt, text: str) -> float:
        if prompt.index == 3:
            raise ValueError("no")
        return 1.0 if len(text) > 2 else 0.5

    async with rig(make_config(tmp_path, eval={"prompts": 5}), reward=reward) as r:
        await r.start()
        result = await r.manager.evaluate()
        assert (result.accuracy, result.prompts) == (0.5, 4)
        assert (result.mean_length, result.truncated) == (3.0, 0)


# Restarts


def long_tail(sample: Sample) -> int:
    return 2 + (sample.seed % 17)


async def test_a_restarted_run_resumes_parked_samples_with_their_tokens(tmp_path: Path) -> None:
    config = make_config(tmp_path, **APRIL)
    async with rig(config, slow_group_zero) as r:
        await r.start()
        await r.take(1)
        saved_ids = r.buffer.groups[0].samples[0].response_ids[:]
    async with rig(config, slow_group_zero) as r:
        await r.start(1)
        sample = r.buffer.groups[0].samples[0]
        assert sample.response_ids == saved_ids
        assert sample.spans[0].version == 1
        await settle()
        assert r.router.in_flight == []  # colocated: nothing is generated before somebody waits for it
        take = asyncio.create_task(r.manager.take(2))
        await settle()
        assert 0 in r.router.in_flight
        r.router.tick()
        assert list(sample.response_ids) == [*saved_ids, len(saved_ids)]
        assert sample.resumes == 1
        take.cancel()


async def test_after_a_crash_the_same_groups_are_trained_in_the_same_steps(tmp_path: Path) -> None:
    """Checkpoint at step 1, steps 2 and 3 lost, then on to 5; nothing is generated before step 3 is back."""
    config = make_config(tmp_path, **APRIL)
    async with rig(config, long_tail) as r:
        await r.start()
        batches = {}
        for step in (1, 2, 3):
            batches[step] = await r.take(step)
            await r.push()
    async with rig(config, long_tail) as r:
        await r.start(1)
        for step in (2, 3):
            await settle()
            assert r.router.received == 0
            again = await r.take(step)
            assert again.groups == batches[step].groups
            assert again.weight_version == batches[step].weight_version
            for key in ("off_policy_share", "staleness_max", "reward"):
                assert again.metrics[key] == batches[step].metrics[key]
            await r.push()
        group_ids = [i for t in batches.values() for i in ids(t.groups)]
        for step in (4, 5):
            group_ids += ids((await r.take(step)).groups)
            await r.push()
        assert len(group_ids) == len(set(group_ids)) == 10
        assert r.buffer.ledger().groups["expired"] == 0


async def test_a_synchronous_run_is_the_same_with_and_without_a_crash(tmp_path: Path) -> None:
    async def steps(folder: Path, crash: bool) -> list[list[SampleGroup]]:
        config = make_config(folder)
        out: dict[int, list[SampleGroup]] = {}
        async with rig(config, long_tail) as r:
            await r.start()
            for step in (1, 2, 3):
                out[step] = (await r.take(step)).groups
                await r.push()
            if crash:  # in the middle of step 4's rollout
                take = asyncio.create_task(r.manager.take(4))
                await settle()
                r.router.tick(2)
                take.cancel()
            else:
                out[4] = (await r.take(4)).groups
        if crash:
            async with rig(config, long_tail) as r:
                await r.start(1)
                for step in (2, 3, 4):
                    out[step] = (await r.take(step)).groups
                    await r.push()
        return [out[s] for s in sorted(out)]

    def tokens(groups: list[list[SampleGroup]]) -> list[object]:
        return [
            [(s.response_ids, s.mu, s.seed, s.reward) for g in step for s in g.samples] for step in groups
        ]

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    reference, crashed = await steps(tmp_path / "a", False), await steps(tmp_path / "b", True)
    assert [ids(g) for g in reference] == [ids(g) for g in crashed]
    assert tokens(reference) == tokens(crashed)


class Killed(Exception):
    """The process ended here."""


async def flaky_reward(prompt: Prompt, text: str) -> float:
    if prompt.index % 11 == 0:
        raise OSError("judge is away")
    await asyncio.sleep(0)
    return float(len(text) % 2)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.gate) for n in (1, 2))])
def test_chaos_each_group_is_trained_once_under_random_kills(tmp_path: Path, seed: int) -> None:
    """40 steps; the process is killed with kill -9's effect at random awaits, checkpoints are random."""
    rng = random.Random(seed)
    config = make_config(tmp_path, rollout={"over_provision": 2, "max_staleness": 3})
    groups_by_step: dict[int, list[int]] = {}

    async def session(saved: int) -> int:
        """Until killed or done; returns the step of the last checkpoint."""
        r = Rig(config, long_tail, flaky_reward)
        try:
            await r.start(saved)
            for step in range(saved + 1, 41):
                task = asyncio.create_task(r.manager.take(step))
                while not task.done():
                    if rng.random() < 0.02:
                        raise Killed
                    await settle()
                    r.router.tick(rng.randint(0, 4))
                batch = task.result()
                assert batch is not None
                assert groups_by_step.setdefault(step, ids(batch.groups)) == ids(batch.groups)
                assert batch.metrics["staleness_max"] <= 3
                if rng.random() < 0.1:
                    raise Killed
                await r.push()
                if rng.random() < 0.3:
                    await r.manager.commit(step)
                    saved = step
        except Killed:
            pass
        finally:
            check_ledger(r.buffer.ledger())
            abandon(r.buffer)
        return saved if len(groups_by_step) < 40 else 40

    saved = sessions = 0
    while saved < 40:
        saved, sessions = asyncio.run(session(saved)), sessions + 1
    assert sessions > 5
    trained = [g for groups in groups_by_step.values() for g in groups]
    assert len(trained) == len(set(trained)) == 80
    check_ledger(RunReader(tmp_path).ledger())


async def test_data_that_changed_under_the_run_is_the_users_mistake(tmp_path: Path) -> None:
    class Shifted(Numbers):
        def train(self, index: int) -> Prompt:
            return Prompt(index, "", [7, 7, 7], {})

    config = make_config(tmp_path, **APRIL)
    async with rig(config, slow_group_zero) as r:
        await r.start()
        await r.take(1)
    async with rig(config, slow_group_zero) as r:
        r.manager._runner._planning._source = Shifted()
        await r.start(1)
        with pytest.raises(UserError, match="the token ids of prompt 0 differ from those in the ledger"):
            await r.manager.take(2)


async def test_commit_prunes_up_to_the_oldest_kept_checkpoint(tmp_path: Path) -> None:
    config = make_config(tmp_path, trainer={"checkpoint_every": 1, "keep_checkpoints": 2})
    async with rig(config) as r:
        await r.start()
        for step in (1, 2, 3):
            await r.take(step)
            await r.push()
            await r.manager.commit(step)
        with pytest.raises(UserError, match="checkpoint is of step 1; expected step 2 or later"):
            r.buffer.restore(1)
        await r.start(2)
        assert ids((await r.take(3)).groups) == [4, 5]


async def test_commit_keeps_the_routes_of_running_samples(tmp_path: Path) -> None:
    """They have come with an earlier turn, and its file is full; nothing has saved the sample since."""
    trainer_section = {"checkpoint_every": 1, "keep_checkpoints": 1}
    config = make_config(tmp_path, **APRIL, trainer=trainer_section, launch={"placement": "disaggregated"})
    async with rig(config, slow_group_zero) as r:
        await r.start()
        await r.take(1)
        await r.push()
        await settle()
        r.router.add_tokens(0, 1)
        running = r.buffer.groups[0].samples[0]
        assert running.status is Status.IN_FLIGHT and running.tokens
        positions = len(running.prompt_ids) + running.tokens - 1
        segment_writer = writer(tmp_path, size=1)  # a file for each record
        location = read_pointer(segment_writer.append(chosen(positions), 0), 0, positions)
        assert location is not None
        running.append(Segment([], [], [], None, routes=RouteSpan(0, positions, b"", location)))
        for _ in range(2):
            segment_writer.append(chosen(1), 0)
        await r.manager.commit(1)
        r.buffer.save([running])
        (saved,) = (s for s in load_tokens(tmp_path, r.buffer.read_groups([0]))[0].samples if s.index == 0)
        with SegmentReader(tmp_path) as reader:
            assert [s.end for s in load_with_routes(reader, saved).routes] == [positions]


async def test_commit_deletes_nothing_if_the_ledger_is_inconsistent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, trainer={"checkpoint_every": 1, "keep_checkpoints": 1})
    async with rig(config) as r:
        await r.start()
        for step in (1, 2):
            await r.take(step)
            await r.push()
        ledger = r.buffer.ledger()

        async def one_more() -> Ledger:
            return replace(ledger, issued_groups=ledger.issued_groups + 1)

        with monkeypatch.context() as patched:
            patched.setattr(r.buffer, "committed_ledger", one_more)
            with pytest.raises(RunError, match=rf"{ledger.issued_groups + 1} groups were issued, but"):
                await r.manager.commit(2)
        await r.start(1)
        assert ids((await r.take(2)).groups) == [2, 3]


@pytest.mark.parametrize("command", ["restore", "leave"])
async def test_samples_are_parked_before_the_trainer_restarts_or_leaves(tmp_path: Path, command: str) -> None:
    """Disaggregated engines work between commands. What they have made by then is on disk when the answer comes."""
    config = make_config(tmp_path, **APRIL, launch={"placement": "disaggregated"})
    async with rig(config, lambda s: 15) as r:
        await r.start()
        await settle()
        r.router.tick(4)
        busy = r.router.in_flight
        assert busy
        r.router.calls.clear()
        await (r.manager.restore(0) if command == "restore" else r.manager.leave(60.0))
        assert r.router.calls == ["interrupt"]
        assert not r.router.in_flight
        samples = [s for g in r.buffer.active() for s in g.samples if s.sample_id in busy]
        assert {(s.status, len(s.response_ids)) for s in samples} == {(Status.PARKED, 4)}
        assert not any(r.buffer.unsaved(s) for s in samples)
