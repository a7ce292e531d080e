"""Stage of plan_check.py and april_claim.py: engines that keep running, and runs of the real stack one after another.

A run has the processes that `rlsys train` starts (launch/plan.py), except engines: a rollout process and a trainer,
with a separate run folder. Starting engines takes longest, so two engines serve all runs; a run with one engine
leaves the other idle. The engines' keys are derived from the launch that started them, and each run folder names that
launch as its owner.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure import ROOT, running_engine

from launch.plan import Node, Ports, Role, build_plan
from rlsys.config import Config, dump_config, load_config
from rlsys.core.identity import engine_identity
from rlsys.core.owner import FOLDER, Owner, claim
from rlsys.core.sockets import make_folder, remove_folder
from rlsys.engine.launch_args import engine_command
from rlsys.obs.metrics import read_metrics
from rlsys.planner.layout import lay_out

POLL_SECONDS = 0.1
LOG_PASSES = 1
"""Decoding passes between two lines of an engine's log; SGLang's default, 40, is too many for short responses."""
PATIENCE = 600.0
FROZEN = 1e-12
"""A learning rate so small that the policy, and so the lengths, do not change."""


@dataclass(frozen=True)
class Setting:
    """A setting of a run. `sleep` is the time that an engine sleeps before every forward pass (SGLang's /slow_down),
    in seconds; `policy` is rollout.staleness_policy."""

    placement: str
    engines: int
    over_provision: float
    max_staleness: int
    sleep: float
    policy: str = "drop"

    @property
    def name(self) -> str:
        sizes = f"{self.engines} engine{'s' * (self.engines > 1)}, N'/N {self.over_provision:g}"
        waits = ", wait" if self.policy == "wait" else ""
        return f"{self.placement}, {sizes}, {self.max_staleness} old{waits}, sleep {1000 * self.sleep:.0f} ms"


@dataclass(frozen=True)
class Size:
    """Size of a train step, longest response in tokens, and number of engines."""

    groups: int = 16
    group: int = 4
    longest: int = 64
    engines: int = 2


def config_of(setting: Setting, size: Size, folder: Path, seed: int) -> Config:
    """Return the quickstart's config with a frozen policy, without evaluations and checkpoints during the
    measurement."""
    return load_config(
        ROOT / "configs/quickstart.yaml",
        [
            f"run.dir={folder}", f"run.seed={seed}",
            f"rollout.groups_per_step={size.groups}", f"rollout.group_size={size.group}",
            f"rollout.max_response_tokens={size.longest}",
            f"rollout.over_provision={setting.over_provision}", f"rollout.max_staleness={setting.max_staleness}",
            f"rollout.staleness_policy={setting.policy}",
            f"engine.count={setting.engines}", f"engine.max_running_requests={2 * size.groups * size.group}",
            f"engine.extra_args=[--decode-log-interval,'{LOG_PASSES}']",
            f"launch.placement={setting.placement}",
            f"trainer.lr={FROZEN}", "trainer.steps=100000", "trainer.checkpoint_every=100000",
            "eval.interval=100000", "eval.prompts=1",
        ],
    )  # fmt: skip


class Stage:
    """Owns the engines, and `folder`, which contains the runs."""

    def __init__(self, folder: Path, owner: Owner, urls: Sequence[str], size: Size) -> None:
        self.folder, self.size = folder, size
        self._owner, self._urls = owner, urls
        self._runs = 0

    def run(self, setting: Setting, steps: int, seed: int) -> Path:
        """Run a number of train steps, and return the run folder."""
        config = config_of(setting, self.size, self.new_folder(), seed)
        self.run_config(config, setting.sleep, "step", steps)
        return config.run.dir

    def new_folder(self) -> Path:
        """Return the folder of the next run, which does not exist yet."""
        self._runs += 1
        return self.folder / f"run-{self._runs}"

    def run_config(self, config: Config, sleep: float, kind: str, n: int) -> None:
        """Run until metrics.jsonl has `n` lines of this kind. Engines sleep from its first evaluation on."""
        folder, count = config.run.dir, config.engine.count
        owner = replace(self._owner, run_dir=folder)
        write_folder(config, owner)
        urls = self._urls[:count]
        self._slow_down(0.0)
        with attached(config, owner, urls) as roles:
            wait_for(folder, roles, "eval", 1)
            self._slow_down(sleep)
            marks = [engine_log(self.folder, i).stat().st_size for i in range(count)]
            wait_for(folder, roles, kind, n)
        self._slow_down(0.0)
        for i, mark in enumerate(
            marks
        ):  # lines that the engines wrote since they sleep, in the run's log folder
            with engine_log(self.folder, i).open("rb") as log:
                log.seek(mark)
                (folder / "logs" / f"engine-{i}.log").write_bytes(log.read())

    def _slow_down(self, seconds: float) -> None:
        for url in self._urls:
            headers = {
                **engine_identity(self._owner, url).headers("/slow_down"),
                "Content-Type": "application/json",
            }
            body = json.dumps({"forward_sleep_time": seconds or None}).encode()
            with urllib.request.urlopen(
                urllib.request.Request(f"{url}/slow_down", body, headers), timeout=60
            ):
                pass


def engine_log(folder: Path, index: int) -> Path:
    return folder / f"engine-{index}" / "engine.log"


@contextlib.contextmanager
def stage(folder: Path, size: Size) -> Iterator[Stage]:
    """Yield a stage, and end its engines afterwards."""
    first = Setting("colocated", size.engines, 2.0, 8, 0.0)
    home = folder / "engines"
    (home / "logs").mkdir(parents=True)
    owner = claim(home, sockets := make_folder())
    config = config_of(first, size, home, seed=1)
    with contextlib.ExitStack() as stack:
        stack.callback(remove_folder, sockets)
        urls = []
        for i in range(size.engines):
            engine_log(folder, i).parent.mkdir()
            urls.append(
                stack.enter_context(running_engine(config, engine_log(folder, i).parent, owner=owner))
            )
        yield Stage(folder, owner, urls, size)


def write_folder(config: Config, owner: Owner) -> None:
    """Write the run folder as `rlsys train` writes it for the processes of a run."""
    (config.run.dir / "logs").mkdir(parents=True)
    (config.run.dir / "config.yaml").write_text(dump_config(config))
    (config.run.dir / FOLDER).mkdir(mode=0o700)
    about = {"epoch": owner.epoch, "key": owner.key, "host": "localhost", "pid": os.getpid()}
    about["sockets"] = str(owner.sockets)
    path = config.run.dir / FOLDER / f"{owner.epoch:06d}"
    path.touch(mode=0o600)
    path.write_text(json.dumps(about))


@contextlib.contextmanager
def attached(config: Config, owner: Owner, urls: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the run's rollout process and trainer, and end them with their children afterwards."""
    ports = [int(url.rpartition(":")[2]) for url in urls]
    plan = build_plan(config, lay_out(config), [Node("localhost")], Ports(ports), engine_command)
    with contextlib.ExitStack() as stack:
        started = []
        for role in plan.roles:
            if role.kind != "engine":
                env = {**plan.environment(role), **owner.environment(start=1)}
                started.append(stack.enter_context(running_role(role, env, config.run.dir)))
        yield started


@contextlib.contextmanager
def running_role(role: Role, env: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    keeper = [sys.executable, "-m", "launch.keeper", "--grace", "5", "--", *role.argv]
    with (folder / "logs" / role.log_name).open("wb") as out:
        process = subprocess.Popen(keeper, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def wait_for(folder: Path, roles: Sequence[subprocess.Popen[bytes]], kind: str, n: int) -> None:
    """Wait until metrics.jsonl has `n` lines of a kind.

    It ends the bench when that takes too long, or a role ends.
    """
    deadline = time.monotonic() + PATIENCE
    path = folder / "metrics.jsonl"
    while True:
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        if sum(json.loads(line)["kind"] == kind for line in lines) >= n:
            return
        if time.monotonic() > deadline or any(role.poll() is not None for role in roles):
            logs = "\n".join(
                p.read_text(errors="replace")[-3000:] for p in sorted((folder / "logs").glob("*.log"))
            )
            sys.exit(f"{folder}: no progress within the time limit\n{logs}")
        time.sleep(POLL_SECONDS)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder).steps
