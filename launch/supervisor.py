"""Supervisor: starts the roles of a plan, watches them, and ends them: trainer first, then rollout, then engines.

    an engine dies                  The supervisor restarts it on its port; the router updates its weights.
    the rollout process dies        The supervisor restarts it and the trainer. It restores its state from the ledger.
    the trainer dies                The supervisor restarts it on all its nodes, from the last checkpoint.
    the trainer exits with code 0   The run is complete.
    another server uses the port    All roles end, and start again on other ports.
    of an engine
    a node is lost                  The run continues without the node's engines if launch.min_engines others remain.
                                    Otherwise all roles end, and start again on other nodes.

The supervisor does not restart a role that never worked, or that reports why it cannot continue. The wait before a
restart doubles each time. After launch.max_restarts restarts without a train step (for a server: without other work)
the run stops. If the role is an engine, and launch.min_engines others remain, the run continues without it; the
supervisor restarts the engine after one minute, then two, up to 15 minutes. Only the supervisor restarts processes:
ranks, engines and a scheduler's actors do not.
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
from launch.console import Console, Display
from launch.plan import LaunchPlan, Role
from launch.probe import NO_ANSWER, NOT_YET, OK, SECONDS, probe
from launch.process import RoleFailed, RoleProcess, RoleStatus
from launch.readiness import PortInUse, engine_is_up, listens
from launch.restart_backoff import RestartBackoff
from launch.rundir import RunDir
from launch.stall_detector import StallDetector
from launch.stops import NodeLost, StoppedBySignal, StopSignals
from rlsys.config import Config
from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.core.identity import config_path, engine_identity, write_config
from rlsys.core.run_files import PROGRESS_FILE
from rlsys.obs import coordinator
from rlsys.obs.metrics import MetricsTail

POLL_SECONDS = 0.2
STATUS_SECONDS = 1.0
_SETTLE_SECONDS = 1.0
"""After a death, time to wait for the deaths of roles that depend on the dead one."""
_STOP_MARGIN = 5.0
"""Time beyond the grace time in which a keeper must have ended its role."""
_MAX_PROBES = 64
"""Maximum number of concurrent probes, so that a starting role without a response does not delay others."""
_ENDING_FRACTION = 1 / 3
"""Fraction of the preemption time that is reserved for ending the processes."""
_KINDS = ("engine", "rollout", "trainer")
"""Kinds of roles. Each kind depends on the kinds before it."""


class Supervisor:
    """Owns the processes of one run. Not thread-safe."""

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
        """Create the supervisor without starting a role.

        Args:
            config: config of the run.
            plan: the roles.
            backend: starts processes.
            run_dir: the locked run folder.
            display: shows the state of the run.
            stop: signals that end the run.
            check: raises an error if the run must not start. Because it takes seconds, it runs while engines start,
                and before the other roles start.
        """
        self._check = check
        self._config = config
        self._plan = plan
        self._backend = backend
        self._run_dir = run_dir
        self._stop = stop
        self._processes: dict[str, RoleProcess] = {}
        self._restarts: Counter[str] = Counter()
        """Unit -> number of its restarts since the last train step or other work."""
        self._backoff = RestartBackoff()
        """Engines without which the run continues."""
        self._probes = ThreadPoolExecutor(_MAX_PROBES, "probe")
        self._pending_probes: dict[RoleProcess, Future[tuple[int, bytes]]] = {}
        """Starting role -> status and body of the response to its probe."""
        self._starts = run_dir.starts
        self._preempted = False
        self._next_status = 0.0
        self._roles: dict[str, RoleStatus] = {}
        self._tail = MetricsTail(run_dir.path)
        self._status: dict[str, Any] | None = None
        self._console = Console(display, lambda: run_dir.log("supervisor.log"))
        self._report = self._console.report
        self._stall_detector = StallDetector(run_dir.path, config.diagnosis_seconds, self._report)

    def run(self) -> None:
        """Run until the trainer exits with code 0, then end all roles.

        Raises:
            StoppedBySignal: a signal or the scheduler stopped the run.
            RlsysError: the error of a failed role.
        """
        if self._show_earlier_metrics():
            return
        try:
            self._start_all()
            while any(p.exit_code != 0 for p in self._processes.values() if p.role.kind == "trainer"):
                if number := self._stop_signal():
                    if number in (signal.SIGTERM, signal.SIGUSR1):
                        self._preempt()
                    raise StoppedBySignal(number)
                self._watch()
                self._observe()
                time.sleep(POLL_SECONDS)
            self._observe()
        finally:
            self._end_all(sys.exception())
            self._probes.shutdown(wait=False, cancel_futures=True)

    def _show_earlier_metrics(self) -> bool:
        """Show the metrics of earlier launches. Return whether the run has completed all its steps."""
        last_event: dict[str, Any] = {}
        for entry in self._tail.read():
            self._console.entry(entry, live=False)
            last_event = entry if entry["kind"] == "run" else last_event
        is_complete = last_event.get("event") == "end" and last_event["step"] >= self._config.trainer.steps
        if is_complete:
            self._report(
                f"all {last_event['step']} steps are done already; increase trainer.steps to continue"
            )
        return is_complete

    def _start_all(self) -> None:
        """Start the engines, run the check meanwhile, then start the other roles."""
        self._report("starting " + ", ".join(role.name for role in self._plan.roles))
        for role in self._plan.roles:
            if role.kind == "engine":
                self._start(role)
        with self._stop.interruptible():
            self._check()
        for role in self._plan.roles:
            if role.kind != "engine":
                self._start(role)

    def _start(self, role: Role) -> None:
        """Start a process of the role; an engine first gets a file with its keys."""
        self._starts[role.name] += 1
        owner = self._run_dir.owner
        if role.engine is not None:
            write_config(config_path(self._run_dir.path, role.unit), engine_identity(owner, role.engine))
        env = self._plan.environment(role) | owner.environment(self._starts[role.name])
        log = self._run_dir.log(role.log_name)
        if (previous := self._processes.get(role.name)) is not None:
            self._pending_probes.pop(previous, None)
        self._processes[role.name] = RoleProcess(self._backend, role, env, log)

    def _stop_signal(self) -> int:
        """Return the signal that requests a stop; 0 for none."""
        if self._stop.count:
            return self._stop.number
        return signal.SIGTERM if self._backend.preempted() else 0

    def _watch(self) -> None:
        """Check starting roles, restart dead ones, and retry dropped engines."""
        # Check readiness first: a role that became ready and then died is restarted, one that never worked is not.
        for process in self._processes.values():
            if not process.ready and (process.exit_code is None or process in self._pending_probes):
                self._check_ready(process)
        if any(self._died(p) for p in self._processes.values()):
            self._on_death()
        self._retry_engines()

    def _died(self, process: RoleProcess) -> bool:
        """Return whether the process ended unexpectedly. Only a trainer may exit without an order, with code 0."""
        if process.role.unit in self._backoff:
            return False
        code = process.exit_code
        return code is not None and (code != 0 or process.role.kind != "trainer")

    # -- restarts -----------------------------------------------------------------------------------------------

    def _on_death(self) -> None:
        """Restart the dead roles and the roles that depend on them, or drop a dead engine.

        Raises:
            PortInUse: another server uses the port of a dead engine.
            NodeLost: nodes are lost, and the run cannot continue without them.
            RlsysError: the run cannot continue; this is the error of the dead role on which the others depend.
        """
        dead = self._dead_roles()
        if self._stop_signal():  # the roles end because a scheduler signals every process
            return
        if lost_nodes := self._lost_nodes():
            self._drop_nodes(lost_nodes)
            return
        for process in dead:
            role = process.role
            if role.engine and role.ready_url and not process.ready and listens(role.engine):
                raise PortInUse(f"{role.name}: another server listens at {role.engine}")
        first = min(dead, key=lambda p: _KINDS.index(p.role.kind))
        unit = first.role.unit
        restarts = self._restarts[unit]
        suffix = f" again, after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""
        error = first.failure(f"{first.exit_phrase()}{suffix}")
        is_explained = isinstance(error, UserError) or (isinstance(error, RoleFailed) and error.self_reported)
        never_worked = not first.ready and not restarts
        if is_explained or never_worked or restarts >= self._config.launch.max_restarts:
            self._drop_engine(first.role, error)
            return
        self._restarts[unit] += 1
        units = {p.role.unit for p in dead}
        if "rollout" in units:  # the trainer's position in the step is lost with it
            units.add("trainer")
        event = f"{first.role.name} died ({first.exit_reason()}); restart {restarts + 1}"
        other_units = ", ".join(sorted(units - {unit}))
        self._report(f"{event}, with {other_units}" if other_units else event)
        self._restart(units, 2.0**restarts - 1)

    def _lost_nodes(self) -> list[int]:
        """Return the indices of the lost nodes on which roles were running."""
        try:
            lost_nodes = self._backend.lost_nodes()
        except RunError as e:  # the scheduler may be unreachable; deaths then count as failures of the roles
            self._report(f"cannot determine the lost nodes: {e}")
            return []
        in_use = {p.role.node for p in self._processes.values() if p.role.unit not in self._backoff}
        return [node for node in lost_nodes if node in in_use]

    def _drop_nodes(self, lost_nodes: list[int]) -> None:
        """Drop the engines on lost nodes.

        Raises:
            NodeLost: the run needs these engines, or other roles were on these nodes.
        """
        error = NodeLost([self._plan.nodes[node].name for node in lost_nodes])
        roles_by_unit = {p.role.unit: p.role for p in self._processes.values() if p.role.node in lost_nodes}
        for unit, role in roles_by_unit.items():
            if unit not in self._backoff:
                self._drop_engine(role, error)

    def _drop_engine(self, role: Role, error: RlsysError) -> None:
        """End an engine until its next retry, if launch.min_engines others remain.

        Args:
            role: a role of the engine, or any other role.
            error: the reason.

        Raises:
            RlsysError: the role is not an engine, or the run needs the engine; this is `error`.
        """
        engines = {r.unit for r in self._plan.router_engines()}
        writers = {r.unit for r in self._plan.router_engines() if not r.explores} - {role.unit}
        remaining = sum(unit not in self._backoff for unit in writers)
        min_engines = self._config.launch.min_engines
        if min_engines is None or role.unit not in engines or remaining < min_engines:
            raise error
        wait = self._backoff.add(role.unit)
        self._report(
            f"continuing without {role.unit}, with {remaining} engines (launch.min_engines = {min_engines}), "
            f"for {wait:.0f} s: {error}"
        )
        self._end([p for p in self._processes.values() if p.role.unit == role.unit], immediate=True)

    def _retry_engines(self) -> None:
        """Restart the dropped engines whose wait has ended, if their nodes exist.

        The rollout process adds an engine again when it answers.
        """
        due = self._backoff.due()
        lost_nodes = self._lost_nodes() if due else []
        for unit in due:
            if any(role.node in lost_nodes for role in self._plan.unit(unit)):
                self._backoff.add(unit)
                continue
            self._report(f"restarting {unit}")
            self._restart({unit}, 0)

    def _dead_roles(self) -> list[RoleProcess]:
        """Wait for further deaths, and return the dead roles.

        The wait finds the role that died first: the death of a role often becomes visible after the deaths that it
        causes. There is no wait if only ready engines died, because no role dies with them.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        processes = self._processes.values()
        while time.monotonic() < deadline and any(p.exit_code is None for p in processes):
            if all(p.role.kind == "engine" and p.ready for p in processes if self._died(p)):
                break
            time.sleep(POLL_SECONDS)
        return [p for p in processes if self._died(p)]

    def _restart(self, units: set[str], wait: float) -> None:
        """End the roles of the units, wait, and start them in the order of the plan.

        Args:
            units: names of the units.
            wait: seconds between end and start.
        """
        roles = [role for role in self._plan.roles if role.unit in units]
        for kind in reversed(_KINDS):
            self._end([self._processes[r.name] for r in roles if r.kind == kind], immediate=kind == "trainer")
        until = time.monotonic() + wait
        while time.monotonic() < until and not self._stop_signal():
            time.sleep(POLL_SECONDS)
        for role in roles:
            self._start(role)

    # -- preemption ---------------------------------------------------------------------------------------------

    def _preempt(self) -> None:
        """Prepare for a preemption within launch.preemption_seconds.

        First the rollout process parks running samples and saves their tokens. Then the trainer saves a checkpoint,
        if there is time, and exits. The caller ends all roles that are still running.
        """
        total = self._config.launch.preemption_seconds
        deadline = time.monotonic() + total * (1 - _ENDING_FRACTION)
        self._report(f"the run must end within {total:g} s: parking running samples")
        self._preempted = True
        rollout = self._processes.get("rollout")
        if rollout is None or rollout.exit_code is not None or not rollout.role.ready_url:
            return
        path = f"/leave?seconds={total * (1 - _ENDING_FRACTION):g}"
        if self._get(path, data=b"", timeout=total * (1 - _ENDING_FRACTION)) is None:
            self._report("the rollout process did not park all samples in time; only tokens on disk are kept")
        trainers = [p for p in self._processes.values() if p.role.kind == "trainer"]
        while time.monotonic() < deadline and any(p.exit_code is None for p in trainers):
            self._observe()
            time.sleep(POLL_SECONDS)
        exited = all(p.exit_code == 0 for p in trainers)
        self._report("the trainer has exited" if exited else "the trainer did not exit in time")

    # -- readiness and status -----------------------------------------------------------------------------------

    def _check_ready(self, process: RoleProcess) -> None:
        """Probe a role that is not ready, and handle the response, or the end of its start timeout."""
        role = process.role
        if role.ready_url is None:
            # The trainer becomes ready when it writes its first line of metrics (_on_entry).
            process.ready = role.kind != "trainer"
            return
        if process not in self._pending_probes and process.exit_code is None:
            self._pending_probes[process] = self._probes.submit(self._probe, role)
        code, body = NO_ANSWER, b""
        if process in self._pending_probes and self._pending_probes[process].done():
            code, body = self._pending_probes.pop(process).result()
        if code == OK:
            process.ready = True
            self._backoff.reset(role.unit)
            self._report(f"{role.name} ready after {process.seconds:.0f} s")
        elif code == NOT_YET and role.kind == "rollout":
            if self._console.progress(body.decode(errors="replace")):
                self._stall_detector.reset()
        elif (
            process.exit_code is None
            and role.start_timeout is not None
            and process.seconds > role.start_timeout
        ):
            self._on_start_timeout(process, f"engine.start_timeout = {role.start_timeout:g} s")

    def _on_start_timeout(self, process: RoleProcess, limit: str) -> None:
        """Drop an engine that is not ready in time after its first start; end it after a restart.

        Its end counts as a death, so launch.max_restarts decides whether it is restarted again.
        """
        role = process.role
        if not self._restarts[role.unit]:
            event = f"did not answer within {limit}; a slow or busy host may need more"
            self._drop_engine(role, process.failure(event))
        elif not process.timed_out:
            self._report(f"{role.name}: did not answer within {limit}; it is ended")
            process.timed_out = True
            process.end(immediate=True)

    def _probe(self, role: Role) -> tuple[int, bytes]:
        """Probe a role, and return status and body of the response; NO_ANSWER without a response.

        Raises:
            PortInUse: another server answers at the address of an engine.
        """
        if role.engine is not None:
            up = engine_is_up(role.engine, engine_identity(self._run_dir.owner, role.engine))
            return OK if up else NO_ANSWER, b""
        return probe(self._run_dir.owner, role.ready_url or "")

    def _get(self, path: str, data: bytes | None = None, timeout: float = SECONDS) -> bytes | None:
        """Send a request to the rollout process. Return the body of the response; None unless its status is 200."""
        code, body = probe(self._run_dir.owner, path, data, timeout)
        return body if code == OK else None

    def roles(self) -> dict[str, RoleStatus]:
        """Return the status of the roles at the last poll. Other threads may call this."""
        return self._roles

    def _observe(self) -> None:
        """Show new metrics; once per STATUS_SECONDS, also update the status and answer requests of other commands."""
        for entry in self._tail.read():
            self._console.entry(entry, live=True)
            self._on_entry(entry)
        if time.monotonic() < self._next_status:
            return
        self._next_status = time.monotonic() + STATUS_SECONDS
        self._roles = {
            name: RoleStatus(p.exit_code is None, self._starts[name]) for name, p in self._processes.items()
        }
        previous, self._status = self._status, self._fetch_status()
        if self._status is not None:
            self._console.status(self._status)
        if self._status != previous or self._client_progressed():
            self._stall_detector.reset()
        names = [node.name for node in self._plan.nodes]
        self._stall_detector.check(self._processes.values(), names, self._status)
        coordinator.answer_requests(self._run_dir.path, self._query_rollout, self._report)

    def _query_rollout(self, path: str) -> bytes | None:
        """Return the rollout process's response to the request of another command; None without a response."""
        if "rollout" not in self._processes:
            return None
        return self._get(path, timeout=coordinator.RESPONSE_SECONDS / 2)

    def _fetch_status(self) -> dict[str, Any] | None:
        """Return the status of the rollout process; None if it does not respond."""
        rollout = self._processes.get("rollout")
        if not (rollout and rollout.ready and rollout.role.ready_url):
            return None
        body = self._get(rollout.role.ready_url)
        status: dict[str, Any] | None = json.loads(body) if body else None
        return status

    def _client_progressed(self) -> bool:
        """Show the progress of `rlsys eval` or `rlsys try`. Return whether it is new."""
        try:
            return self._console.progress((self._run_dir.path / PROGRESS_FILE).read_text(encoding="utf-8"))
        except OSError:
            return False

    def _on_entry(self, entry: dict[str, Any]) -> None:
        """Record the progress that a line of metrics proves."""
        self._stall_detector.reset()
        for process in self._processes.values():
            process.ready |= process.role.kind == "trainer"
        if entry["kind"] in ("step", "work"):  # "work": from a server, whose clients may only sample
            self._restarts.clear()

    def _end_all(self, cause: BaseException | None) -> None:
        """End all roles: the trainer first, then the rollout process, which needs its engines to park samples.

        Args:
            cause: error that stops the run. The caller reports it, so this method only shows errors of the shutdown.

        Raises:
            RunError: a keeper does not end, and there is no `cause`.
        """
        if any(p.exit_code is None for p in self._processes.values()):
            self._report("stopping")
        for kind in reversed(_KINDS):
            # In a preemption only the rollout process needs its grace time, because the others have no unsaved data.
            immediate = self._preempted and kind != "rollout"
            try:
                self._end([p for p in self._processes.values() if p.role.kind == kind], immediate=immediate)
            except RunError as timeout:
                if cause is None:
                    raise
                self._report(str(timeout))

    def _end(self, processes: list[RoleProcess], *, immediate: bool) -> None:
        """End processes, and wait until all have ended. A second signal makes the end immediate.

        Raises:
            RunError: a keeper does not end.
        """
        for process in processes:
            process.end(immediate=immediate)
        deadline = time.monotonic() + self._config.launch.grace_seconds + _STOP_MARGIN
        while any(p.exit_code is None for p in processes):
            if time.monotonic() > deadline:
                running = next(p for p in processes if p.exit_code is None)
                raise RunError(f"{running.role.name}: its keeper does not end; see {running.log}")
            if self._stop.count > 1 and not immediate:
                immediate = True
                for process in processes:
                    process.end(immediate=True)
            time.sleep(POLL_SECONDS / 4)
        for process in processes:
            process.release()
