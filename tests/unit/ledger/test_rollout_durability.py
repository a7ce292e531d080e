"""What a kill -9 of the rollout process costs, and what the file says about what the clock decided."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from rlsys.core.spans import VersionSpan
from rlsys.core.types import Sample, Segment, Status
from rlsys.ledger.store import FILE_NAME
from tests.helpers.rollout_rig import Rig, abandon, length_reward, make_config, rig, settle

APRIL = {"over_provision": 2, "max_staleness": 4}


async def test_a_crash_costs_less_than_flush_tokens(tmp_path: Path) -> None:
    """Eight samples in flight, killed after 7 tokens each, nothing interrupted and nothing finished."""

    async def killed() -> int:
        r = Rig(make_config(tmp_path, rollout={**APRIL, "flush_tokens": 10}), lambda s: 15, length_reward)
        await r.start()
        take = asyncio.create_task(r.manager.take(1))
        await settle()
        for _ in range(7):
            r.router.tick()
        take.cancel()
        await settle()
        received = r.router.received
        abandon(r.buffer)
        return received

    received = await killed()
    assert received == 7 * 8
    async with rig(make_config(tmp_path, rollout={**APRIL, "flush_tokens": 10}), lambda s: 15) as r:
        saved_tokens = sum(len(s.response_ids) for g in r.buffer.active() for s in g.samples)
        assert received - 10 < saved_tokens <= received
        await r.start()
        batch = await r.take(1)
        assert all(list(s.response_ids) == list(range(15)) for g in batch.groups for s in g.samples)


async def test_a_sample_saved_in_pieces_is_restored_whole(tmp_path: Path) -> None:
    """A sample that was saved after every token, with an observation in its middle."""
    config = make_config(tmp_path, rollout={**APRIL, "flush_tokens": 1})
    r = Rig(config, lambda s: 9, length_reward)
    await r.start()
    take = asyncio.create_task(r.manager.take(1))
    await settle()
    r.router.tick(2)
    r.router.tick(2)
    sample = r.buffer.groups[0].samples[0]
    sample.observe([90, 91, 92])
    take.cancel()
    await r.manager.close()
    r.buffer.close()
    back = Rig(config, lambda s: 9, length_reward)
    restored_sample = back.buffer.groups[0].samples[0]
    assert restored_sample == sample
    assert list(restored_sample.response_ids) == [0, 1, 2, 3, 90, 91, 92]
    assert restored_sample.observed_last
    assert restored_sample.trained() == [True] * 4 + [False] * 3
    back.buffer.close()


def test_an_observation_is_part_of_the_response_but_not_trained() -> None:
    sample = Sample(0, 0, 0, [1], seed=1)
    with pytest.raises(ValueError, match="before the first token"):
        sample.observe([5])
    sample.append(Segment([7, 8], [-0.5, -0.5], [VersionSpan(3, 0, 2)]))
    sample.observe([5])
    assert sample.observed_last
    sample.append(Segment([9], [-0.25], [VersionSpan(4, 0, 1)]))
    assert not sample.observed_last
    assert list(sample.response_ids) == [7, 8, 5, 9]
    assert list(sample.mu) == [-0.5, -0.5, 0.0, -0.25]
    assert sample.versions() == [3, 3, 3, 4]
    assert sample.trained() == [True, True, False, True]
    assert sample.sampled_tokens == 3


async def test_the_ledger_records_timing_dependent_decisions(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout=APRIL)
    async with rig(config, lambda s: 8 if s.group_id == 0 else 3) as r:
        await r.start()
        await r.take(1)
        await r.push()
        assert r.buffer.groups[0].samples[0].status is Status.PARKED
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        admissions = db.execute("SELECT group_id, weight_version FROM admissions ORDER BY place").fetchall()
        interrupts = db.execute(
            "SELECT sample_id, tokens, weight_version FROM interrupts ORDER BY place"
        ).fetchall()
    assert admissions == [(g, 1) for g in range(len(admissions))]
    assert interrupts[:2] == [(0, 3, 1), (1, 3, 1)]
