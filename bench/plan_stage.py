"""Runs of the real stack one after another on engines that keep running, for plan_check.py and april_claim.py.

A run has a separate run folder, and the processes that `rlsys train` starts (launch/plan.py), except engines: a
rollout process and a trainer. Engines take longest to start, so all runs share them; a run with fewer engines leaves
the others idle. The engines' keys are derived from the launch that started them, and each run folder names that
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
WAIT_SECONDS = 600.0
"""Time limit of `wait_for`."""
FROZEN = 1e-12
"""A learning rate so small that the policy, and with it the lengths, does not change."""


@dataclass(frozen=True)
class Setting:
    """A setting of a run.

    Attributes:
        sleep: seconds that an engine sleeps before every forward pass (SGLang's /slow_down).
        policy: rollout.staleness_policy.
    """

    placement: str
    engines: int
    over_provision: float
    max_staleness: int
    sleep: float
    policy: str = "drop"

    @property
    def name(self) -> str:
        """Return the setting as text, the key of forecasts and figures."""
        sizes = f"{self.engines} engine{'s' * (self.engines > 1)}, N'/N {self.over_provision:g}"
        policy = ", wait" if self.policy == "wait" else ""
        return (
            f"{self.placement}, {sizes}, {self.max_staleness} old{policy}, sleep {1000 * self.sleep:.0f} ms"
        )


@dataclass(frozen=True)
class Size:
    """Size of the runs on a stage.

    Attributes:
        groups: groups of a train step.
        group: samples of a group.
        longest: largest number of tokens of a response.
        engines: number of engines of the stage.
    """

    groups: int = 16
    group: int = 4
    longest: int = 64
    engines: int = 2


def config_of(setting: Setting, size: Size, folder: Path, seed: int) -> Config:
    """Return the quickstart's config with a frozen policy, and without evaluations and checkpoints after the start.

    Args:
        setting: setting of the run.
        size: size of the run.
        folder: run.dir.
        seed: run.seed.
    """
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
    """Running engines, and the folder of the runs on them.

    Attributes:
        folder: parent of the run folders.
        size: size of the runs.
    """

    def __init__(self, folder: Path, owner: Owner, urls: Sequence[str], size: Size) -> None:
        self.folder, self.size = folder, size
        self._owner, self._urls = owner, urls
        self._runs = 0

    def run(self, setting: Setting, steps: int, seed: int) -> Path:
        """Make a run of `steps` train steps, and return its folder."""
        config = config_of(setting, self.size, self.new_folder(), seed)
        self.run_config(config, setting.sleep, "step", steps)
        return config.run.dir

    def new_folder(self) -> Path:
        """Return a folder for the next run, which does not exist yet."""
        self._runs += 1
        return self.folder / f"run-{self._runs}"

    def run_config(self, config: Config, sleep: float, kind: str, n: int) -> None:
        """Make a run until its metrics.jsonl has `n` lines of a kind.

        Engines sleep from the first evaluation on. The run's logs get the lines that the engines wrote since then.

        Args:
            config: config of the run.
            sleep: seconds of sleep before every forward pass.
            kind: kind of the lines, such as `step`.
            n: number of lines.
        """
        folder, count = config.run.dir, config.engine.count
        owner = replace(self._owner, run_dir=folder)
        write_folder(config, owner)
        urls = self._urls[:count]
        self._slow_down(0.0)
        with attached(config, owner, urls) as roles:
            wait_for(folder, roles, "eval", 1)
            self._slow_down(sleep)
            offsets = [engine_log(self.folder, i).stat().st_size for i in range(count)]
            wait_for(folder, roles, kind, n)
        self._slow_down(0.0)
        for i, offset in enumerate(offsets):
            with engine_log(self.folder, i).open("rb") as log:
                log.seek(offset)
                (folder / "logs" / f"engine-{i}.log").write_bytes(log.read())

    def _slow_down(self, seconds: float) -> None:
        """Make all engines sleep before every forward pass; 0 ends the sleep."""
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
    """Return the log of an engine of the stage in `folder`."""
    return folder / f"engine-{index}" / "engine.log"


@contextlib.contextmanager
def stage(folder: Path, size: Size) -> Iterator[Stage]:
    """Start `size.engines` engines, and yield a stage. End the engines after the context.

    Args:
        folder: folder of the engines' logs and of the runs.
        size: size of the runs.
    """
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
    """Write the run folder that the processes of a run need, as `rlsys train` does."""
    (config.run.dir / "logs").mkdir(parents=True)
    (config.run.dir / "config.yaml").write_text(dump_config(config))
    (config.run.dir / FOLDER).mkdir(mode=0o700)
    launch = {"epoch": owner.epoch, "key": owner.key, "host": "localhost", "pid": os.getpid()}
    launch["sockets"] = str(owner.sockets)
    path = config.run.dir / FOLDER / f"{owner.epoch:06d}"
    path.touch(mode=0o600)
    path.write_text(json.dumps(launch))


@contextlib.contextmanager
def attached(config: Config, owner: Owner, urls: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the run's rollout process and trainer, and yield their keepers. End all of them after the context.

    Args:
        config: config of the run.
        owner: launch that owns the run.
        urls: the run's engines.
    """
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
    """Start a role under a keeper, and yield the keeper. End both after the context."""
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

    Args:
        folder: the run folder.
        roles: keepers of the run's roles.
        kind: kind of the lines, such as `step`.
        n: number of lines.

    Raises:
        SystemExit: a role ended, or the lines did not appear within WAIT_SECONDS.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    path = folder / "metrics.jsonl"
    while True:
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        count = sum(json.loads(line)["kind"] == kind for line in lines)
        if count >= n:
            return
        if time.monotonic() > deadline or any(role.poll() is not None for role in roles):
            logs = "\n".join(
                p.read_text(errors="replace")[-3000:] for p in sorted((folder / "logs").glob("*.log"))
            )
            sys.exit(
                f"{path}: {count} lines of kind {kind!r}; expected {n} within {WAIT_SECONDS:.0f} s, "
                f"while all roles run\n{logs}"
            )
        time.sleep(POLL_SECONDS)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the `step` lines of a run's metrics.jsonl."""
    return read_metrics(folder).steps
