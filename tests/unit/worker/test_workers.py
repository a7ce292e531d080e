"""Several rollout workers as real processes, on scripted engines behind real sockets."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from rlsys.core.errors import RunError
from rlsys.ledger.store import FILE_NAME
from rlsys.segments.records import FOLDER
from tests.helpers.workers_rig import check_step, run

pytestmark = pytest.mark.gate  # each starts processes


@pytest.mark.parametrize("workers", [2, 4])
async def test_each_token_is_in_the_ledger_once(tmp_path: Path, workers: int) -> None:
    seen: set[int] = set()
    async with run(tmp_path, workers, 4) as r:
        await r.manager.restore(0)
        await r.push()
        for step in range(1, 7):
            batch = await r.take(step)
            check_step(tmp_path, batch, seen)
            assert batch.metrics["lost"] == 0
            await r.push()
        assert r.manager.status()["resumes_total"] > 0  # type: ignore[operator]
        writers = {f.name.rpartition("-")[0] for f in (tmp_path / FOLDER).glob("*.seg")}
    assert len(writers) >= workers and len(seen) == 6 * 4


@pytest.mark.parametrize(
    ("workers", "seed"),
    [
        (2, 0),
        *(pytest.param(k, seed, marks=pytest.mark.full) for k, seed in ((2, 1), (4, 2), (4, 3))),
    ],
)
async def test_samples_are_trained_once_when_workers_are_killed_at_random(
    tmp_path: Path, workers: int, seed: int
) -> None:
    """Each kill loses what that worker had not told: it is sampled again, and the file is cut and counted."""
    rng, seen = random.Random(seed), set[int]()
    async with run(tmp_path, workers, 4, flush_tokens=32) as r:
        await r.manager.restore(0)
        await r.push()

        async def kill() -> None:
            for _ in range(6):
                await asyncio.sleep(rng.expovariate(2.0))
                while not (able := [w for w in r.processes if w.reported_tokens and w.serving]):
                    await asyncio.sleep(0.01)
                rng.choice(able).kill()

        killer = asyncio.create_task(kill())
        pids_before, step = set(r.pids()), 0
        while not killer.done() or step < 4:
            step += 1
            check_step(tmp_path, await r.take(step), seen)
            await r.push()
        killer.result()
        assert len(pids_before - set(r.pids())) >= 1
    assert len(seen) == 4 * step


async def test_unreported_bytes_of_a_killed_worker_are_truncated_and_counted(tmp_path: Path) -> None:
    async with run(tmp_path, 2, 2) as r:
        await r.manager.restore(0)
        await r.push()
        await r.take(1)
        (worker, *_) = r.processes
        file = max((tmp_path / FOLDER).glob(f"{worker.writer}-*.seg"))
        size = file.stat().st_size
        with file.open("ab") as end:
            end.write(b"half of a record")
        os.kill(worker.pid, signal.SIGKILL)
        pushes = r.pushes[r.engines[0].url]
        while r.pushes[r.engines[0].url] == pushes:  # the next worker's engines need the weights
            await r.push()
            await asyncio.sleep(0.05)
        await r.take(2)
        assert r.buffer.ledger().torn_bytes >= 16
        assert file.stat().st_size <= size


async def test_a_worker_without_progress_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="rollout worker 0 died 5 times"):
        await _killed_for_ever(tmp_path)


async def _killed_for_ever(folder: Path) -> None:
    async with run(folder, 2, 2) as r:

        async def kill() -> None:
            while True:
                with suppress(ProcessLookupError):
                    os.kill(r.pids()[0], signal.SIGKILL)
                await asyncio.sleep(0.05)

        killer = asyncio.create_task(kill())
        try:
            await asyncio.gather(*r.workers.watches())
        finally:
            killer.cancel()


async def test_samples_of_a_killed_coordinator_continue_on_other_workers(tmp_path: Path) -> None:
    """What was committed is in the ledger; the rest is sampled again, with the same seeds."""
    seen: set[int] = set()
    async with run(tmp_path, 2, 4) as r:
        await r.manager.restore(0)
        await r.push()
        check_step(tmp_path, await r.take(1), seen)
        await r.push()
        await r.manager.commit(1)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as db:
        query = "SELECT count(*) FROM samples WHERE status = 'parked' AND tokens > 0"
        assert db.execute(query).fetchone()[0]
    async with run(tmp_path, 4, 4) as r:
        await r.manager.restore(1)
        await r.push()
        for step in (2, 3):
            check_step(tmp_path, await r.take(step), seen)
            await r.push()
