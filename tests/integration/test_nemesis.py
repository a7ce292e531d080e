"""Twelve schedules of faults on real processes: supervisor, keepers and rollout process are the product's, engines
and trainer are scripted, so that every token can be held against what made it. Nobody has locks (nemesis_roles.py).

Pauses last 20 s, the lease after which somebody else starts the run is 5 s: each schedule takes a minute or two.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launch.ports import free_ports
from rlsys.config import Config, dump_config
from rlsys.core.sockets import make_folder, remove_folder
from rlsys.ledger.store import FILE_NAME
from tests.helpers.history import History, add_lines, check_history
from tests.helpers.nemesis_engine import INITIAL
from tests.helpers.nemesis_roles import FOLDER, role_command
from tests.helpers.proxy import Proxy
from tests.helpers.servers import ROOT
from tests.helpers.sessions import command_line

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LEASE, PAUSE = 5.0, 20.0
STEPS, ENGINES = 24, 2
PATIENCE = 800.0
FAULTS = (
    "engine stopped", "rollout stopped", "trainer stopped", "launch stopped", "engine killed", "rollout killed",
    "trainer killed", "keeper killed", "connections cut", "connections slow", "disk full", "second owner",
)  # fmt: skip
SCHEDULES = len(FAULTS)


class Launch:
    """One launch on the folder, with ports and proxies of its own; its processes are found by what they are."""

    def __init__(self, config: Config, number: int) -> None:
        engines = free_ports("127.0.0.1", ENGINES)
        plan = config.run.dir.parent / f"plan-{number}.json"
        self._sockets = make_folder()
        proxy_path = self._sockets / "proxy"
        address_file = Path(f"{plan}.socket")
        self.wires = {"trainer-rollout": [Proxy(lambda: Path(address_file.read_text()), proxy_path)]}
        for wire in ("rollout-engine", "trainer-engine"):
            self.wires[wire] = [Proxy(port) for port in engines]
        urls = [f"http://127.0.0.1:{p.port}" for p in self.wires["rollout-engine"]]
        to_engines = {
            u: f"http://127.0.0.1:{p.port}" for u, p in zip(urls, self.wires["trainer-engine"], strict=True)
        }
        file, history = str(config.run.dir / "config.yaml"), config.run.dir.parent / FOLDER
        roles = [
            (
                f"engine-{i}",
                "engine",
                role_command(
                    "engine",
                    str(port),
                    urls[i],
                    str(config.run.dir),
                    str(history / f"engine-{number}-{i}.jsonl"),
                ),
                f"http://127.0.0.1:{port}/health",
            )
            for i, port in enumerate(engines)
        ]
        serve = ["--config", file, *(w for u in urls for w in ("--engine", u))]
        roles.append(("rollout", "rollout", role_command("rollout", *serve), "/status"))
        train = role_command("trainer", file, str(proxy_path), json.dumps(to_engines))
        plan.write_text(json.dumps([*roles, ("trainer", "trainer", train, None)]))
        own_config = config.run.dir.parent / "config.yaml"
        own_config.write_text(dump_config(config))
        self.log = config.run.dir.parent / f"launch-{number}.log"
        with self.log.open("w") as out:
            self.process = psutil.Popen(
                role_command("launch", str(own_config), str(plan)),
                cwd=ROOT,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self.process, *self.process.children(recursive=True)]
        return []

    def find(self, role: str) -> list[psutil.Process]:
        """The processes of a role without their keepers; none while it is being started."""
        words = {"tests.helpers.nemesis_roles", role}
        return [
            p for p in self.tree() if words <= set(command_line(p)) and "launch.keeper" not in command_line(p)
        ]

    def keeper(self, role: str) -> list[psutil.Process]:
        words = {"launch.keeper", "tests.helpers.nemesis_roles", role}
        return [p for p in self.tree() if words <= set(command_line(p))]

    def close(self) -> None:
        """For a schedule that failed: keepers end the rest."""
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        if not self.over:
            self.process.kill()
            self.process.wait()
        for proxies in self.wires.values():
            for proxy in proxies:
                proxy.close()
        remove_folder(self._sockets)


class Stage:
    """A run folder, its launches, and what is done to them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._rng = random.Random(seed)
        (folder / FOLDER).mkdir()
        self.config = Config.model_validate(
            {
                "run": {"dir": folder / "run"},
                "model": {"path": ROOT / "configs/models/quickstart-moe"},
                "data": {"reward": "tests.helpers.length_reward:shorter"},
                "rollout": {
                    "groups_per_step": 2, "group_size": 2, "max_response_tokens": 48, "over_provision": 2,
                    "max_staleness": 2, "flush_tokens": 50,
                },
                "trainer": {"steps": STEPS, "checkpoint_every": 3, "keep_checkpoints": 2},
                "launch": {"placement": ("colocated", "disaggregated")[seed % 2], "grace_seconds": 5},
                "engine": {"count": ENGINES, "start_timeout": 60},
                "eval": {"prompts": 4},
            }
        )  # fmt: skip
        self.launches: list[Launch] = []

    def start(self) -> None:
        self.launches.append(Launch(self.config, len(self.launches)))

    def commit(self, fault: str) -> Callable[[], None]:
        """Do it to the newest launch. Returns what ends it."""
        launch = self.launches[-1]
        target, _, effect = fault.partition(" ")
        if fault == "second owner":
            self.start()
        elif effect == "stopped":
            stopped = launch.tree() if target == "launch" else launch.find(target)[:1]
            send(stopped, signal.SIGSTOP)
            return lambda: send(stopped, signal.SIGCONT)
        elif fault == "keeper killed":
            send(launch.keeper("trainer"), signal.SIGKILL)
        elif effect == "killed":
            send(launch.find(target)[:1], signal.SIGKILL)
        elif target == "connections":
            proxies = launch.wires[self._rng.choice(sorted(launch.wires))]
            for proxy in proxies:
                proxy.cut() if effect == "cut" else proxy.slow(self._rng.uniform(0.1, 4))
            return lambda: mend(proxies)
        else:
            full = launch.find("rollout")[:1]
            limit_files(full, 4096)
            return lambda: limit_files(full, resource.RLIM_INFINITY)
        return lambda: None

    def history(self) -> History:
        history = History(INITIAL)
        for file in sorted((self._folder / FOLDER).glob("*.jsonl")):
            with file.open() as f:
                add_lines(history, f)
        latest = {(e.engine, e.rid): e for e in history.requests}
        history.requests = list(latest.values())
        return history

    def told(self) -> str:
        return "\n".join(
            f"--- {launch.log.name}\n{launch.log.read_text()[-1500:]}" for launch in self.launches
        )


