"""What staleness_policy, max_resumes, group_deadline, resume_order and over_provision = auto make of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlsys.core.errors import RunError
from rlsys.core.types import Sample, Status
from tests.helpers.rollout_rig import (
    Rig,
    advance_clock,
    answer_all_but,
    answer_until_done,
    ids,
    length_reward,
    make_config,
    rig,
    settle,
)


def april(tmp_path: Path, **rollout: Any) -> Any:
    return make_config(tmp_path, rollout={"over_provision": 2, "max_staleness": 1, **rollout})


def slow_group_zero(sample: Sample) -> int:
    return 15 if sample.group_id == 0 else 3


async def test_wait_takes_a_group_at_the_bound_before_it_grows_too_old(tmp_path: Path) -> None:
    async with rig(april(tmp_path, staleness_policy="wait"), slow_group_zero) as r:
        await r.start()
        assert ids((await r.take(1)).groups) == [1, 2]
        await r.push()
        second = await r.take(2)  # would expire at the next push
        assert ids(second.groups)[0] == 0
        assert second.metrics["staleness_max"] == 1
        await r.push()
        for step in range(3, 8):
            assert (await r.take(step)).metrics["staleness_max"] <= 1
            await r.push()
        assert r.buffer.ledger().groups["expired"] == 0


async def test_mask_trains_an_old_group_without_its_old_tokens(tmp_path: Path) -> None:
    async with rig(april(tmp_path, staleness_policy="mask"), slow_group_zero) as r:
        await r.start()
        for step in range(1, 20):
            batch = await r.take(step)
            await r.push()
            if 0 in ids(batch.groups):
                break
        assert step > 2  # older than max_staleness
        sample = batch.groups[0].samples[0]
        assert list(sample.response_ids) == list(range(15))
        masked = [i for i, t in enumerate(sample.trained()) if not t]
        assert masked == [i for i, v in enumerate(sample.versions()) if step - v > 1]
        assert batch.metrics["masked_tokens"] == 2 * len(masked) > 0
        assert batch.metrics["expired"] == 0
        assert batch.metrics["staleness_max"] > 1


async def test_a_sample_is_not_interrupted_more_often_than_max_resumes(tmp_path: Path) -> None:
    config = april(tmp_path, max_staleness=9, max_resumes=1)
    async with rig(config, lambda s: 18 if s.group_id in (0, 3) else 3) as r:
        await r.start()
        for step in range(1, 8):
            batch = await r.take(step)
            await r.push()
            assert all(s.resumes <= 1 for g in batch.groups for s in g.samples)
            assert all(s.resumes <= 1 for g in r.buffer.active() for s in g.samples)
        assert 0 not in r.buffer.groups


async def test_a_disaggregated_push_waits_for_samples_at_max_resumes(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, rollout={"over_provision": 2, "max_staleness": 9, "max_resumes": 0},
        launch={"placement": "disaggregated"},
    )  # fmt: skip
    async with rig(config, lambda s: 18 if s.group_id == 0 else 3) as r:
        await r.start()
        await r.take(1)
        await r.until(r.manager.begin_push())
        assert r.buffer.groups[0].samples[0].status is Status.FINISHED
        assert all(s.resumes == 0 for g in r.buffer.active() for s in g.samples)


async def test_a_group_behind_its_deadline_is_censored_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(make_config(tmp_path, rollout={"group_deadline": 3600})) as r:
        await r.start()
        take = asyncio.create_task(r.manager.take(1))
        await settle()
        hung, finished_group = r.buffer.groups[0], r.buffer.groups[1]
        await answer_until_done(r, finished_group)
        advance_clock(monkeypatch, 7200)
        await answer_all_but(r, 0, take)
        batch = take.result()
        assert batch is not None
        assert ids(batch.groups) == [1, 2]
        assert batch.metrics["censored"] == 1
        assert hung.samples[0].censor_reason == "not finished within rollout.group_deadline = 3600 s"


async def test_groups_that_all_miss_their_deadline_stop_the_run(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path, rollout={"group_deadline": 0.01})) as r:
        await r.start()
        with pytest.raises(
            RunError, match=r"could not be used; the last one: not finished within rollout.gr"
        ):
            await r.manager.take(1)


@pytest.mark.parametrize(("order", "first"), [("oldest", 0), ("longest", 4), ("nearest_done", 2)])
async def test_resume_order_reaches_the_router(tmp_path: Path, order: str, first: int) -> None:
    r = Rig(april(tmp_path, resume_order=order), lambda s: 19, length_reward)
    await r.start()
    take = asyncio.create_task(r.manager.take(1))
    await settle()
    for sample_id, tokens in {0: 5, 1: 5, 2: 3, 3: 19, 4: 9, 5: 9}.items():
        r.router.add_tokens(sample_id, tokens)
    await settle()
    samples = [s for g in r.buffer.active() for s in g.samples if not s.status.terminal]
    assert min(samples, key=r.router.priority).sample_id == first
    take.cancel()
    await r.manager.close()
    r.buffer.close()


async def test_auto_over_provision_adapts_the_slots_and_resumes_after_a_restart(tmp_path: Path) -> None:
    config = april(tmp_path, over_provision="auto", auto_share=0.05, max_staleness=4)
    async with rig(config, lambda s: 2 + s.seed % 15) as r:
        await r.start()
        factors = []
        for step in range(1, 9):
            batch = await r.take(step)
            await r.push()
            factors.append(batch.metrics["over_provision"])
            assert batch.metrics["slots"] == round(4 * factors[-1])
            assert 0 <= batch.metrics["idle_share"] <= 1
        assert factors[0] == 2
        assert factors[1] > 2  # nothing can be off-policy in the first step
        assert factors[-1] < 1.8
        assert r.manager._runner.slots == r.manager._over_provision._slots != batch.metrics["slots"]
    async with rig(config) as r:
        assert r.manager._over_provision.metrics["over_provision"] <= factors[-1]
