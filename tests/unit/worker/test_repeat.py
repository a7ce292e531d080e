"""rollout.repeat: another clock, the same run."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core.errors import RunError, UserError
from rlsys.core.types import Sample, TrainBatch
from rlsys.ledger.store import FILE_NAME
from rlsys.worker.run_replay import RunRecord
from tests.helpers.loaded import load_tokens
from tests.helpers.rollout_rig import Rig, length_reward, make_config, settle

STEPS = 8
Clock = Callable[[Rig], None]


def length(sample: Sample) -> int:
    return 3 + (sample.sample_id * 7) % 17


def random_clock(seed: int) -> Clock:
    """Engines of different speeds, which change all the time."""
    rng = random.Random(seed)

    def tick(r: Rig) -> None:
        for sample_id in r.router.in_flight:
            if rng.random() < 0.5:
                r.router.add_tokens(sample_id, rng.randint(1, 4))

    return tick


async def trained(
    config: Config, clock: Clock, steps: int = STEPS
) -> tuple[list[TrainBatch], dict[str, Any]]:
    """What every step took, and the ledger's groups at the end."""
    r = Rig(config, length, length_reward)
    try:
        await r.start()
        out = []
        for step in range(1, steps + 1):
            batch = await done(r, r.manager.take(step), clock)
            out.append(replace(batch, groups=load_tokens(r.folder, batch.groups)))
            ticket = await done(r, r.manager.begin_push(), clock)
            await r.manager.end_push(ticket, [])
        await r.manager.close()
        return out, r.buffer.ledger().groups
    finally:
        r.buffer.close()


async def done(r: Rig, work: Any, clock: Clock) -> Any:
    task = asyncio.create_task(work)
    for _ in range(3000):
        await settle()
        if task.done():
            return task.result()
        clock(r)
        if not r.router.in_flight:
            await asyncio.sleep(0.002)  # nothing runs: it looks again after a while
    raise AssertionError(r.manager.status())


def what(taken: list[TrainBatch]) -> list[Any]:
    return [
        [
            (q.sample_id, q.sequence, q.response_ids, q.mu, q.versions(), s.status, s.reward)
            for g in t.groups
            for s in g.samples
            for q in s.sequences
        ]
        for t in taken
    ]


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
@pytest.mark.parametrize("policy", ["drop", "mask"])
async def test_another_clock_repeats_every_token(
    placement: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsys.rollout.progress_watch.POLL_SECONDS", 0.001)

    def config(name: str, **rollout: Any) -> Config:
        april = {"over_provision": 3, "max_staleness": 2, "staleness_policy": policy}
        (tmp_path / name).mkdir()
        sections = {"run": {"dir": tmp_path / name}, "launch": {"placement": placement}}
        return make_config(tmp_path, rollout={**april, **rollout}, **sections)

    first, groups = await trained(config("first"), random_clock(1))
    second, _ = await trained(config("other"), random_clock(2))
    again, groups_again = await trained(config("again", repeat=tmp_path / "first"), random_clock(2))
    assert what(second) != what(first)
    assert what(again) == what(first)
    assert groups_again["expired"] == groups["expired"]
    assert any(s.resumes for t in first for g in t.groups for s in g.samples)


async def test_another_clock_repeats_every_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.rollout.progress_watch.POLL_SECONDS", 0.001)

    def config(name: str, **more: Any) -> Config:
        (tmp_path / name).mkdir()
        generator = "tests.helpers.episode_cases:consecutive_sequences"
        rollout = {"over_provision": 3, "max_staleness": 2, "generator": generator, **more}
        return make_config(tmp_path, rollout=rollout, run={"dir": tmp_path / name})

    first, _ = await trained(config("first"), random_clock(1))
    again, _ = await trained(config("again", repeat=tmp_path / "first"), random_clock(2))
    assert what(again) == what(first)
    sequences = [q for t in first for g in t.groups for s in g.samples for q in s.sequences]
    assert {q.sequence for q in sequences} == {0, 1, 2} and any(q.resumes for q in sequences if q.sequence)


async def test_a_record_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.rollout.progress_watch.POLL_SECONDS", 0.001)
    first, again = tmp_path / "first", tmp_path / "again"
    first.mkdir()
    again.mkdir()
    await trained(make_config(tmp_path, run={"dir": first}), random_clock(1), steps=2)
    repeated = make_config(tmp_path, run={"dir": again}, rollout={"repeat": first})
    with pytest.raises(RunError, match="the record ends with train step 2"):
        await trained(repeated, random_clock(2), steps=3)


def test_only_a_run_of_this_config_can_be_repeated(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    Rig(make_config(tmp_path, run={"dir": first}), length, length_reward).buffer.close()
    with pytest.raises(UserError, match=r"rollout.repeat = .*first: the config of that run differs"):
        RunRecord(first, make_config(tmp_path, rollout={"group_size": 3}))
    with pytest.raises(UserError, match="no such file"):
        RunRecord(tmp_path / "none", make_config(tmp_path))


async def test_a_run_record_allows_two_stops_per_step_but_no_restored_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsys.rollout.progress_watch.POLL_SECONDS", 0.001)
    first = tmp_path / "first"
    first.mkdir()
    config = make_config(tmp_path, run={"dir": first})
    await trained(config, random_clock(1), steps=2)
    with closing(sqlite3.connect(first / FILE_NAME)) as db:
        old, *_, new = [row[0] for row in db.execute("SELECT weight_version FROM pushes ORDER BY train_step")]
        (sample,) = db.execute("SELECT min(sample_id) FROM samples WHERE tokens > 2").fetchone()

        def spans(*of: list[int]) -> None:
            with db:
                db.execute("UPDATE samples SET spans = ? WHERE sample_id = ?", (json.dumps(of), sample))

        spans([old, 0, 2], [new, 2, 3])
        with db:
            db.execute("INSERT INTO interrupts VALUES (NULL, ?, 0, 1, ?)", (sample, old))
        stops = RunRecord(first, config).stops[sample, 0]
        assert [(stop.end, stop.last) for stop in stops] == [(1, False), (2, False), (3, True)]
        assert stops[0].trained_steps == stops[1].trained_steps < stops[2].trained_steps
        spans([new, 0, 2], [old, 2, 3])
        with pytest.raises(
            UserError, match=f"its trainer went back to an earlier checkpoint while sample {sample} ran; "
        ):
            RunRecord(first, config)
