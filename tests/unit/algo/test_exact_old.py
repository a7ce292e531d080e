"""Exact `old` by interruption: which tokens the trainer is asked to score between a take and its push, and that its
scores stay with their tokens. The scripted trainer scores token i of a response with -(i + step / 8)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core.errors import RunError
from rlsys.core.spans import RouteSpan
from rlsys.core.types import LogProbRequest, LogProbResult, Sample
from tests.helpers.rollout_rig import Rig, abandon, length_reward, make_config, rig, settle
from tests.helpers.service_rig import served, ticking

LONG = 12


def group_zero_is_long(sample: Sample) -> int:
    """Two samples over four steps of three tokens; the others of one step each."""
    return LONG if sample.group_id == 0 else 3


def april(tmp_path: Path, **sections: Any) -> Config:
    return make_config(tmp_path, rollout={"over_provision": 2, "max_staleness": 6}, **sections)


def by_trainer(start: int, end: int, step: int) -> list[float]:
    """What the scripted trainer says of tokens [start, end) before it trains this step; exact in float32."""
    return [-float(i + step / 8) for i in range(start, end)]


def scores_of(asked: list[LogProbRequest], step: int) -> list[LogProbResult]:
    return [
        LogProbResult(u.sample.sample_id, u.start, by_trainer(u.start, u.sample.tokens, step)) for u in asked
    ]


def of_group_zero(asked: list[LogProbRequest]) -> list[tuple[int, int, int]]:
    """Sample, first token to score, tokens that it has."""
    return [(u.sample.sample_id, u.start, u.sample.tokens) for u in asked if u.sample.sample_id < 2]


async def taken_with_group_zero(r: Rig, step: int) -> Sample:
    """Steps, from this one on, up to the one that trains group 0: its first sample as the trainer gets it."""
    while True:
        samples = [s for g in (await r.take(step)).groups for s in g.samples if s.sample_id == 0]
        if samples:
            return samples[0]
        await r.manager.store_scores(scores_of(await r.manager.unscored(step), step))
        await r.push()
        step += 1


async def step_of(
    r: Rig, step: int, wanted: Callable[[LogProbRequest], bool] = lambda u: True
) -> list[LogProbRequest]:
    """Take, score what is `wanted`, push. What was asked for."""
    await r.take(step)
    requests = await r.manager.unscored(step)
    await r.manager.store_scores(scores_of([u for u in requests if wanted(u)], step))
    await r.push()
    return requests


async def test_each_interrupt_requests_scores_for_tokens_since_the_last_one(tmp_path: Path) -> None:
    """Also of groups that are ready and not taken: a later step trains on them. Step 3 has a surplus to take and
    generates nothing."""
    async with rig(april(tmp_path), group_zero_is_long) as r:
        await r.start()
        first = await step_of(r, 1)
        surplus = [s.sample_id for g in r.buffer.ready() for s in g.samples]
        assert surplus and set(surplus) <= {u.sample.sample_id for u in first}
        assert of_group_zero(first) == [(0, 0, 3), (1, 0, 3)]
        assert first[0].sample.prompt_ids == [5, 6, 0]
        assert list(r.buffer.load([first[0].sample])[0].response_ids) == [0, 1, 2]
        assert of_group_zero(await step_of(r, 2)) == [(0, 3, 6), (1, 3, 6)]
        assert await step_of(r, 3) == []
        assert of_group_zero(await step_of(r, 4)) == [(0, 6, 9), (1, 6, 9)]
        sample = r.buffer.groups[0].samples[0]
        assert sample.versions() == [1, 1, 1, 2, 2, 2, 4, 4, 4]
        expected = by_trainer(0, 3, 1) + by_trainer(3, 6, 2) + by_trainer(6, 9, 4)
        assert sample.behaviour == expected
        trained_sample = await taken_with_group_zero(r, 5)
        assert len(trained_sample.response_ids) == LONG
        assert trained_sample.behaviour[:9] == expected


async def test_tokens_that_missed_scoring_are_not_requested_again(tmp_path: Path) -> None:
    """Their weights are gone: NaN, which the objective counts as `anchor_missing`."""
    async with rig(april(tmp_path), group_zero_is_long) as r:
        await r.start()
        await step_of(r, 1)
        await step_of(r, 2, wanted=lambda u: u.sample.sample_id != 0)
        await step_of(r, 3)
        assert of_group_zero(await step_of(r, 4)) == [(0, 6, 9), (1, 6, 9)]
        partial_behaviour, full_behaviour = (s.behaviour for s in r.buffer.groups[0].samples)
        assert partial_behaviour[:3] + partial_behaviour[6:] == by_trainer(0, 3, 1) + by_trainer(6, 9, 4)
        assert [math.isnan(x) for x in partial_behaviour[3:6]] == [True] * 3
        assert full_behaviour[3:6] == by_trainer(3, 6, 2)


async def test_tokens_of_the_same_weights_under_two_versions_are_requested_together(tmp_path: Path) -> None:
    """The same weights pushed again, after a restart of the trainer in the middle of a take."""
    async with rig(april(tmp_path), group_zero_is_long) as r:
        await r.start()
        await step_of(r, 1)
        waiting = asyncio.create_task(r.manager.take(2))
        await settle()
        r.router.tick()
        waiting.cancel()
        await r.start(1)
        await r.take(2)
        assert [s.version for s in r.buffer.groups[0].samples[0].spans] == [1, 2, 3]
        requests = await r.manager.unscored(2)
        assert [u[1] for u in of_group_zero(requests)] == [3, 3]


@pytest.mark.parametrize("stored", [False, True], ids=["before the scores came", "after they came"])
async def test_a_crash_loses_no_score_that_was_stored(tmp_path: Path, stored: bool) -> None:
    """kill -9 of the rollout process between a take and its push: the step asks for what is missing, no more."""

    async def killed() -> list[LogProbRequest]:
        r = Rig(april(tmp_path), group_zero_is_long, length_reward)
        await r.start()
        await step_of(r, 1)
        await r.take(2)
        requests = await r.manager.unscored(2)
        if stored:
            await r.manager.store_scores(scores_of(requests, 2))
        await r.manager._runner.reset()
        abandon(r.buffer)
        return requests

    requests = await killed()
    assert of_group_zero(requests) == [(0, 3, 6), (1, 3, 6)]
    async with rig(april(tmp_path), group_zero_is_long) as r:
        expected = by_trainer(0, 3, 1) + (by_trainer(3, 6, 2) if stored else [])
        assert r.buffer.groups[0].samples[0].behaviour == expected
        await r.start(1)
        await r.take(2)
        assert await r.manager.unscored(2) == ([] if stored else requests)


async def test_a_restarted_trainer_requests_no_scores_twice(tmp_path: Path) -> None:
    """From the checkpoint of step 1, steps 2 and 3 are repeated: what their weights sampled has its scores."""
    async with rig(april(tmp_path), group_zero_is_long) as r:
        await r.start()
        for step in (1, 2, 3):
            await step_of(r, step)
        stored_behaviour = list(r.buffer.groups[0].samples[0].behaviour)
        await r.start(1)
        assert await step_of(r, 2) == []
        assert await step_of(r, 3) == []
        assert (await taken_with_group_zero(r, 4)).behaviour[:6] == stored_behaviour


async def test_a_sample_with_a_different_trained_prompt_is_not_scored(tmp_path: Path) -> None:
    """LENS: its log-probs are wanted on the group's prompt, where no weights sampled it."""
    async with rig(april(tmp_path), group_zero_is_long) as r:
        await r.start()
        await step_of(r, 1)
        r.buffer.groups[0].samples[1].trained_prompt = [5, 6, 0]
        assert of_group_zero(await step_of(r, 2)) == [(0, 3, 6)]


