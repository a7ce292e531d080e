"""Several rollout workers as real processes, on scripted engines behind real sockets."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config, identity
from rlsys.errors import RunError
from rlsys.records import FOLDER
from rlsys.rollout.buffer import RolloutBuffer
from rlsys.rollout.ledger import check
from rlsys.rollout.manager import RolloutManager
from rlsys.rollout.planning import Planning
from rlsys.rollout.scoring import Scorer
from rlsys.rollout.store import FILE_NAME
from rlsys.rollout.workers import Workers
from rlsys.tickets import Canary
from rlsys.types import Sample, Taken
from tests.helpers.engine_server import served
from tests.helpers.loaded import loaded
from tests.helpers.rollout_rig import Numbers, make_config
from tests.helpers.scripted_engine import ScriptedEngine, canary_logprobs, logprob, token

pytestmark = pytest.mark.gate  # each starts processes

ROLLOUT = {
    "groups_per_step": 4,
    "group_size": 2,
    "max_response_tokens": 60,
    "over_provision": 2,
    "max_staleness": 4,
}


class Run:
    """A rollout with workers, and its trainer."""

    def __init__(self, config: Config, engines: list[ScriptedEngine]) -> None:
        self.config, self.engines = config, engines
        file = config.run.dir / "config.json"
        file.write_text(config.model_dump_json())
        planning = Planning(config, Numbers(), None)
        self.buffer = RolloutBuffer(
            config.run.dir / FILE_NAME, identity(config), planning.largest, in_hand=False
        )
        n = config.rollout.workers
        command = [sys.executable, "-m", "tests.helpers.worker_stage", str(file)]
        self.workers = Workers(config, [[*command, *(e.url for e in engines[i::n])] for i in range(n)])
        self._planning = planning
        self.pushes: Counter[str] = Counter()

    async def begin(self) -> None:
        await self.workers.start(self.buffer)
        scorer: Any = Scorer(lambda: None, lambda ids: "", 5)  # type: ignore[arg-type, return-value]
        self.manager = RolloutManager(
            self.config, self.buffer, self.workers, Numbers(), scorer, self._planning
        )

    async def push(self) -> None:
        ticket = await self.manager.begin_push()
        for address in ticket.engines:
            self.pushes[address.url] += 1
            engine = next(e for e in self.engines if e.url == address.url)
            if engine.update_open and not engine.dead:
                engine.load(ticket.weight_version)
        canaries = [Canary(ids, canary_logprobs(ids, ticket.weight_version)) for ids in ticket.canaries]
        await self.manager.end_push(ticket, canaries)

    async def take(self, step: int) -> Taken:
        while (taken := await self.manager.take(step)) is None:
            await self.push()
        return taken

    def pids(self) -> list[int]:
        return [w.pid for w in self.workers.processes]


@asynccontextmanager
async def run(folder: Path, workers: int, engines: int, **rollout: Any) -> AsyncIterator[Run]:
    """At the end: the ledger adds up, and no worker is left."""
    config = make_config(
        folder,
        rollout=ROLLOUT | {"workers": workers} | rollout,
        engine={"count": engines, "return_routes": True},
    )
    made = [
        ScriptedEngine(
            f"http://e{i}:1", ends_at=lambda s: 3 + s % 50, segments=folder / FOLDER if i % 2 else None
        )
        for i in range(engines)
    ]
    (folder / FOLDER).mkdir(exist_ok=True)
    async with served(*made):
        one = Run(config, made)
        try:
            await one.begin()
            yield one
            pids = one.pids()
            await one.manager.close()
            check(one.buffer.ledger())
        finally:
            await one.workers.close()
            one.buffer.close()
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def expected(sample: Sample) -> None:
    """Each token, log-prob and route is the one that the engine makes at its place under its weights."""
    first = len(sample.prompt_ids)
    ids, mu = list(sample.response_ids), list(sample.mu)
    assert len(ids) == sample.tokens > 0
    for i, version in enumerate(sample.versions()):
        assert mu[i] == logprob(sample.seed, first + i, version)
        assert ids[i] in (2, token(sample.seed, first + i, version))


def check_step(folder: Path, taken: Taken, seen: set[int]) -> None:
    for group in loaded(folder, taken.groups):
        assert group.group_id not in seen
        seen.add(group.group_id)
        for sample in group.samples:
            expected(sample)
            assert sample.reward == float(sample.tokens % 2)


@pytest.mark.parametrize("workers", [2, 4])
async def test_each_token_is_in_the_ledger_once(tmp_path: Path, workers: int) -> None:
    seen: set[int] = set()
    async with run(tmp_path, workers, 4) as r:
        await r.manager.restore(0)
        await r.push()
        for step in range(1, 7):
            taken = await r.take(step)
            check_step(tmp_path, taken, seen)
            assert taken.metrics["lost"] == 0
            await r.push()
        assert r.manager.status()["resumes_total"] > 0  # type: ignore[operator]
        writers = {f.name.rpartition("-")[0] for f in (tmp_path / FOLDER).glob("*.seg")}
    assert len(writers) >= workers and len(seen) == 6 * 4


@pytest.mark.parametrize(
    ("workers", "seed"),
    [(2, 0), *(pytest.param(k, seed, marks=pytest.mark.full) for k, seed in ((2, 1), (4, 2), (4, 3)))],
)
async def test_a_worker_that_is_killed_at_any_moment_costs_nothing_twice(
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
                while not (able := [w for w in r.workers.processes if w.told and w.serving]):
                    await asyncio.sleep(0.01)
                rng.choice(able).kill()

        killer = asyncio.create_task(kill())
        before, step = set(r.pids()), 0
        while not killer.done() or step < 4:
            step += 1
            check_step(tmp_path, await r.take(step), seen)
            await r.push()
        killer.result()
        assert len(before - set(r.pids())) >= 1
    assert len(seen) == 4 * step


async def test_what_a_worker_wrote_and_did_not_tell_is_cut_off_and_counted(tmp_path: Path) -> None:
    async with run(tmp_path, 2, 2) as r:
        await r.manager.restore(0)
        await r.push()
        await r.take(1)
        (worker, *_) = r.workers.processes
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


async def test_a_worker_that_never_gets_further_stops_the_run(tmp_path: Path) -> None:
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
            await r.workers.watch()
        finally:
            killer.cancel()


async def test_samples_of_a_killed_coordinator_go_on_with_other_workers(tmp_path: Path) -> None:
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
