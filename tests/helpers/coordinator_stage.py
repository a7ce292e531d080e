"""A rollout with workers and its trainer, as a process to be killed:

    python -m tests.helpers.coordinator_stage CONFIG.json STEPS BOUNDARY TIMES URL ...

It trains on from its last checkpoint and writes down in the run's folder what each step was given. At the boundary
of this name (BOUNDARIES; `-`: none), reached for so many times, it ends itself with kill -9.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from rlsys.config import Config, identity
from rlsys.core.weight_updates import Canary
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.replay_log import ReplayLog
from rlsys.ledger.segments import SegmentTable
from rlsys.ledger.store import FILE_NAME
from rlsys.obs.role import end_with_parent
from rlsys.planning.planning import Planning
from rlsys.rollout.manager import RolloutManager
from rlsys.worker.remote_worker import RemoteWorker
from rlsys.worker.scoring import Scorer
from rlsys.worker.worker_engines import WorkerEngines
from rlsys.worker.worker_process import WorkerProcess
from rlsys.worker.workers import Workers, remote_workers
from tests.helpers.engine_server import expected
from tests.helpers.loaded import loaded
from tests.helpers.rollout_rig import Numbers
from tests.helpers.scripted_engine import canary_logprobs

TOLD, SAVED = "told.jsonl", "saved"
CHECKPOINT_EVERY = 2


def saved_step(folder: Path) -> int:
    """Of the trainer's last checkpoint."""
    file = folder / SAVED
    return int(file.read_text()) if file.exists() else 0


class Boundary(NamedTuple):
    """Before or after a call of this method. `call`: of WorkerEngines.all and WorkerProcess.call, those alone."""

    owner: type
    method: str
    side: str
    call: str | None = None
    at_once: bool = False
    """Not from the second take on, but from the beginning."""
    kills: bool = False
    """A worker must have died for it."""


BOUNDARIES = {
    "the segments are cut, nothing is committed": Boundary(SegmentTable, "open", "after", at_once=True),
    "a worker has a name": Boundary(RolloutBuffer, "new_writer", "after", at_once=True),
    "a worker has begun": Boundary(WorkerProcess, "start", "after", at_once=True),
    "a step is given back": Boundary(RolloutBuffer, "restore", "after", at_once=True),
    "a group is issued": Boundary(RolloutBuffer, "issue", "after"),
    "a sample is sent": Boundary(RemoteWorker, "_send_sample", "after"),
    "rows have come": Boundary(RolloutBuffer, "save_from_workers", "before"),
    "rows are written": Boundary(RolloutBuffer, "save_from_workers", "after"),
    "a group is decided": Boundary(RolloutBuffer, "finish", "after"),
    "before a commit": Boundary(RolloutBuffer, "flush", "before"),
    "tokens last, their rows do not": Boundary(SegmentTable, "sync", "after"),
    "rows last, old files are there": Boundary(SegmentTable, "remove_unused", "before"),
    "after a commit": Boundary(RolloutBuffer, "flush", "after"),
    "a take is in the journal": Boundary(RolloutBuffer, "take", "after"),
    "a take is told": Boundary(RolloutManager, "take", "after"),
    "an interrupt goes out": Boundary(Workers, "interrupt", "before"),
    "one worker has answered an interrupt": Boundary(WorkerProcess, "call", "after", "interrupt"),
    "all have answered an interrupt": Boundary(Workers, "interrupt", "after"),
    "interrupts are written": Boundary(ReplayLog, "record_interrupts", "after"),
    "a push begins": Boundary(WorkerEngines, "call_all", "before", "begin_push"),
    "a push has begun at one worker": Boundary(WorkerProcess, "call", "after", "begin_push"),
    "a push has begun": Boundary(WorkerEngines, "call_all", "after", "begin_push"),
    "a push ends": Boundary(WorkerEngines, "call_all", "before", "end_push"),
    "a push has ended at one worker": Boundary(WorkerProcess, "call", "after", "end_push"),
    "a push has ended": Boundary(WorkerEngines, "call_all", "after", "end_push"),
    "tokens are pruned": Boundary(RolloutBuffer, "prune", "after"),
    "a checkpoint is committed": Boundary(RolloutManager, "commit", "after"),
    "a dead worker is found": Boundary(RolloutBuffer, "retire", "before", kills=True),
    "a dead worker's files are cut": Boundary(RolloutBuffer, "retire", "after", kills=True),
    "a dead worker has a successor": Boundary(WorkerProcess, "start", "after", kills=True),
}