async def test_tool_tokens_after_an_interrupt_are_not_scored(tmp_path: Path) -> None:
    """They have the version of the token before them and are not trained: nobody scores them."""
    r = Rig(april(tmp_path), group_zero_is_long, length_reward)
    await r.start()
    await step_of(r, 1)
    sample = r.buffer.groups[0].samples[0]
    sample.observe([90, 91])
    assert of_group_zero(await step_of(r, 2))[0] == (0, 5, 8)
    assert [math.isnan(x) for x in sample.behaviour] == [False] * 3 + [True] * 2 + [False] * 3
    await r.manager.close()
    r.buffer.close()
    back = Rig(april(tmp_path), group_zero_is_long, length_reward)
    assert back.buffer.groups[0].samples[0].behaviour == pytest.approx(sample.behaviour, nan_ok=True)
    back.buffer.close()


async def test_scores_are_requested_only_between_a_take_and_its_push(tmp_path: Path) -> None:
    async with rig(april(tmp_path), group_zero_is_long) as r:
        await r.start()
        with pytest.raises(RunError, match=r"unscored\(1\): allowed only between a take and its push"):
            await r.manager.unscored(1)
        await r.take(1)
        with pytest.raises(RunError, match=r"unscored\(2\)"):
            await r.manager.unscored(2)
        await r.push()
        with pytest.raises(RunError, match=r"unscored\(1\)"):
            await r.manager.unscored(1)


