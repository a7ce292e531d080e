"""An engine that joins a run which somebody else's launch began: started here, told to the run, and ended in order.

Whatever lends machines may start it: a Slurm job array, a preemptible node, a Ray task, a person. It serves when the
run has given it weights and attested them. SIGTERM or Ctrl-C sends it away: its samples go on elsewhere, then it
ends.
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
from launch.environment import environment
from launch.plan import LaunchPlan, Role
from launch.process import RoleProcess
from launch.readiness import engine_answers
from launch.rundir import CONFIG_FILE
from launch.stops import StopSignals
from rlsys.config import Config, load_config
from rlsys.core import membership
from rlsys.core.errors import UserError
from rlsys.core.identity import config_path, engine_identity, write_config
from rlsys.core.interfaces import is_loopback
from rlsys.core.owner import Owner, current
from rlsys.obs import coordinator
from rlsys.planner.layout import on_cuda

POLL_SECONDS = 0.5
GONE_SECONDS = 60.0
"""A run whose rollout process has been away for so long has ended: its nodes are given back."""

EngineCommand = Callable[[Config, int, int], tuple[list[str], dict[str, str]]]
Say = Callable[[str], None]


def join(
    run: Path, host: str, pool: str | None, engine_command: EngineCommand, stop: StopSignals, say: Say
) -> None:
    """Until the run ends, sends the engine away, or a signal comes. `host`: this machine's address for the run.
    `pool`: of the config's engine.pools, the one that it is to be in.

    Raises UserError for a run that it cannot join, and the engine's own error when that dies.
    """
    config, owner = load_config(run / CONFIG_FILE), current(run)
    engine = config.engine.model_copy(update={"tp": size_of(config, pool)})
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": run}), "engine": engine})
    address = coordinator.published(run)
    if owner is None or address is None or address.epoch != owner.epoch:
        raise UserError(f"{run}: this run is not going on; start it before engines join it")
    check(config, host, pool, local=address.host == socket.gethostname())
    with _started(config, owner, host, engine_command, say) as (process, url):
        if not _until_it_answers(process, owner, url, stop):
            return
        membership.tell(owner, url, config.engine.tp, pool, wanted=True)
        say(f"{url} has joined {run}")
        try:
            _while_wanted(process, owner, url, stop)
            say(f"{url} leaves")
            membership.tell(owner, url, config.engine.tp, pool, wanted=False)
            _until_let_go(process, owner, url, config.launch.preemption_seconds)
        finally:
            membership.forget(owner, url)


def size_of(config: Config, pool: str | None) -> int:
    """Tensor parallel size of an engine that joins. Raises UserError for a pool that the config does not have."""
    if pool is None:
        return config.engine.tp
    if (found := config.engine.pool_of(None, pool)) is None:
        names = ", ".join(one.name for one in config.engine.pools)
        raise UserError(f"--pool {pool}: expected one of engine.pools: {names or 'the run has none'}")
    return found.tp or config.engine.tp


def check(config: Config, host: str, pool: str | None, *, local: bool) -> None:
    """Raises UserError for an engine that the run's weights would not reach. `local`: on the machine of the rollout
    process, where trainer rank 0 is."""
    if (tp := config.engine.tp) not in (tps := config.engine.tps):
        raise UserError(
            f"engine.tp = {tp} is the size of an engine that joins, and no engine of the run has it: what it holds "
            f"could not be checked; expected one of {', '.join(map(str, tps))}, or --pool NAME for the size of a pool"
        )
    method, relayed = config.weights.method, config.engine.chain_of(pool) is not None
    if not relayed and method == "tensor" and (on_cuda(config) or not local):
        raise UserError(
            "weights.method = tensor passes through memory that a trainer rank and the engine share, and an engine "
            "that joins shares none; the run needs weights.method=broadcast, sharded or disk"
        )
    if not local and host in ("127.0.0.1", "localhost", "0.0.0.0"):
        raise UserError(
            f"--host {host}: the run is on another machine; give an address of this one that it reaches"
        )
    alone = config.launch.nodes == 1 and is_loopback(config.engine.host)
    if not relayed and not local and alone and method in ("broadcast", "sharded"):
        raise UserError(
            f"--host {host}: engine.host = {config.engine.host}, so the run's process groups listen on loopback; "
            "start the run with an address of its machine as engine.host, or with weights.method=disk"
        )


@contextlib.contextmanager
def _started(
    config: Config, owner: Owner, host: str, engine_command: EngineCommand, say: Say
) -> Iterator[tuple[RoleProcess, str]]:
    """The engine as a process, and its URL; ended at the end, with all it started."""
    alone = {"host": host, "port": 0, "pools": []}  # of its own size, which is engine.tp here
    here = config.model_copy(update={"engine": config.engine.model_copy(update=alone)})
    nothing = os.open(os.devnull, os.O_RDONLY)  # the run's lock is its launch's
    with contextlib.closing(LocalBackend(here, nothing)) as backend:
        (port,) = backend.free_ports({0: 1})[0]
        name, url = unit_name(host, port), f"http://{host}:{port}"
        argv, env = engine_command(here, 0, port)
        keys = config_path(owner.run_dir, name)
        role = Role(
            name, "engine", [*argv, "--config", str(keys)], env, ready_url=f"{url}/health",
            start_timeout=config.start_seconds, engine=url,
        )  # fmt: skip
        plan = LaunchPlan(
            [role],
            run_dir=config.run.dir,
            shared={"engine": environment(config, "engine", cuda=on_cuda(config))},
        )
        write_config(keys, engine_identity(owner, url))
        process = RoleProcess(
            backend,
            role,
            plan.environment(role) | owner.environment(1),
            owner.run_dir / "logs" / role.log_name,
        )
        say(f"{name} starts; its log: {process.log}")
        try:
            yield process, url
        finally:
            process.end(now=False)
            while process.exit_code is None:
                time.sleep(POLL_SECONDS / 4)
            process.release()
            keys.unlink(missing_ok=True)
            os.close(nothing)


def _until_it_answers(process: RoleProcess, owner: Owner, url: str, stop: StopSignals) -> bool:
    """False when a signal came first."""
    whose, limit = engine_identity(owner, url), process.role.start_timeout
    while not engine_answers(url, whose):
        if stop.count:
            return False
        if process.exit_code is not None:
            raise process.failure(process.ended())
        if limit is not None and process.seconds > limit:
            raise process.failure(f"did not answer within engine.start_timeout = {limit:g} s")
        time.sleep(POLL_SECONDS)
    return True


def _while_wanted(process: RoleProcess, owner: Owner, url: str, stop: StopSignals) -> None:
    """Until a signal, or somebody else, sends it away, or the run has ended or begun anew."""
    gone_since: float | None = None
    while not stop.count:
        if process.exit_code is not None:
            raise process.failure(process.ended())
        if current(owner.run_dir) != owner:  # another launch has taken the run: other keys
            return
        gone = coordinator.published(owner.run_dir) is None
        gone_since = (gone_since or time.monotonic()) if gone else None
        if gone_since is not None and time.monotonic() - gone_since > GONE_SECONDS:
            return
        if not any(m.url == url and m.wanted for m in membership.members(owner)):
            return
        time.sleep(POLL_SECONDS)


def _until_let_go(process: RoleProcess, owner: Owner, url: str, seconds: float) -> None:
    """Until the run has taken its samples back, at most so many seconds: then they lose what has not arrived."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.exit_code is None and url in engines(owner.run_dir):
        time.sleep(POLL_SECONDS)


def unit_name(host: str, port: int) -> str:
    """Of such an engine: its logs, its keys and the files of its routes are called so, which takes no dots."""
    return f"engine-at-{re.sub(r'[^A-Za-z0-9]+', '-', host)}-{port}"


def engines(run: Path) -> dict[str, dict[str, object]]:
    """URL -> figures of the run's engines (Router.engine_figures); none when the run does not go on.

    Raises Silent when its rollout process does not answer.
    """
    told = coordinator.ask(run, "status")
    found: dict[str, dict[str, object]] = {} if told is None else json.loads(told)["engine_figures"]
    return found
