"""Starts the roles of a plan, watches them, ends them: trainer first, then rollout, then engines.

    engine    dies: restarted on its port; the router brings it up to date
    rollout   dies: restarted from its store, and the trainer with it
    trainer   exits with 0: the run is done; dies: all its nodes are restarted from the last checkpoint
    port      of an engine that another server has got: everything is ended, and started again on other ports
    node      is gone: the run goes on without the engines that were there, if launch.min_engines others are left;
              otherwise everything is ended, and started again on other nodes

A role that never worked, or that says itself why it cannot go on, is not restarted. Each restart waits longer than
the one before. After launch.max_restarts of them without a train step (a server: without other work) the run
stops; where the role is an engine, and launch.min_engines others are left, the run goes on without it, and tries it
again after a minute, then after two, up to a quarter of an hour. Only the supervisor restarts anything: ranks,
engines and a scheduler's actors do not.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from launch.backends import Backend
from launch.console import Display, Voice
from launch.plan import LaunchPlan, Role
from launch.probe import NO_ANSWER, NOT_YET, OK, SECONDS, probe
from launch.process import RoleFailed, RoleProcess, RoleTold
from launch.readiness import PortTaken, engine_answers, listens
from launch.retries import GivenUp
from launch.rundir import RunDir
from launch.silence import Silence
from launch.stops import NodeLost, Stopped, StopSignals
from rlsys.config import Config
from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.core.identity import config_path, engine_identity, write_config
from rlsys.obs import coordinator
from rlsys.obs.metrics import MetricsTail

POLL_SECONDS = 0.2
STATUS_SECONDS = 1.0
_SETTLE_SECONDS = 1.0
_STOP_MARGIN = 5.0
_PROBES = 64
"""At once, of roles that start: one that does not answer holds up no other."""
_ENDING_SHARE = 1 / 3
"""Of the time that a preemption leaves, kept for ending the processes."""
_KINDS = ("engine", "rollout", "trainer")
"""Each depends on those before it."""


class Supervisor:
    """Owns the processes of one run. Not for use from several threads."""

    def __init__(
        self,
        config: Config,
        plan: LaunchPlan,
        backend: Backend,
        run_dir: RunDir,
        display: Display,
        stop: StopSignals,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check`: raises what forbids the run. It lasts seconds, and so do engines until they serve: it runs when
        they have started, before anything else has."""
        self._check = check
        self._config = config
        self._plan = plan
        self._backend = backend
        self._run_dir = run_dir
        self._display = display
        self._stop = stop
        self._processes: dict[str, RoleProcess] = {}
        self._restarts: Counter[str] = Counter()
        """Of each unit, since the last train step, or the last other work that was done."""
        self._given_up = GivenUp()
        self._probes = ThreadPoolExecutor(_PROBES, "probe")
        self._asked: dict[RoleProcess, Future[tuple[int, bytes]]] = {}
        """Roles that start, and what they answer."""
        self._starts = run_dir.starts
        self._hurried = False
        self._next_status = 0.0
        self._roles: dict[str, RoleTold] = {}
        self._tail = MetricsTail(run_dir.path)
        self._status: dict[str, Any] | None = None
        self._voice = Voice(display, lambda: run_dir.log("supervisor.log"))
        self._say = self._voice.say
        self._silence = Silence(run_dir.path, config.launch.silence_seconds, self._say)

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
            self._say("starting " + ", ".join(role.name for role in self._plan.roles))
            for role in self._plan.roles:
                if role.kind == "engine":
                    self._start(role)
            with self._stop.breaking_off():
                self._check()
            for role in self._plan.roles:
                if role.kind != "engine":
                    self._start(role)
            while any(p.exit_code != 0 for p in self._processes.values() if p.role.kind == "trainer"):
                if number := self._stop_signal():
                    if number in (signal.SIGTERM, signal.SIGUSR1):
                        self._leave()
                    raise Stopped(number)
                self._watch()
                self._observe()
                time.sleep(POLL_SECONDS)
            self._observe()
        finally:
            self._end_all(sys.exception())
            self._probes.shutdown(wait=False, cancel_futures=True)

    def _start(self, role: Role) -> None:
        self._starts[role.name] += 1
        owner = self._run_dir.owner
        if role.engine is not None:
            write_config(config_path(self._run_dir.path, role.unit), engine_identity(owner, role.engine))
        env = self._plan.environment(role) | owner.environment(self._starts[role.name])
        log = self._run_dir.log(role.log_name)
        if (before := self._processes.get(role.name)) is not None:
            self._asked.pop(before, None)
        self._processes[role.name] = RoleProcess(self._backend, role, env, log)

    def _stop_signal(self) -> int:
        """What asks for a stop; 0: nothing does."""
        if self._stop.count:
            return self._stop.number
        return signal.SIGTERM if self._backend.preempted() else 0

    def _watch(self) -> None:
        for process in self._processes.values():  # first: one that answered and died has worked
            if not process.ready and (process.exit_code is None or process in self._asked):
                self._check_ready(process)
        if any(self._died(p) for p in self._processes.values()):
            self._on_death()
        self._try_again()

    def _died(self, process: RoleProcess) -> bool:
        """Engines and the rollout process end when they are told to, never by themselves."""
        if process.role.unit in self._given_up:
            return False
        code = process.exit_code
        return code is not None and (code != 0 or process.role.kind != "trainer")

    # -- restarts -----------------------------------------------------------------------------------------------

    def _on_death(self) -> None:
        """Restart what died and what cannot go on without it, or raise the error of what is to blame."""
        dead = self._settled()
        if self._stop_signal():  # a scheduler that signals every process: they end because the run does
            return
        if lost := self._lost_nodes():
            self._go_on_without_nodes(lost)
            return
        for process in dead:
            role = process.role
            if role.engine and role.ready_url and not process.ready and listens(role.engine):
                raise PortTaken(f"{role.name}: another server listens at {role.engine}")
        first = min(dead, key=lambda p: _KINDS.index(p.role.kind))
        unit, before = first.role.unit, self._restarts[first.role.unit]
        again = f" again, after {before} restart{'s' * (before > 1)}" if before else ""
        error = first.failure(f"{first.ended()}{again}")
        says_why = isinstance(error, UserError) or (isinstance(error, RoleFailed) and error.own_words)
        never_worked = not first.ready and not before
        if says_why or never_worked or before >= self._config.launch.max_restarts:
            self._go_on_without(first.role, error)
            return
        self._restarts[unit] += 1
        units = {p.role.unit for p in dead}
        if "rollout" in units:  # the trainer's place in the step is lost with it
            units.add("trainer")
        wait = 2.0**before - 1
        also = f", with {', '.join(sorted(units - {unit}))}" if units - {unit} else ""
        self._say(f"{first.role.name} died ({first.ending()}); restart {before + 1}{also}")
        self._restart(units, wait)

    def _lost_nodes(self) -> list[int]:
        """Nodes that are gone, and on which something ran until now."""
        try:
            lost = self._backend.lost_nodes()
        except RunError as e:  # the scheduler may be away for a while: deaths are then the roles' own
            self._say(f"which nodes are left is not known: {e}")
            return []
        in_use = {p.role.node for p in self._processes.values() if p.role.unit not in self._given_up}
        return [node for node in lost if node in in_use]

    def _go_on_without_nodes(self, lost: list[int]) -> None:
        """Give up the engines that were there; raises NodeLost when the run cannot spare them, or what else was."""
        error = NodeLost([self._plan.nodes[node].name for node in lost])
        there = {p.role.unit: p.role for p in self._processes.values() if p.role.node in lost}
        for unit, role in there.items():
            if unit not in self._given_up:
                self._go_on_without(role, error)

    def _go_on_without(self, role: Role, error: RlsysError) -> None:
        """Give up an engine that the run can spare; else raises the error."""
        engines = {r.unit for r in self._plan.pool()}
        writers = {r.unit for r in self._plan.pool() if not r.explores} - {role.unit}
        left = sum(unit not in self._given_up for unit in writers)
        fewest = self._config.launch.min_engines
        if fewest is None or role.unit not in engines or left < fewest:
            raise error
        wait = self._given_up.add(role.unit)
        self._say(
            f"going on without {role.unit}, with {left} engines (launch.min_engines = {fewest}), for {wait:.0f} s: "
            f"{error}"
        )
        self._end([p for p in self._processes.values() if p.role.unit == role.unit], now=True)

    def _try_again(self) -> None:
        """Engines whose time has come, where their nodes are. The rollout process takes one in when it answers."""
        due = self._given_up.due()
        lost = self._lost_nodes() if due else []
        for unit in due:
            if any(role.node in lost for role in self._plan.unit(unit)):
                self._given_up.add(unit)
                continue
            self._say(f"trying {unit} again")
            self._restart({unit}, 0)

    def _settled(self) -> list[RoleProcess]:
        """Who is dead. Roles fall like dominoes, and a dying one is often noticed by the others first: give them a
        moment, unless engines alone are concerned, which nobody dies of."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        processes = self._processes.values()
        while time.monotonic() < deadline and any(p.exit_code is None for p in processes):
            if all(p.role.kind == "engine" and p.ready for p in processes if self._died(p)):
                break
            time.sleep(POLL_SECONDS)
        return [p for p in processes if self._died(p)]

    def _restart(self, units: set[str], wait: float) -> None:
        """Roles of the units start again, in the plan's order, after all of them have ended."""
        roles = [role for role in self._plan.roles if role.unit in units]
        for kind in reversed(_KINDS):
            self._end([self._processes[r.name] for r in roles if r.kind == kind], now=kind == "trainer")
        until = time.monotonic() + wait
        while time.monotonic() < until and not self._stop_signal():
            time.sleep(POLL_SECONDS)
        for role in roles:
            self._start(role)

    # -- preemption ---------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """The nodes will be taken away: tokens are parked and on disk first, then the trainer saves what it has if
        that fits, and leaves by itself. Who is not done in time is ended."""
        total = self._config.launch.preemption_seconds
        deadline = time.monotonic() + total * (1 - _ENDING_SHARE)
        self._say(f"the run must leave within {total:g} s: parking what is in flight")
        self._hurried = True
        rollout = self._processes.get("rollout")
        if rollout is None or rollout.exit_code is not None or not rollout.role.ready_url:
            return
        path = f"/leave?seconds={total * (1 - _ENDING_SHARE):g}"
        if self._get(path, data=b"", timeout=total * (1 - _ENDING_SHARE)) is None:
            self._say("the rollout process did not park in time; it keeps what it has on disk")
        trainers = [p for p in self._processes.values() if p.role.kind == "trainer"]
        while time.monotonic() < deadline and any(p.exit_code is None for p in trainers):
            self._observe()
            time.sleep(POLL_SECONDS)
        left = all(p.exit_code == 0 for p in trainers)
        self._say("the trainer has left by itself" if left else "the trainer did not leave in time")

    # -- readiness and figures ----------------------------------------------------------------------------------

    def _check_ready(self, process: RoleProcess) -> None:
        role = process.role
        if role.ready_url is None:
            process.ready = role.kind != "trainer"  # that one is, when it writes its first line of metrics
            return
        if process not in self._asked and process.exit_code is None:
            self._asked[process] = self._probes.submit(self._probe, role)
        code, body = NO_ANSWER, b""
        if process in self._asked and self._asked[process].done():
            code, body = self._asked.pop(process).result()
        if code == OK:
            process.ready = True
            self._given_up.works(role.unit)
            self._say(f"{role.name} ready after {process.seconds:.0f} s")
        elif code == NOT_YET and role.kind == "rollout":
            if self._voice.opening(body.decode(errors="replace")):
                self._silence.end()
        elif process.exit_code is not None:
            return
        elif role.start_timeout is not None and process.seconds > role.start_timeout:
            if not self._restarts[role.unit]:
                limit = f"engine.start_timeout = {role.start_timeout:g} s"
                words = f"did not answer within {limit}; a slow or busy host may need more"
                self._go_on_without(role, process.failure(words))
            elif not process.late:
                self._say(
                    f"{role.name}: no answer within engine.start_timeout = {role.start_timeout:g} s; ended"
                )
                process.late = True
                process.end(now=True)  # counts as a death: launch.max_restarts decides

    def _probe(self, role: Role) -> tuple[int, bytes]:
        """Raises PortTaken when another server answers in the place of an engine."""
        if role.engine is not None:
            up = engine_answers(role.engine, engine_identity(self._run_dir.owner, role.engine))
            return OK if up else NO_ANSWER, b""
        return probe(self._run_dir.owner, role.ready_url or "")

    def _get(self, path: str, data: bytes | None = None, timeout: float = SECONDS) -> bytes | None:
        """Body of a 200 answer of the rollout process; None for any other, or none."""
        code, body = probe(self._run_dir.owner, path, data, timeout)
        return body if code == OK else None

    def roles(self) -> dict[str, RoleTold]:
        """As of the last look; for other threads."""
        return self._roles

    def _observe(self) -> None:
        for entry in self._tail.read():
            self._display.entry(entry, live=True)
            self._on_entry(entry)
        if time.monotonic() < self._next_status:
            return
        self._next_status = time.monotonic() + STATUS_SECONDS
        self._roles = {
            name: RoleTold(p.exit_code is None, self._starts[name]) for name, p in self._processes.items()
        }
        before, self._status = self._status, self._ask_status()
        if self._status is not None:
            self._display.status(self._status)
        if self._status != before:
            self._silence.end()
        names = [node.name for node in self._plan.nodes]
        self._silence.look(self._processes.values(), names, self._status)
        rollout = self._processes.get("rollout")
        patience = coordinator.ANSWER_SECONDS / 2
        coordinator.answer(
            self._run_dir.path,
            lambda path: self._get(path, timeout=patience) if rollout else None,
            self._say,
        )

    def _ask_status(self) -> dict[str, Any] | None:
        """The rollout process's counts; None when it does not answer."""
        rollout = self._processes.get("rollout")
        if not (rollout and rollout.ready and rollout.role.ready_url):
            return None
        body = self._get(rollout.role.ready_url)
        status: dict[str, Any] | None = json.loads(body) if body else None
        return status

    def _on_entry(self, entry: dict[str, Any]) -> None:
        self._silence.end()
        for process in self._processes.values():
            process.ready |= process.role.kind == "trainer"
        if entry["kind"] in ("step", "work"):  # "work": of a server, whose clients may only sample
            self._restarts.clear()

    def _end_all(self, why: BaseException | None) -> None:
        """The rollout process needs its engines to park what is in flight, the trainer needs both. `why`: what stops
        the run; it is told, and not what goes wrong in the end."""
        if any(p.exit_code is None for p in self._processes.values()):
            self._say("stopping")
        for kind in reversed(_KINDS):
            # In a hurry there is nothing to wait for but the rollout process: the others hold nothing.
            now = self._hurried and kind != "rollout"
            try:
                self._end([p for p in self._processes.values() if p.role.kind == kind], now=now)
            except RunError as late:
                if why is None:
                    raise
                self._say(str(late))

    def _end(self, processes: list[RoleProcess], *, now: bool) -> None:
        for process in processes:
            process.end(now=now)
        deadline = time.monotonic() + self._config.launch.grace_seconds + _STOP_MARGIN
        while any(p.exit_code is None for p in processes):
            if time.monotonic() > deadline:
                raise RunError(f"{processes[0].role.name}: its keeper does not end; see {processes[0].log}")
            if self._stop.count > 1 and not now:
                now = True
                for process in processes:
                    process.end(now=True)
            time.sleep(POLL_SECONDS / 4)
        for process in processes:
            process.release()