def mend(proxies: list[Proxy]) -> None:
    for proxy in proxies:
        proxy.heal()


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def limit_files(processes: list[psutil.Process], size: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    stage = Stage(tmp_path, request.getfixturevalue("seed"))
    yield stage
    for launch in stage.launches:
        launch.close()


def draw(seed: int) -> list[tuple[float, str]]:
    """Seconds after the first trained step, and what happens; each kind comes first in one schedule."""
    rng = random.Random(seed)
    kinds = [FAULTS[seed], *rng.choices(FAULTS, k=2)]
    return [(15.0 * i + rng.uniform(0, 8), kind) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_no_token_is_lost_trained_twice_or_generated_by_other_weights(stage: Stage, seed: int) -> None:
    schedule = draw(seed)
    print(f"{seed}: " + ", ".join(f"{event_time:.0f}s {kind}" for event_time, kind in schedule))
    todo, ends = list(schedule), list[tuple[float, Callable[[], None]]]()
    lease: float | None = None
    stage.start()
    begin, deadline = None, time.monotonic() + PATIENCE
    metrics = stage.config.run.dir / "metrics.jsonl"
    while True:
        current_time = time.monotonic()
        assert current_time < deadline, stage.told()
        if begin is None and metrics.exists() and '"kind": "step"' in metrics.read_text():
            begin = current_time
        for event_time, end in [e for e in ends if e[0] <= current_time]:
            end()
            ends.remove((event_time, end))
        if begin is not None and todo and current_time >= begin + todo[0][0]:
            _, kind = todo.pop(0)
            ends.append((current_time + PAUSE, stage.commit(kind)))
            if kind == "launch stopped":
                lease = current_time + LEASE
        if any(launch.process.poll() == 0 for launch in stage.launches):
            break
        if all(launch.over for launch in stage.launches) and lease is None:
            lease = current_time + LEASE
        if lease is not None and current_time >= lease:
            stage.start()
            lease = None
        time.sleep(0.2)
    for _, end in ends:
        end()
    _, alive = psutil.wait_procs([launch.process for launch in stage.launches], timeout=120)
    assert not alive, "a launch that was deposed ends by itself\n" + stage.told()
    codes = [launch.process.poll() for launch in stage.launches]
    verdict = check_history(stage.config.run.dir / FILE_NAME, stage.history(), STEPS)
    print(f"{seed}: {len(codes)} launches, exit codes {codes}; {verdict}")
    assert verdict.clean, f"{verdict}\n{stage.told()}"
    assert codes.count(0) == 1
