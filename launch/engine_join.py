"""An engine that joins a run of another launch: started here, registered with the run, and drained at the end.

Any scheduler may start it: a Slurm job array, a preemptible node, a Ray task, a person. It serves as soon as the run
has sent it weights and attested them. After SIGTERM or Ctrl-C its samples continue on other engines, and it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launch.backends.local import LocalBackend
from launch.environment import Kind, environment
from launch.plan import EngineCommand, LaunchPlan, Role
from launch.process import RoleProcess
from launch.readiness import engine_is_up
from launch.stops import StopSignals
from rlsys.config import Config, load_run_config
from rlsys.core import membership
from rlsys.core.errors import UserError
from rlsys.core.identity import config_path, engine_identity, write_config
from rlsys.core.interfaces import is_loopback
from rlsys.core.owner import Owner, current_owner
from rlsys.obs import coordinator
from rlsys.planner.layout import lay_out, on_cuda, push_plan

POLL_SECONDS = 0.5
LOST_RUN_SECONDS = 60.0
"""The engine ends if the run has had no rollout process for this time."""

Report = Callable[[str], None]


def join(
    run: Path, host: str, pool: str | None, engine_command: EngineCommand, stop: StopSignals, report: Report
) -> None:
    """Start an engine that serves a run until the run ends or drops it, or a signal arrives.

    Args:
        run: the run folder.
        host: address at which the run reaches this machine.
        pool: name of the engine's pool in engine.pools; None for no pool.
        engine_command: builds the command line of an engine.
        stop: signals that end the engine.
        report: receives messages.

    Raises:
        UserError: the engine cannot join the run.
        RlsysError: the engine died; this is the error that it reported.
    """
    config, owner = load_run_config(run), current_owner(run)
    engine = config.engine.model_copy(update={"tp": tp_size(config, pool)})
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": run}), "engine": engine})
    address = coordinator.read_address(run)
    if owner is None or address is None or address.epoch != owner.epoch:
        raise UserError(f"{run}: this run is not running; start it before engines join it")
    check(config, host, pool, local=address.host == socket.gethostname())
    with _running_engine(config, owner, host, engine_command, report) as (process, url):
        if not _wait_until_up(process, owner, url, stop):
            return
        membership.write_member(owner, url, config.engine.tp, pool, active=True)
        report(f"{url} has joined {run}")
        try:
            _serve(process, owner, url, stop)
            report(f"{url} leaves {run}")
            membership.write_member(owner, url, config.engine.tp, pool, active=False)
            _drain(process, owner, url, config.launch.preemption_seconds)
        finally:
            membership.remove_member(owner, url)


def tp_size(config: Config, pool: str | None) -> int:
    """Return the tensor-parallel size of an engine that joins.

    Raises:
        UserError: the config does not have this pool.
    """
    if pool is None:
        return config.engine.tp
    if (joined_pool := config.engine.pool_of(None, pool)) is None:
        names = ", ".join(p.name for p in config.engine.pools)
        expected = f"expected one of {names}" if names else "the run has no pools"
        raise UserError(f"--pool {pool}: {expected} (engine.pools)")
    return joined_pool.tp or config.engine.tp


def check(config: Config, host: str, pool: str | None, *, local: bool) -> None:
    """Check that the run's weights can reach the engine.

    Args:
        config: the run's config, with the tensor-parallel size of the engine as engine.tp.
        host: address of the engine.
        pool: name of the engine's pool; None for no pool.
        local: whether the engine is on the machine of the rollout process and of trainer rank 0.

    Raises:
        UserError: the weights cannot reach the engine, or cannot be attested.
    """
    if (tp := config.engine.tp) not in (tps := config.engine.tps):
        raise UserError(
            f"engine.tp = {tp}: no engine of the run has this size, so the joining engine's weights could not be "
            f"attested; expected one of {', '.join(map(str, tps))}, or --pool NAME for the size of a pool"
        )
    method, relayed = config.weights.method, config.engine.chain_of(pool) is not None
    by_memory = method == "auto" and not on_cuda(config) and not push_plan(config, lay_out(config)).group
    if not relayed and not local and by_memory:
        raise UserError(
            "weights.method = auto: all engines of the run open memory of the run's machine, but this engine is on "
            "another machine; expected weights.method=broadcast or disk"
        )
    if not local and host in ("127.0.0.1", "localhost", "0.0.0.0"):
        raise UserError(
            f"--host {host}: the run is on another machine; expected an address of this machine that it can reach"
        )
    loopback_only = config.launch.nodes == 1 and is_loopback(config.engine.host)
    if not relayed and not local and loopback_only and method in ("auto", "broadcast", "sharded"):
        raise UserError(
            f"--host {host}: engine.host = {config.engine.host}, so the run's process groups listen on loopback; "
            "start the run with an address of its machine as engine.host, or with weights.method=disk"
        )


@contextlib.contextmanager
def _running_engine(
    config: Config, owner: Owner, host: str, engine_command: EngineCommand, report: Report
) -> Iterator[tuple[RoleProcess, str]]:
    """Start the engine, yield its process and URL, and in the end stop the engine with all its descendants."""
    # The size of this engine is engine.tp, not that of a pool.
    engine_update = {"host": host, "port": 0, "pools": []}
    local_config = config.model_copy(update={"engine": config.engine.model_copy(update=engine_update)})
    null_fd = os.open(os.devnull, os.O_RDONLY)  # in place of the run's lock, which belongs to another launch
    with contextlib.closing(LocalBackend(local_config, null_fd)) as backend:
        (port,) = backend.free_ports({0: 1})[0]
        name, url = unit_name(host, port), f"http://{host}:{port}"
        argv, env = engine_command(local_config, 0, port)
        keys = config_path(owner.run_dir, name)
        role = Role(
            name, "engine", [*argv, "--config", str(keys)], env, ready_url=f"{url}/health",
            start_timeout=config.start_seconds, engine=url,
        )  # fmt: skip
        variables: dict[Kind, dict[str, str]] = {
            "engine": environment(config, "engine", cuda=on_cuda(config))
        }
        plan = LaunchPlan([role], run_dir=config.run.dir, shared=variables)
        write_config(keys, engine_identity(owner, url))
        role_environment = plan.environment(role) | owner.environment(1)
        process = RoleProcess(backend, role, role_environment, owner.run_dir / "logs" / role.log_name)
        report(f"{name} starts; its log: {process.log}")
        try:
            yield process, url
        finally:
            process.end(immediate=False)
            while process.exit_code is None:
                time.sleep(POLL_SECONDS / 4)
            process.release()
            keys.unlink(missing_ok=True)
            os.close(null_fd)


def _wait_until_up(process: RoleProcess, owner: Owner, url: str, stop: StopSignals) -> bool:
    """Wait until the engine is up. Return False if a signal arrives first.

    Raises:
        RlsysError: the engine died, or is not up after engine.start_timeout.
    """
    identity, limit = engine_identity(owner, url), process.role.start_timeout
    while not engine_is_up(url, identity):
        if stop.count:
            return False
        if process.exit_code is not None:
            raise process.failure(process.exit_phrase())
        if limit is not None and process.seconds > limit:
            raise process.failure(f"did not answer within engine.start_timeout = {limit:g} s")
        time.sleep(POLL_SECONDS)
    return True


def _serve(process: RoleProcess, owner: Owner, url: str, stop: StopSignals) -> None:
    """Wait for a signal, for the removal of the engine by the run, or for the end or restart of the run.

    Raises:
        RlsysError: the engine died.
    """
    missing_since: float | None = None
    while not stop.count:
        if process.exit_code is not None:
            raise process.failure(process.exit_phrase())
        if current_owner(owner.run_dir) != owner:  # another launch, which has other keys, owns the run
            return
        is_missing = coordinator.read_address(owner.run_dir) is None
        missing_since = (missing_since or time.monotonic()) if is_missing else None
        if missing_since is not None and time.monotonic() - missing_since > LOST_RUN_SECONDS:
            return
        if not any(m.url == url and m.active for m in membership.read_members(owner)):
            return
        time.sleep(POLL_SECONDS)


def _drain(process: RoleProcess, owner: Owner, url: str, seconds: float) -> None:
    """Wait until the run has removed the engine and continues its samples elsewhere, for at most `seconds`.

    After that time, tokens in transfer are lost.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.exit_code is None and url in engines(owner.run_dir):
        time.sleep(POLL_SECONDS)


def unit_name(host: str, port: int) -> str:
    """Return the engine's name in the names of logs, key files and route files, which must not contain dots."""
    return f"engine-at-{re.sub(r'[^A-Za-z0-9]+', '-', host)}-{port}"


def engines(run: Path) -> dict[str, dict[str, object]]:
    """Return URL -> metrics of the run's engines (Router.engine_metrics); empty if the run is not running.

    Raises:
        CoordinatorUnreachable: the rollout process does not respond.
    """
    status = coordinator.query_coordinator(run, "status")
    metrics: dict[str, dict[str, object]] = {} if status is None else json.loads(status)["engine_figures"]
    return metrics
