"""Launches of one run under a seeded schedule of faults, in virtual time. All write down what they did (history.py).

The folder is one that two machines see, and on which locks do not reach: only epochs keep two launches apart.
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
from tests.helpers.history import Verdict, judge
from tests.helpers.nemesis_engine import BUCKETS, EngineNetwork, Ground, NemesisEngine, mixed
from tests.helpers.nemesis_launch import ENGINES, Launch, RolloutRole
from tests.helpers.rollout_rig import make_config
from tests.helpers.scripted_engine import LATENCY
from tests.helpers.virtual_processes import Process, run_processes

LEASE = 5.0
"""After so many seconds of silence somebody starts the run anew, elsewhere."""
STRAGGLE_SECONDS = 60.0
"""After the end: who was stopped, or thinks that it still owns the run, does its worst."""
HUNG_SECONDS = 900.0
_connect = sqlite3.connect


@dataclass(frozen=True)
class Fault:
    """At so many seconds of the schedule; how long it lasts."""

    at: float
    kind: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.at:.0f}s {self.kind} {self.seconds:.0f}s"


STEPS = 12
WIRES = (("trainer", "rollout"), ("rollout", "engine"), ("trainer", "engine"))
FAULTS = (
    "engine stopped", "rollout stopped", "trainer stopped", "launch stopped", "engine killed", "rollout killed",
    "trainer killed", "keeper killed", "connections cut", "connections slow", "clock stepped", "disk full",
    "engine talks nonsense", "second owner", "strange abort", "rollout left behind",
    "strange push", "push dropped",
)  # fmt: skip


def draw(rng: random.Random, faults: tuple[str, ...] = FAULTS) -> list[Fault]:
    """A schedule, in order."""
    number = rng.randint(5, 9)
    drawn = [Fault(rng.uniform(3, 45), rng.choice(faults), rng.uniform(2, 25)) for _ in range(number)]
    return sorted(drawn, key=lambda f: f.at)


@dataclass(frozen=True)
class Outcome:
    """Of one schedule: what the checker found, what was committed, and how each launch ended ("0": all trained)."""

    verdict: Verdict
    happened: Counter[str]
    launches: list[str]
    poisoned: int
    """Engines that died of the poisonous sample."""


def connect_without_locks(path: Path, **options: Any) -> sqlite3.Connection:
    """As on a file system on which no lock of one machine is seen by another."""
    uri = path.absolute().as_uri() + "?vfs=unix-none"
    return _connect(uri, uri=True, **options)


def play(folder: Path, seed: int, schedule: list[Fault] | None = None, poison: int | None = None) -> Outcome:
    """A run of STEPS steps in an empty folder, under the schedule of the seed or another one."""
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
    worlds = []

    async def run() -> None:
        worlds.append(world := World(Ground(config, STEPS, poison), seed, drawn))
        with patch.object(time, "time", world.wall):
            await world.run()

    with (
        patch.object(fcntl, "flock", flock_on_shared_folders),
        patch.object(sqlite3, "connect", connect_without_locks),
        patch.object(store, "is_local", lambda _: False),
    ):
        run_processes(run())
    (world,) = worlds
    verdict = judge(folder / FILE_NAME, world.ground.history, STEPS)
    died = sum(engine.poisoned for engine in world.ground.engines.values())
    return Outcome(verdict, world.happened, [str(launch.process.exit) for launch in world.launches], died)


class World:
    """The launches, one after another or two at once, and what happens to them."""

    def __init__(self, ground: Ground, seed: int, schedule: list[Fault]) -> None:
        self.ground = ground
        self.schedule = schedule
        self.launches: list[Launch] = []
        self.happened: Counter[str] = Counter()
        self._rng = random.Random(f"{seed} deeds")
        self._loop = asyncio.get_running_loop()
        self._wall_step = 0.0

    async def run(self) -> None:
        """Until all steps are trained. Raises TimeoutError when that never comes, and what breaks a handler."""
        bug = self.ground.bug
        story = asyncio.create_task(self._story())
        await asyncio.wait({story, bug}, timeout=HUNG_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if bug.done():
            bug.result()
        if not story.done():
            raise TimeoutError(f"not done after {HUNG_SECONDS:g} s: {self.launches[-1].state()}")
        story.result()
        for launch in self.launches:
            for process in [*launch.processes(), *(z.process for z in launch.zombies)]:
                if not process.dead:
                    process.end("the end")
        engines = self.ground.engines.values()
        self.ground.history.emissions = [e for engine in engines for e in engine.emissions()]

    async def _story(self) -> None:
        deeds = [asyncio.create_task(self._commit_fault(f)) for f in self.schedule]
        while not self.ground.done:
            if all(launch.over for launch in self.launches):
                if self.launches:
                    await asyncio.sleep(LEASE)
                self.launches.append(Launch(self.ground))
            await asyncio.sleep(0.2)
        await asyncio.gather(*deeds)
        await asyncio.sleep(STRAGGLE_SECONDS)

    def wall(self) -> float:
        """time.time() of everybody."""
        return 1.7e9 + self._loop.time() + self._wall_step

    # -- faults ---------------------------------------------------------------------------------------------------

    async def _commit_fault(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        living = [launch for launch in self.launches if not launch.over and hasattr(launch, "trainer")]
        if not living or self.ground.done:
            return
        launch = living[-1]
        self.happened[fault.kind] += 1
        await getattr(self, "_" + fault.kind.replace(" ", "_"))(launch, fault.seconds)

    async def _stop(self, processes: list[Process], seconds: float) -> None:
        for process in processes:
            process.pause()
        await asyncio.sleep(seconds)
        for process in processes:
            process.resume()

    async def _engine_stopped(self, launch: Launch, seconds: float) -> None:
        await self._stop(
            [p for p in [self._rng.choice(launch.engines).process] if p is not None], 2 * seconds
        )

    async def _rollout_stopped(self, launch: Launch, seconds: float) -> None:
        await self._stop([launch.rollout.process], seconds)

    async def _trainer_stopped(self, launch: Launch, seconds: float) -> None:
        await self._stop([launch.trainer.process], seconds)

    async def _launch_stopped(self, launch: Launch, seconds: float) -> None:
        """A machine that is silent for longer than the lease: the run is started elsewhere, then it comes back."""
        await self._until_busy(launch)
        stopped = asyncio.create_task(self._stop(launch.processes(), LEASE + seconds))
        await asyncio.sleep(LEASE)
        if not self.ground.done:
            self.launches.append(Launch(self.ground))
        await stopped

    async def _rollout_left_behind(self, launch: Launch, seconds: float) -> None:
        """It comes back in the middle of its samples, with its engines, and nobody else of its launch."""
        await self._until_busy(launch)
        survivors = [p for p in launch.processes() if p.name in ("rollout", "engine")]
        launch.process.end("killed")
        launch.trainer.process.end("killed")
        await self._stop(survivors, LEASE + seconds)

    async def _until_busy(self, launch: Launch) -> None:
        """That is when there is most to lose; or for as long as a lease."""
        for _ in range(round(LEASE / 0.1)):
            if launch.rollout.app is not None and launch.rollout.router.stats()["in_flight"]:
                return
            await asyncio.sleep(0.1)

    async def _second_owner(self, launch: Launch, seconds: float) -> None:
        await self._until_busy(launch)
        self.launches.append(Launch(self.ground))

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
        """The supervisor believes that the trainer is dead and starts another; it lives, and stopped for a while."""
        zombie = launch.trainer
        launch.zombies.append(zombie)
        launch._start_trainer()
        await self._stop([zombie.process], seconds)

    async def _connections_cut(self, launch: Launch, seconds: float) -> None:
        self.ground.wires.cut(*self._rng.choice(WIRES), asyncio.get_running_loop().time() + seconds / 4)

    async def _connections_slow(self, launch: Launch, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds
        self.ground.wires.slow(*self._rng.choice(WIRES), self._rng.uniform(0.05, 8), until)

    async def _clock_stepped(self, launch: Launch, seconds: float) -> None:
        self._wall_step += self._rng.choice([-86400.0, -seconds, seconds, 86400.0])

    async def _disk_full(self, launch: Launch, seconds: float) -> None:
        self.ground.disk_full = True
        if launch.rollout.buffer is not None:
            self.ground.limit_disk(launch.rollout.buffer)
        await asyncio.sleep(seconds)
        self.ground.disk_full = False

    async def _engine_talks_nonsense(self, launch: Launch, seconds: float) -> None:
        engine = self._rng.choice(launch.engines)
        engine.nonsense = self._rng
        await asyncio.sleep(seconds)
        engine.nonsense = None

    async def _push_dropped(self, launch: Launch, seconds: float) -> None:
        engine = self._rng.choice(launch.engines)
        engine.deaf = True
        await asyncio.sleep(seconds)
        engine.deaf = False

    async def _strange_push(self, launch: Launch, seconds: float) -> None:
        """Another run took the engine for its own, and pushes to it what it calls by the same number."""
        engine = self._rng.choice(launch.engines)
        stranger = Process("trainer")
        stranger.main(self._push_elsewhere(engine, launch.rollout))
        await asyncio.sleep(seconds)
        if not stranger.dead:
            stranger.end("done")

    async def _push_elsewhere(self, engine: NemesisEngine, rollout: RolloutRole) -> None:
        network: Any = EngineNetwork(self.ground)
        foreign = Owner(Path("elsewhere"), 1, "another key")
        client = EngineClient(
            engine.url, network, identity=nemesis_launch.engine_identity(foreign, engine.url)
        )
        version = rollout.router.stats()["weight_version"]
        with suppress(*DeadEngine, EngineError):
            await client.abort(None)
            await client.begin_weight_update()
            for bucket in range(BUCKETS):
                body = {"bucket": bucket, "weights": mixed("of another run")}
                headers = client.identity.headers("/tensors")
                async with network.request(
                    "POST", engine.url + "/tensors", json=body, headers=headers, allow_redirects=False
                ):
                    await asyncio.sleep(LATENCY)
            await client.end_weight_update()
            await client.set_weight_version(round(version))

    async def _strange_abort(self, launch: Launch, seconds: float) -> None:
        engine = self._rng.choice(launch.engines)
        if engine.process is not None:
            engine._abort_request({"abort_all": True})
