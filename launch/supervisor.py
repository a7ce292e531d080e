"""Starts the roles of a plan, watches them, ends them: trainer first, then rollout, then engines.

    engine    dies after it was ready: restarted once, on its port; the router brings it up to date
              dies before, or a second time: the run stops
    rollout   dies: the run stops (nothing is lost: the next start goes on from the store)
    trainer   exits with 0: the run is done; with anything else: the run stops

The supervisor is the only owner of restarts: neither torchrun nor an engine restarts anything.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

from launch.plan import Plan, Role
from launch.process import RoleProcess
from launch.rundir import RunDir
from rlsys.config import Config
from rlsys.errors import RlsysError, RunError
from rlsys.obs.metrics import MetricsTail

POLL_SECONDS = 0.2
STATUS_SECONDS = 1.0
_PROBE_TIMEOUT = 1.0
_SETTLE_SECONDS = 1.0
_STOP_MARGIN = 5.0


class Display(Protocol):
    """What shows a run to a person."""

    def phase(self, text: str) -> None: ...
    def entry(self, entry: dict[str, Any], *, live: bool) -> None: ...
    def status(self, status: dict[str, Any]) -> None: ...


class Stopped(RlsysError):
    """Stopped from outside, cleanly; the same command goes on."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; the same command goes on with this run")
        self.exit_code = 128 + number


class StopSignals:
    """Counts Ctrl-C, SIGTERM and SIGHUP; the first asks for a clean stop, the second for an immediate one."""

    def __init__(self) -> None:
        self.count = 0
        self.number = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopSignals]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {n: signal.signal(n, self._hear) for n in numbers}
        try:
            yield self
        finally:
            for n, handler in before.items():
                signal.signal(n, handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.number = number


class Supervisor:
    """Owns the processes of one run. Not for use from several threads."""

    def __init__(
        self, config: Config, plan: Plan, run_dir: RunDir, display: Display, stop: StopSignals
    ) -> None:
        self._config = config
        self._plan = plan
        self._run_dir = run_dir
        self._display = display
        self._stop = stop
        self._processes: dict[str, RoleProcess] = {}
        self._restarted: set[str] = set()
        self._next_status = 0.0
        self._tail = MetricsTail(run_dir.path)

    def run(self) -> None:
        """Until the trainer is done; all roles end with it. Raises Stopped, or a failed role's error."""
        done: dict[str, Any] = {}
        for entry in self._tail.read():
            self._display.entry(entry, live=False)
            done = entry if entry["kind"] == "run" else done
        if done.get("event") == "end" and done["step"] >= self._config.trainer.steps:
            self._say(f"all {done['step']} steps are done already; a larger trainer.steps goes on")
            return
        try:
            for role in self._plan.roles:
                self._start(role)
            self._say("starting " + ", ".join(role.name for role in self._plan.roles))
            while not self._trainer_done():
                if self._stop.count:
                    raise Stopped(self._stop.number)
                self._watch()
                self._observe()
                time.sleep(POLL_SECONDS)
            self._observe()
        finally:
            self._end_all()

    def _start(self, role: Role) -> None:
        launch = self._config.launch
        self._processes[role.name] = RoleProcess(
            role, self._plan.environment(role), self._run_dir.log(role.log_name),
            grace=launch.grace_seconds, lock_fd=self._run_dir.lock_fd,
        )  # fmt: skip

    def _trainer_done(self) -> bool:
        return all(p.exit_code == 0 for p in self._processes.values() if p.role.kind == "trainer")

    def _watch(self) -> None:
        for process in list(self._processes.values()):
            if process.exit_code is not None:
                self._on_death(process)
            elif not process.ready:
                self._check_ready(process)

    def _on_death(self, process: RoleProcess) -> None:
        role = process.role
        if role.kind == "trainer" and process.exit_code == 0:
            return
        if role.kind == "engine" and process.ready and role.name not in self._restarted:
            self._restarted.add(role.name)
            process.release()
            self._say(f"{role.name} died (exit code {process.exit_code}); restarting it once")
            self._start(role)
            return
        raise self._cause()

    def _cause(self) -> RlsysError:
        """Roles fall like dominoes: give the others a moment, then blame the one that the rest depends on."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        processes = self._processes.values()
        while time.monotonic() < deadline and any(p.exit_code is None for p in processes):
            time.sleep(POLL_SECONDS)
        dead = [p for p in processes if p.exit_code not in (None, 0) or self._ended_early(p)]
        first = min(dead, key=lambda p: ("engine", "rollout", "trainer").index(p.role.kind))
        again = " again, after one restart" if first.role.name in self._restarted else ""
        return first.failure(f"exited with code {first.exit_code}{again}")

    def _ended_early(self, process: RoleProcess) -> bool:
        """Engines and the rollout process end when they are told to, never by themselves."""
        return process.exit_code == 0 and process.role.kind != "trainer"

    def _check_ready(self, process: RoleProcess) -> None:
        role = process.role
        if role.ready_url is None:
            process.ready = True
        elif get(role.ready_url) is not None:
            process.ready = True
            self._say(f"{role.name} ready after {process.seconds:.0f} s")
        elif role.start_timeout is not None and process.seconds > role.start_timeout:
            raise process.failure(f"did not answer within engine.start_timeout = {role.start_timeout:g} s")

    def _observe(self) -> None:
        for entry in self._tail.read():
            self._display.entry(entry, live=True)
        if time.monotonic() < self._next_status:
            return
        self._next_status = time.monotonic() + STATUS_SECONDS
        rollout = self._processes.get("rollout")
        if rollout and rollout.ready and rollout.role.ready_url and (body := get(rollout.role.ready_url)):
            self._display.status(json.loads(body))

    def _say(self, text: str) -> None:
        self._display.phase(text)
        with self._run_dir.log("supervisor.log").open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _end_all(self) -> None:
        """The rollout process needs its engines to park what is in flight, the trainer needs both."""
        if any(p.exit_code is None for p in self._processes.values()):
            self._say("stopping")
        for kind in ("trainer", "rollout", "engine"):
            self._end([p for p in self._processes.values() if p.role.kind == kind])

    def _end(self, processes: list[RoleProcess]) -> None:
        for process in processes:
            process.end(now=False)
        hurried = False
        deadline = time.monotonic() + self._config.launch.grace_seconds + _STOP_MARGIN
        while any(p.exit_code is None for p in processes):
            if time.monotonic() > deadline:
                raise RunError(f"{processes[0].role.name}: its keeper does not end; see {processes[0].log}")
            if self._stop.count > 1 and not hurried:
                hurried = True
                for process in processes:
                    process.end(now=True)
            time.sleep(POLL_SECONDS / 4)
        for process in processes:
            process.release()


def get(url: str) -> bytes | None:
    """Body of a 200 answer; None for any other answer, or none: the caller asks again."""
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_TIMEOUT) as answer:
            return bytes(answer.read())
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return None
