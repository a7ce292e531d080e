"""Inject a seeded schedule of faults into the launches of one run, in virtual time, and check the run's history.

The run folder stands for a shared file system whose file locks do not work between machines, so that only epochs
separate two launches.
"""

from __future__ import annotations

import asyncio
import fcntl
import random
import sqlite3
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rlsys.core.owner import Owner
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import DeadEngine, EngineError
from rlsys.ledger import store
from rlsys.ledger.store import FILE_NAME
from tests.helpers import nemesis_launch
from tests.helpers.file_locks import flock_on_shared_folders
from tests.helpers.history import Verdict, check_history
from tests.helpers.nemesis_engine import BUCKETS, EngineNetwork, NemesisEngine, RunEnvironment, weights_state
from tests.helpers.nemesis_launch import ENGINES, Launch, RolloutRole
from tests.helpers.rollout_rig import make_config
from tests.helpers.scripted_engine import LATENCY
from tests.helpers.virtual_processes import Process, run_processes

LEASE = 5.0
"""Seconds without a live launch after which another launch of the run starts."""
STRAGGLE_SECONDS = 60.0
"""Seconds after the last step in which paused or deposed processes may still act."""
TIMEOUT_SECONDS = 900.0
"""Virtual seconds until a run counts as hung."""
_connect = sqlite3.connect


@dataclass(frozen=True)
class Fault:
    """A fault of a schedule. `start`: seconds since the run began. `duration`: seconds."""

    start: float
    kind: str
    duration: float

    def __str__(self) -> str:
        return f"{self.start:.0f}s {self.kind} {self.duration:.0f}s"


STEPS = 12
WIRES = (("trainer", "rollout"), ("rollout", "engine"), ("trainer", "engine"))
FAULTS = (
    "engine stopped", "rollout stopped", "trainer stopped", "launch stopped", "engine killed", "rollout killed",
    "trainer killed", "keeper killed", "connections cut", "connections slow", "clock stepped", "disk full",
    "engine responses corrupted", "second owner", "foreign abort", "rollout orphaned",
    "foreign push", "push dropped",
)  # fmt: skip


def draw(rng: random.Random, faults: tuple[str, ...] = FAULTS) -> list[Fault]:
    """Return a random schedule, sorted by start time."""
    number = rng.randint(5, 9)
    drawn = [Fault(rng.uniform(3, 45), rng.choice(faults), rng.uniform(2, 25)) for _ in range(number)]
    return sorted(drawn, key=lambda f: f.start)


@dataclass(frozen=True)
class Outcome:
    """The result of one schedule."""

    verdict: Verdict
    fault_counts: Counter[str]
    """Number of injected faults by kind."""
    launches: list[str]
    """Exit of each launch; "0" if it completed all steps."""
    poison_deaths: int
    """Number of engine deaths that the poison sample caused."""


def connect_without_locks(path: Path, **options: Any) -> sqlite3.Connection:
    """Connect as on a file system whose locks do not work between machines. Replaces sqlite3.connect."""
    uri = path.absolute().as_uri() + "?vfs=unix-none"
    return _connect(uri, uri=True, **options)


def run_schedule(
    folder: Path, seed: int, schedule: list[Fault] | None = None, poison: int | None = None
) -> Outcome:
    """Run STEPS steps in an empty folder under a schedule of faults.

    Args:
        folder: empty run folder.
        seed: seed of the schedule and of the choice of victims.
        schedule: faults; None: drawn from the seed.
        poison: seed of a sample that kills engines; None: no such sample.
    """
    config = make_config(
        folder,
        rollout={
            "over_provision": 2, "max_staleness": 2, "max_response_tokens": 80, "flush_tokens": 50,
            "stall_timeout": 600,
        },
        trainer={"checkpoint_every": 3, "keep_checkpoints": 2},
        launch={"placement": ("colocated", "disaggregated")[seed % 2]},
        engine={"count": ENGINES},
        weights={"rolling": 1 if seed % 8 in (5, 7) else None},
        router={"interruption": "retract" if seed % 8 in (3, 6, 7) else "abort"},
    )  # fmt: skip
    drawn = draw(random.Random(seed)) if schedule is None else schedule
    scenarios = []

    async def run() -> None:
        scenarios.append(scenario := Scenario(RunEnvironment(config, STEPS, poison), seed, drawn))
        with patch.object(time, "time", scenario.wall):
            await scenario.run()

    with (
        patch.object(fcntl, "flock", flock_on_shared_folders),
        patch.object(sqlite3, "connect", connect_without_locks),
        patch.object(store, "is_local", lambda _: False),
    ):
        run_processes(run())
    (scenario,) = scenarios
    verdict = check_history(folder / FILE_NAME, scenario.environment.history, STEPS)
    poison_deaths = sum(engine.poison_deaths for engine in scenario.environment.engines.values())
    return Outcome(
        verdict,
        scenario.fault_counts,
        [str(launch.process.exit) for launch in scenario.launches],
        poison_deaths,
    )


