"""Rollout workers in real processes with scripted engines behind real sockets, and the trainer's calls."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rlsys.config import Config, identity
from rlsys.core.types import TrainBatch
from rlsys.core.weight_updates import Canary
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_ledger
from rlsys.ledger.store import FILE_NAME
from rlsys.planning.planning import Planning
from rlsys.rollout.manager import RolloutManager
from rlsys.segments.records import FOLDER
from rlsys.worker.scoring import Scorer
from rlsys.worker.workers import remote_workers
from tests.helpers.engine_server import check_sample, serve_engines
from tests.helpers.loaded import load_tokens
from tests.helpers.rollout_rig import Numbers, make_config
from tests.helpers.scripted_engine import ScriptedEngine, canary_logprobs

ROLLOUT = {
    "groups_per_step": 4,
    "group_size": 2,
    "max_response_tokens": 60,
    "over_provision": 2,
    "max_staleness": 4,
}


class Run:
    """A rollout manager with worker processes, and the trainer's calls."""

    def __init__(self, config: Config, engines: list[ScriptedEngine]) -> None:
        self.config, self.engines = config, engines
        file = config.run.dir / "config.json"
        file.write_text(config.model_dump_json())
        planning = Planning(config, Numbers(), None)
        self.buffer = RolloutBuffer(
            config.run.dir / FILE_NAME, identity(config), planning.largest, holds_tokens=False
        )
        n = config.rollout.workers
        command = [sys.executable, "-m", "tests.helpers.worker_stage", str(file)]
        launch_engines = engines[: config.engine.count]
        self.workers = remote_workers(
            config, [[*command, *(e.url for e in launch_engines[i::n])] for i in range(n)]
        )
        self.processes: Sequence[Any] = self.workers.workers
        self._planning = planning
        self.pushes: Counter[str] = Counter()
        self.rounds: list[list[str]] = []
        """URLs of the engines of each round of a push."""

    async def begin(self) -> None:
        await self.workers.start(self.buffer)
        scorer: Any = Scorer(lambda: None, lambda ids: "", 5)  # type: ignore[arg-type, return-value]
        self.manager = RolloutManager(
            self.config, self.buffer, self.workers, Numbers(), scorer, self._planning
        )

    async def push(self) -> None:
        """Push the next version, in rounds if the config sets a rolling push."""
        pending = True
        while pending:
            ticket = await self.manager.begin_push()
            for address in ticket.engines:
                self.pushes[address.url] += 1
                engine = next(e for e in self.engines if e.url == address.url)
                if engine.update_open and not engine.dead:
                    engine.load(ticket.weight_version)
            self.rounds.append([address.url for address in ticket.engines])
            canaries = [Canary(ids, canary_logprobs(ids, ticket.weight_version)) for ids in ticket.canaries]
            pending = bool((await self.manager.end_push(ticket, canaries))["push_left"])

    async def take(self, step: int) -> TrainBatch:
        while (batch := await self.manager.take(step)) is None:
            await self.push()
        return batch

    def pids(self) -> list[int]:
        return [w.pid for w in self.processes]


@asynccontextmanager
async def run(
    folder: Path,
    workers: int,
    engines: int,
    *,
    joiners: int = 0,
    sections: dict[str, Any] | None = None,
    **rollout: Any,
) -> AsyncIterator[Run]:
    """Yield a started run. At exit, check that the ledger is consistent and that no worker process is alive.

    Args:
        folder: Run folder.
        workers: Number of rollout workers.
        engines: Number of engines of the launch.
        joiners: Number of further engines.
        sections: Further config sections.
        rollout: Fields of the config section.
    """
    config = make_config(
        folder,
        rollout=ROLLOUT | {"workers": workers} | rollout,
        engine={"count": engines, "return_routes": True},
        **(sections or {}),
    )
    scripted_engines = [
        ScriptedEngine(
            f"http://e{i}:1", ends_at=lambda s: 3 + s % 50, segments=folder / FOLDER if i % 2 else None
        )
        for i in range(engines + joiners)
    ]
    (folder / FOLDER).mkdir(exist_ok=True)
    async with serve_engines(*scripted_engines):
        run_instance = Run(config, scripted_engines)
        try:
            await run_instance.begin()
            yield run_instance
            pids = run_instance.pids()
            await run_instance.manager.close()
            check_ledger(run_instance.buffer.ledger())
        finally:
            await run_instance.workers.close()
            run_instance.buffer.close()
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def check_step(folder: Path, taken: TrainBatch, seen: set[int]) -> None:
    for group in load_tokens(folder, taken.groups):
        assert group.group_id not in seen
        seen.add(group.group_id)
        for sample in group.samples:
            check_sample(sample)
            assert sample.reward == float(sample.tokens % 2)
