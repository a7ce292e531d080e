"""kill -9 of the coordinator of several rollout workers, as real processes on scripted engines: its workers end, and
the next one goes on with every step once, the same groups in each, and every token where it belongs.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sqlite3
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_ledger
from rlsys.ledger.reader import RunReader
from rlsys.ledger.store import FILE_NAME
from rlsys.segments.records import FOLDER
from tests.helpers.coordinator_stage import BOUNDARIES, CHECKPOINT_EVERY, STEP_LOG, saved_step
from tests.helpers.engine_server import serve_engines
from tests.helpers.rollout_rig import abandon, make_config
from tests.helpers.scripted_engine import ScriptedEngine

ROLLOUT = {
    "groups_per_step": 4, "group_size": 2, "max_response_tokens": 60, "over_provision": 2, "max_staleness": 4,
    "flush_tokens": 32,
}  # fmt: skip
FOREVER = 10**6
END_SECONDS = 30.0
PARTS = 5
"""Boundaries are told apart into so many tests."""


class Killed:
    """One run, and its coordinators, one after the other."""

    def __init__(self, folder: Path, engines: list[ScriptedEngine], config: Path) -> None:
        self.folder, self.engines, self.config = folder, engines, config
        self.log = folder / "log"
        self.torn = 0
        """Bytes that coordinators had told nobody of when they died, those of the last one included."""

    async def begin(self, boundary: str = "-", times: int = 1, steps: int = FOREVER) -> Process:
        args = [str(self.config), str(steps), boundary, str(times), *(e.url for e in self.engines)]
        module = [sys.executable, "-m", "tests.helpers.coordinator_stage"]
        with self.log.open("wb") as log:
            return await asyncio.create_subprocess_exec(*module, *args, stderr=log)

    async def killed(self, process: Process, workers: list[psutil.Process]) -> None:
        """It is dead. Its workers end, and what it knew is whole."""
        assert await process.wait() == -signal.SIGKILL, self.log.read_text()
        async with asyncio.timeout(END_SECONDS):
            while any(lives(w) for w in workers):
                await asyncio.sleep(0.02)
        if (self.folder / FILE_NAME).exists():
            with closing(sqlite3.connect(self.folder / FILE_NAME)) as db:
                self.torn += self._not_committed(db)

    def _not_committed(self, db: sqlite3.Connection) -> int:
        going = db.execute("SELECT value FROM meta WHERE key = 'going'").fetchone()
        lengths = dict.fromkeys(json.loads(going[0]) if going else (), sys.maxsize)
        lengths |= dict(db.execute("SELECT name, length FROM segments"))
        files = [f for f in (self.folder / FOLDER).glob("*.seg") if f.is_file()]
        for name, length in lengths.items():
            path = self.folder / FOLDER / name
            assert length == sys.maxsize or path.stat().st_size >= length, (
                f"{name}: rows point behind its end"
            )
        return sum(max(0, f.stat().st_size - lengths.get(f.name, 0)) for f in files)

    async def finish(self) -> None:
        """A coordinator that lives to the end; then the ledger is exact."""
        steps = (self._told()[-1][0] if self._told() else 0) + CHECKPOINT_EVERY
        process = await self.begin(steps=steps)
        assert await process.wait() == 0, self.log.read_text()
        groups_by_step: dict[int, list[Any]] = {}
        for step, groups in self._told():
            assert groups_by_step.setdefault(step, groups) == groups, "the same step was given something else"
        assert list(groups_by_step) == list(range(1, steps + 1))
        ids = [group[0] for groups in groups_by_step.values() for group in groups]
        assert len(ids) == len(set(ids)) == steps * ROLLOUT["groups_per_step"]
        ledger = RunReader(self.folder).ledger()
        check_ledger(ledger)
        assert {s: sorted(ids) for s, ids in ledger.journal.items()} == {
            s: [group[0] for group in groups] for s, groups in groups_by_step.items()
        }
        assert ledger.groups["trained"] == len(ids) and ledger.lost_tokens == 0
        with closing(sqlite3.connect(self.folder / FILE_NAME)) as db:
            assert not self._not_committed(db)

    def _told(self) -> list[tuple[int, list[Any]]]:
        file = self.folder / STEP_LOG
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


@asynccontextmanager
async def run(folder: Path, workers: int, engines: int = 4) -> AsyncIterator[Killed]:
    config = make_config(
        folder,
        rollout=ROLLOUT | {"workers": workers},
        engine={"count": engines, "return_routes": True},
        trainer={"checkpoint_every": CHECKPOINT_EVERY, "keep_checkpoints": 1},
    )
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / FOLDER).mkdir()
    scripted_engines = [
        ScriptedEngine(
            f"http://e{i}:1", ends_at=lambda s: 3 + s % 50, segments=folder / FOLDER if i % 2 else None
        )
        for i in range(engines)
    ]
    async with serve_engines(*scripted_engines):
        yield Killed(folder, scripted_engines, folder / "config.json")


@pytest.mark.parametrize(
    ("workers", "seed", "kills"),
    [
        pytest.param(2, 0, 3, marks=pytest.mark.gate),
        *(pytest.param(k, s, 12, marks=pytest.mark.full) for k, s in ((2, 1), (4, 2))),
    ],
)
async def test_a_coordinator_killed_at_any_moment_resumes_without_repeating_a_step(
    tmp_path: Path, workers: int, seed: int, kills: int
) -> None:
    """Sometimes while a worker stands still, and hears of it later."""
    rng = random.Random(seed)
    async with run(tmp_path, workers) as killed:
        for _ in range(kills):
            process = await killed.begin()
            await asyncio.sleep(rng.uniform(0.0, 6.0))
            worker_processes = workers_of(process)
            still = [rng.choice(worker_processes)] if worker_processes and rng.random() < 0.3 else []
            for worker in still:
                worker.suspend()
            process.kill()
            for worker in still:
                with suppress(psutil.NoSuchProcess):
                    worker.resume()
            await killed.killed(process, worker_processes)
        await killed.finish()
        assert saved_step(tmp_path) > 0
        print(f"{killed.torn} bytes torn")


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
async def test_a_coordinator_killed_at_each_boundary_resumes_without_repeating_a_step(
    tmp_path: Path, part: int
) -> None:
    rng = random.Random(part)
    async with run(tmp_path, 2) as killed:
        for name in list(BOUNDARIES)[part::PARTS]:
            process = await killed.begin(
                name, times=1 if BOUNDARIES[name].needs_worker_death else rng.choice((1, 1, 2))
            )
            worker_processes: list[psutil.Process] = []
            while process.returncode is None:
                worker_processes = workers_of(process) or worker_processes
                await asyncio.sleep(0.02)
            await killed.killed(process, worker_processes)
        await killed.finish()


def workers_of(process: Process) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_no_two_workers_ever_have_one_name(tmp_path: Path) -> None:
    """A worker may write under its name before anything else is committed, and outlive its coordinator."""
    names = set()
    for _ in range(3):
        buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", 2, holds_tokens=False)
        names |= {buffer.new_writer(), buffer.new_writer()}
        abandon(buffer)
    assert len(names) == 6