class Scenario:
    """The launches of a run, in sequence or at the same time, and the faults that they meet."""

    def __init__(self, environment: RunEnvironment, seed: int, schedule: list[Fault]) -> None:
        self.environment = environment
        self.schedule = schedule
        self.launches: list[Launch] = []
        self.fault_counts: Counter[str] = Counter()
        self._rng = random.Random(f"{seed} deeds")
        self._loop = asyncio.get_running_loop()
        self._wall_step = 0.0

    async def run(self) -> None:
        """Run until all steps are trained.

        Raises:
            TimeoutError: the run hangs.
            Exception: the exception of a request handler.
        """
        handler_error = self.environment.handler_error
        schedule = asyncio.create_task(self._run_schedule())
        await asyncio.wait(
            {schedule, handler_error}, timeout=TIMEOUT_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if handler_error.done():
            handler_error.result()
        if not schedule.done():
            raise TimeoutError(f"run not finished after {TIMEOUT_SECONDS:g} s: {self.launches[-1].state()}")
        schedule.result()
        for launch in self.launches:
            for process in [*launch.processes(), *(z.process for z in launch.zombies)]:
                if not process.dead:
                    process.end("end of the test")
        engines = self.environment.engines.values()
        self.environment.history.requests = [e for engine in engines for e in engine.request_records()]

    async def _run_schedule(self) -> None:
        fault_tasks = [asyncio.create_task(self._inject(f)) for f in self.schedule]
        while not self.environment.done:
            if all(launch.over for launch in self.launches):
                if self.launches:
                    await asyncio.sleep(LEASE)
                self.launches.append(Launch(self.environment))
            await asyncio.sleep(0.2)
        await asyncio.gather(*fault_tasks)
        await asyncio.sleep(STRAGGLE_SECONDS)

    def wall(self) -> float:
        """Return the wall-clock time of all processes. Replaces time.time."""
        return 1.7e9 + self._loop.time() + self._wall_step

    # -- faults ---------------------------------------------------------------------------------------------------

    async def _inject(self, fault: Fault) -> None:
        await asyncio.sleep(fault.start)
        living = [launch for launch in self.launches if not launch.over and hasattr(launch, "trainer")]
        if not living or self.environment.done:
            return
        launch = living[-1]
        self.fault_counts[fault.kind] += 1
        await getattr(self, "_" + fault.kind.replace(" ", "_"))(launch, fault.duration)

    async def _pause(self, processes: list[Process], seconds: float) -> None:
        for process in processes:
            process.pause()
        await asyncio.sleep(seconds)
        for process in processes:
            process.resume()

    async def _engine_stopped(self, launch: Launch, seconds: float) -> None:
        await self._pause(
            [p for p in [self._rng.choice(launch.engines).process] if p is not None], 2 * seconds
        )

    async def _rollout_stopped(self, launch: Launch, seconds: float) -> None:
        await self._pause([launch.rollout.process], seconds)

    async def _trainer_stopped(self, launch: Launch, seconds: float) -> None:
        await self._pause([launch.trainer.process], seconds)

    async def _launch_stopped(self, launch: Launch, seconds: float) -> None:
        """Pause a whole launch for longer than the lease. A second launch starts, then the first one resumes."""
        await self._wait_until_busy(launch)
        pause = asyncio.create_task(self._pause(launch.processes(), LEASE + seconds))
        await asyncio.sleep(LEASE)
        if not self.environment.done:
            self.launches.append(Launch(self.environment))
        await pause

    async def _rollout_orphaned(self, launch: Launch, seconds: float) -> None:
        """Kill supervisor and trainer; rollout process and engines pause and resume while samples are running."""
        await self._wait_until_busy(launch)
        survivors = [p for p in launch.processes() if p.name in ("rollout", "engine")]
        launch.process.end("killed")
        launch.trainer.process.end("killed")
        await self._pause(survivors, LEASE + seconds)

    async def _wait_until_busy(self, launch: Launch) -> None:
        """Wait until requests are in flight, at most for the lease: a fault at that time can lose most."""
        for _ in range(round(LEASE / 0.1)):
            if launch.rollout.app is not None and launch.rollout.router.stats()["in_flight"]:
                return
            await asyncio.sleep(0.1)

    async def _second_owner(self, launch: Launch, seconds: float) -> None:
        await self._wait_until_busy(launch)
        self.launches.append(Launch(self.environment))

    async def _engine_killed(self, launch: Launch, seconds: float) -> None:
        if (process := self._rng.choice(launch.engines).process) is not None:
            process.end("killed")

    async def _rollout_killed(self, launch: Launch, seconds: float) -> None:
        if not launch.rollout.process.dead:
            launch.rollout.process.end("killed")

    async def _trainer_killed(self, launch: Launch, seconds: float) -> None:
        if not launch.trainer.process.dead:
            launch.trainer.process.end("killed")

    async def _keeper_killed(self, launch: Launch, seconds: float) -> None:
        """Pause the trainer while the supervisor, which believes that it is dead, starts another."""
        zombie = launch.trainer
        launch.zombies.append(zombie)
        launch._start_trainer()
        await self._pause([zombie.process], seconds)

    async def _connections_cut(self, launch: Launch, seconds: float) -> None:
        self.environment.wires.cut(*self._rng.choice(WIRES), asyncio.get_running_loop().time() + seconds / 4)

    async def _connections_slow(self, launch: Launch, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds
        self.environment.wires.slow(*self._rng.choice(WIRES), self._rng.uniform(0.05, 8), until)

    async def _clock_stepped(self, launch: Launch, seconds: float) -> None:
        self._wall_step += self._rng.choice([-86400.0, -seconds, seconds, 86400.0])

    async def _disk_full(self, launch: Launch, seconds: float) -> None:
        self.environment.disk_full = True
        if launch.rollout.buffer is not None:
            self.environment.limit_disk(launch.rollout.buffer)
        await asyncio.sleep(seconds)
        self.environment.disk_full = False

    async def _engine_responses_corrupted(self, launch: Launch, seconds: float) -> None:
        engine = self._rng.choice(launch.engines)
        engine.corruption_rng = self._rng
        await asyncio.sleep(seconds)
        engine.corruption_rng = None

    async def _push_dropped(self, launch: Launch, seconds: float) -> None:
        engine = self._rng.choice(launch.engines)
        engine.drops_tensors = True
        await asyncio.sleep(seconds)
        engine.drops_tensors = False

    async def _foreign_push(self, launch: Launch, seconds: float) -> None:
        """Push weights of another run with the same version number to an engine."""
        engine = self._rng.choice(launch.engines)
        foreign_trainer = Process("trainer")
        foreign_trainer.main(self._push_foreign_weights(engine, launch.rollout))
        await asyncio.sleep(seconds)
        if not foreign_trainer.dead:
            foreign_trainer.end("done")

    async def _push_foreign_weights(self, engine: NemesisEngine, rollout: RolloutRole) -> None:
        network: Any = EngineNetwork(self.environment)
        foreign = Owner(Path("elsewhere"), 1, "another key")
        client = EngineClient(
            engine.url, network, identity=nemesis_launch.engine_identity(foreign, engine.url)
        )
        version = rollout.router.stats()["weight_version"]
        with suppress(*DeadEngine, EngineError):
            await client.abort(None)
            await client.begin_weight_update()
            for bucket in range(BUCKETS):
                body = {"bucket": bucket, "weights": weights_state("of another run")}
                headers = client.identity.headers("/tensors")
                async with network.request(
                    "POST", engine.url + "/tensors", json=body, headers=headers, allow_redirects=False
                ):
                    await asyncio.sleep(LATENCY)
            await client.end_weight_update()
            await client.set_weight_version(round(version))

    async def _foreign_abort(self, launch: Launch, seconds: float) -> None:
        engine = self._rng.choice(launch.engines)
        if engine.process is not None:
            engine._abort_request({"abort_all": True})