class Stage:
    """The coordinator and what a trainer does with it."""

    def __init__(self, config: Config, steps: int, urls: list[str]) -> None:
        self.config, self.steps, self.urls = config, steps, urls
        self.takes = 0
        self.kills = self.killed = False
        """Whether the boundary needs a dead worker, and whether there is one."""

    def arm(self, name: str, times: int) -> None:
        """Die there."""
        boundary, left = BOUNDARIES[name], times
        original = getattr(boundary.owner, boundary.method)

        def reached(side: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            armed = boundary.at_once or (self.takes > 1 and (not boundary.kills or self.killed))
            if side == boundary.side and armed and (boundary.call is None or args[0] == boundary.call):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        @functools.wraps(original)
        async def awaited(self: Any, *args: Any, **kwargs: Any) -> Any:
            reached("before", args)
            result = await original(self, *args, **kwargs)
            reached("after", args)
            return result

        @functools.wraps(original)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            reached("before", args)
            result = original(self, *args, **kwargs)
            reached("after", args)
            return result

        setattr(boundary.owner, boundary.method, awaited if inspect.iscoroutinefunction(original) else called)
        self.kills = boundary.kills

    async def run(self) -> None:
        config, folder = self.config, self.config.run.dir
        planning = Planning(config, Numbers(), None)
        buffer = RolloutBuffer(folder / FILE_NAME, identity(config), planning.largest, holds_tokens=False)
        n = config.rollout.workers
        command = [sys.executable, "-m", "tests.helpers.worker_stage", sys.argv[1]]
        self.workers = remote_workers(config, [[*command, *self.urls[i::n]] for i in range(n)])
        processes: Any = self.workers.workers
        self.processes = processes
        await self.workers.start(buffer)
        scorer: Any = Scorer(lambda: None, lambda ids: "", 5)  # type: ignore[arg-type, return-value]
        self.manager = RolloutManager(config, buffer, self.workers, Numbers(), scorer, planning)
        async with aiohttp.ClientSession() as self.session:
            resume_step = saved_step(folder)
            await self.manager.restore(resume_step)
            await self.push()
            for step in range(resume_step + 1, self.steps + 1):
                await self.step(step)
            await self.manager.close()
        await self.workers.close()
        buffer.close()

    async def step(self, step: int) -> None:
        while (batch := await self.manager.take(step)) is None:
            await self.push()
        self.takes += 1
        groups = loaded(self.config.run.dir, batch.groups)
        for group in groups:
            for sample in group.samples:
                expected(sample)
                assert sample.reward == float(sample.tokens % 2)
        assert batch.metrics["lost"] == 0
        group_rows = [[g.group_id, *(list(s.response_ids) for s in g.samples)] for g in groups]
        with (self.config.run.dir / TOLD).open("a") as log_file:
            log_file.write(json.dumps([step, group_rows]) + "\n")
        if self.kills and self.takes > 1 and not self.killed:
            self.killed = True
            self.processes[step % len(self.processes)].kill()
        await self.push()
        if step % CHECKPOINT_EVERY == 0:
            file = self.config.run.dir / SAVED
            file.with_suffix(".new").write_text(str(step))
            file.with_suffix(".new").replace(file)
            await self.manager.commit(step)

    async def push(self) -> None:
        pending = True
        while pending:
            ticket = await self.manager.begin_push()
            for address in ticket.engines:
                request = self.session.post(f"{address.url}/load", json={"weights": ticket.weight_version})
                async with request as answer:
                    assert answer.status == 200, await answer.text()
            canaries = [Canary(ids, canary_logprobs(ids, ticket.weight_version)) for ids in ticket.canaries]
            pending = bool((await self.manager.end_push(ticket, canaries))["push_left"])


def main() -> None:
    config, steps, boundary, times, *urls = sys.argv[1:]
    stage = Stage(Config.model_validate_json(Path(config).read_text()), int(steps), urls)
    if boundary != "-":
        stage.arm(boundary, int(times))
    asyncio.run(stage.run())


if __name__ == "__main__":
    end_with_parent()
    main()