async def test_disaggregated_engines_never_rest(tmp_path: Path) -> None:
    async with rig(april(tmp_path, launch={"placement": "disaggregated"}), group_zero_is_long) as r:
        await r.start()
        await r.take(1)
        with pytest.raises(RunError, match=r"unscored\(1\)"):
            await r.manager.unscored(1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            LogProbResult(4000, 0, [-1.0]),
            "the trainer sent log-probs of sample 4000, whose group is no longer live",
        ),
        (
            LogProbResult(0, 1, [-1.0, -1.0]),
            "sample 0: the trainer sent log-probs of 2 tokens from token 1 on; expected",
        ),
        (
            LogProbResult(0, 3, [-1.0]),
            "sample 0: the trainer sent log-probs of 1 tokens from token 3 on; expected",
        ),
    ],
    ids=["not live", "scored already", "more than it has"],
)
async def test_scores_that_cannot_be_are_refused(tmp_path: Path, wrong: LogProbResult, message: str) -> None:
    r = Rig(april(tmp_path), group_zero_is_long, length_reward)
    await r.start()
    await r.take(1)
    await r.manager.store_scores(scores_of(await r.manager.unscored(1), 1))
    with pytest.raises(RunError, match=message):
        await r.manager.store_scores([wrong])
    await r.manager._runner.reset()
    r.buffer.close()
    back = Rig(april(tmp_path), group_zero_is_long, length_reward)
    assert back.buffer.groups[0].samples[0].behaviour == by_trainer(0, 3, 1)
    back.buffer.close()


async def test_score_requests_over_http_match_those_of_the_manager(tmp_path: Path) -> None:
    async with rig(april(tmp_path), group_zero_is_long) as r, served(r) as client:
        await ticking(r, client.restore, 0)
        await r.start()
        await ticking(r, client.take, 1)
        parked = r.buffer.groups[0].samples[0]
        parked.routes.append(RouteSpan(0, 2, bytes([1, 0, 3, 2])))  # as an abort gives them
        r.buffer.save([parked])
        requests = await ticking(r, client.unscored, 1)
        assert requests == await r.manager.unscored(1)
        (read,) = r.buffer.load(u.sample for u in requests if u.sample.sample_id == 0)
        assert (read.response_ids, read.routes) == (parked.response_ids, parked.routes)
        await ticking(r, client.store_scores, scores_of(requests, 1))
        first = r.buffer.groups[0].samples[0]
        assert first.behaviour == by_trainer(0, len(first.response_ids), 1)
        assert await ticking(r, client.unscored, 1) == []
