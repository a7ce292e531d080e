"""A coordinator of rollout workers with a trainer, in a process that kills itself at a given point:

    python -m tests.helpers.coordinator_stage CONFIG.json STEPS BOUNDARY TIMES URL ...

The process continues from its last checkpoint and logs the groups of each step in the run folder. When it reaches
BOUNDARY (a key of BOUNDARIES; `-`: none) for the TIMES-th time, it sends itself SIGKILL.
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
from tests.helpers.engine_server import check_sample
from tests.helpers.loaded import load_tokens
from tests.helpers.rollout_rig import Numbers
from tests.helpers.scripted_engine import canary_logprobs

STEP_LOG, CHECKPOINT_FILE = "steps.jsonl", "saved"
CHECKPOINT_EVERY = 2


def saved_step(folder: Path) -> int:
    """Return the step of the trainer's last checkpoint, or 0."""
    file = folder / CHECKPOINT_FILE
    return int(file.read_text()) if file.exists() else 0


class Boundary(NamedTuple):
    """A point before or after a method call."""

    owner: type
    method: str
    side: str
    """`before` or `after`."""
    call: str | None = None
    """First argument of the calls that count, for WorkerEngines.call_all and WorkerProcess.call; None: all calls."""
    from_start: bool = False
    """Whether calls count from the start of the process, not only from the second take on."""
    needs_worker_death: bool = False
    """Whether calls count only after the death of a worker."""


BOUNDARIES = {
    "segments truncated, nothing committed": Boundary(SegmentTable, "open", "after", from_start=True),
    "worker named": Boundary(RolloutBuffer, "new_writer", "after", from_start=True),
    "worker started": Boundary(WorkerProcess, "start", "after", from_start=True),
    "step restored": Boundary(RolloutBuffer, "restore", "after", from_start=True),
    "group issued": Boundary(RolloutBuffer, "issue", "after"),
    "sample sent": Boundary(RemoteWorker, "_send_sample", "after"),
    "rows received": Boundary(RolloutBuffer, "save_from_workers", "before"),
    "rows written": Boundary(RolloutBuffer, "save_from_workers", "after"),
    "group finished": Boundary(RolloutBuffer, "finish", "after"),
    "before a commit": Boundary(RolloutBuffer, "flush", "before"),
    "tokens synced, rows not committed": Boundary(SegmentTable, "sync", "after"),
    "rows committed, old files not removed": Boundary(SegmentTable, "remove_unused", "before"),
    "after a commit": Boundary(RolloutBuffer, "flush", "after"),
    "take in the journal": Boundary(RolloutBuffer, "take", "after"),
    "take answered": Boundary(RolloutManager, "take", "after"),
    "before an interrupt": Boundary(Workers, "interrupt", "before"),
    "interrupt answered by one worker": Boundary(WorkerProcess, "call", "after", "interrupt"),
    "interrupt answered by all workers": Boundary(Workers, "interrupt", "after"),
    "interrupts recorded": Boundary(ReplayLog, "record_interrupts", "after"),
    "before begin_push": Boundary(WorkerEngines, "call_all", "before", "begin_push"),
    "after begin_push at one worker": Boundary(WorkerProcess, "call", "after", "begin_push"),
    "after begin_push": Boundary(WorkerEngines, "call_all", "after", "begin_push"),
    "before end_push": Boundary(WorkerEngines, "call_all", "before", "end_push"),
    "after end_push at one worker": Boundary(WorkerProcess, "call", "after", "end_push"),
    "after end_push": Boundary(WorkerEngines, "call_all", "after", "end_push"),
    "tokens pruned": Boundary(RolloutBuffer, "prune", "after"),
    "checkpoint committed": Boundary(RolloutManager, "commit", "after"),
    "before a dead worker is retired": Boundary(RolloutBuffer, "retire", "before", needs_worker_death=True),
    "after a dead worker is retired": Boundary(RolloutBuffer, "retire", "after", needs_worker_death=True),
    "successor of a dead worker started": Boundary(WorkerProcess, "start", "after", needs_worker_death=True),
}


class Stage:
    """The coordinator and its trainer."""

    def __init__(self, config: Config, steps: int, urls: list[str]) -> None:
        self.config, self.steps, self.urls = config, steps, urls
        self.takes = 0
        self.needs_worker_death = self.worker_killed = False
        """Whether the boundary needs the death of a worker, and whether a worker was killed."""

    def set_boundary(self, name: str, times: int) -> None:
        """Patch the method of a boundary so that this process sends itself SIGKILL there."""
        boundary, remaining = BOUNDARIES[name], times
        original = getattr(boundary.owner, boundary.method)

        def count_call(side: str, args: tuple[Any, ...]) -> None:
            nonlocal remaining
            armed = boundary.from_start or (
                self.takes > 1 and (not boundary.needs_worker_death or self.worker_killed)
            )
            if side == boundary.side and armed and (boundary.call is None or args[0] == boundary.call):
                remaining -= 1
                if remaining == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        @functools.wraps(original)
        async def async_wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            count_call("before", args)
            result = await original(self, *args, **kwargs)
            count_call("after", args)
            return result

        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            count_call("before", args)
            result = original(self, *args, **kwargs)
            count_call("after", args)
            return result

        setattr(
            boundary.owner,
            boundary.method,
            async_wrapper if inspect.iscoroutinefunction(original) else wrapper,
        )
        self.needs_worker_death = boundary.needs_worker_death

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
        groups = load_tokens(self.config.run.dir, batch.groups)
        for group in groups:
            for sample in group.samples:
                check_sample(sample)
                assert sample.reward == float(sample.tokens % 2)
        assert batch.metrics["lost"] == 0
        group_rows = [[g.group_id, *(list(s.response_ids) for s in g.samples)] for g in groups]
        with (self.config.run.dir / STEP_LOG).open("a") as log_file:
            log_file.write(json.dumps([step, group_rows]) + "\n")
        if self.needs_worker_death and self.takes > 1 and not self.worker_killed:
            self.worker_killed = True
            self.processes[step % len(self.processes)].kill()
        await self.push()
        if step % CHECKPOINT_EVERY == 0:
            file = self.config.run.dir / CHECKPOINT_FILE
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
        stage.set_boundary(boundary, int(times))
    asyncio.run(stage.run())


if __name__ == "__main__":
    end_with_parent()
    main()
