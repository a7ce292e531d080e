"""What must not end a launch, or start it again for ever: engines, nodes, requeues, other people's words in a log."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from launch.backends.local import LocalBackend
from launch.backends.slurm import SlurmBackend
from launch.plan import LaunchPlan, Role
from launch.process import RoleProcess
from launch.requeue import check_folder, may_requeue
from launch.stops import NodeLost
from launch.supervisor import Supervisor
from rlsys.cli import main
from rlsys.config import Config
from rlsys.core.errors import RlsysError, UserError
from rlsys.rollout.service import EngineWatch
from tests.helpers.supervisor_stage import SERVE_FOREVER, Stage, wait_until

# -- an engine that the run can spare ------------------------------------------------------------------------


def stage_with(tmp_path: Path, **launch: Any) -> Stage:
    stage = Stage(tmp_path)
    engine = stage.config.engine.model_copy(update={"count": 2})
    changed = stage.config.launch.model_copy(update=launch)
    stage.config = stage.config.model_copy(update={"engine": engine, "launch": changed})
    return stage


def engines_of(stage: Stage, second: str, **options: Any) -> list[Role]:
    first = stage.role("engine", SERVE_FOREVER, serves=True)
    second_role = stage.role("engine", second, serves=True, **options)
    return [
        first,
        Role(
            "engine-1",
            "engine",
            second_role.argv,
            ready_url=second_role.ready_url,
            start_timeout=second_role.start_timeout,
        ),
    ]


@pytest.mark.gate
@pytest.mark.parametrize(
    ("failing", "options", "told"),
    [
        ("sys.exit(1)", {}, "exited with code 1"),
        ("while True: signal.pause()", {"start_timeout": 2.0}, "did not answer within engine.start_timeout"),
    ],
    ids=["dies", "never answers"],
)
def test_a_run_continues_without_a_failing_engine_and_retries_it(
    tmp_path: Path, failing: str, options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails twice: each time it is away for longer. Before: it was never tried again."""
    monkeypatch.setattr("launch.restart_backoff._FIRST_WAIT", 0.1)
    stage = stage_with(tmp_path, min_engines=1)
    second = f"name = 'engine-1'\nnote('second')\nif count('second') < 3:\n  {failing}\n{SERVE_FOREVER}"
    stage.run(
        *engines_of(stage, second, **options),
        stage.role("rollout", SERVE_FOREVER, serves=True),
        stage.role("trainer", "wait_for('engine-1 probed')"),
    )
    without = [p for p in stage.display.phases if p.startswith("continuing without engine-1, with 1 engines")]
    assert len(without) >= 2 and all(told in p for p in without[:2]), stage.display.phases
    assert stage.display.phases.count("restarting engine-1") >= 2


async def test_a_run_begins_with_a_quorum_of_256_engines() -> None:
    """Lognormal starts; some of the engines never come. The last of the quorum opens the run, no later one."""
    rng = random.Random(0)
    start_times = [math.inf, *(rng.lognormvariate(3, 1) for _ in range(255))]
    current_time, watched = 0.0, asyncio.Event()

    class Engine:
        def __init__(self, at: float) -> None:
            self.at = at

        async def healthy(self) -> bool:
            return current_time >= self.at

    class Routing:
        async def watch(self) -> None:
            watched.set()

        def watches(self) -> list[Any]:
            return [self.watch()]

    fewest = 230
    last = sorted(start_times)[fewest - 1]
    engines, router = cast(Any, [Engine(at) for at in start_times]), cast(Any, Routing())
    watch = EngineWatch(engines, [], fewest, router)
    current_time = math.nextafter(last, 0)
    assert not await watch._is_ready()
    current_time = last
    await watch.run()
    assert watch.ready and watched.is_set()


@pytest.mark.gate
def test_a_run_that_needs_all_its_engines_ends(tmp_path: Path) -> None:
    for fewest in (None, 2):
        folder = tmp_path / str(fewest)
        folder.mkdir()
        stage = stage_with(folder, min_engines=fewest)
        with pytest.raises(RlsysError, match="engine-1 exited with code 1"):
            stage.run(*engines_of(stage, "sys.exit(1)"), stage.role("trainer", "while True: signal.pause()"))


def test_min_engines_cannot_exceed_the_engine_count(tmp_path: Path) -> None:
    config = {
        "model": {"path": tmp_path}, "run": {"dir": tmp_path}, "engine": {"count": 2}, "launch": {"min_engines": 3},
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"launch\.min_engines = 3: expected at most engine\.count = 2"):
        Config.model_validate(config)


# -- requeues (review 24) ------------------------------------------------------------------------------------

SCONTROL = """#!/bin/sh
case "$*" in
  *hostnames*) echo n1;;
  *"show node"*) echo "NodeName=n1 NodeAddr=127.0.0.1";;
esac
"""


@pytest.mark.parametrize(("end", "preempted"), [("exit 1", False), ("kill -TERM $$", True)])
def test_only_a_signal_of_the_scheduler_is_a_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, preempted: bool
) -> None:
    """Before: a step limit, exit code 1, was a preemption, and the job was requeued without limit."""
    (tmp_path / "run").mkdir()
    (tmp_path / "srun").write_text(f"#!/bin/sh\necho srun >> {tmp_path}/starts\n{end}\n")
    (tmp_path / "scontrol").write_text(SCONTROL)
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    for name, value in (
        ("PATH", f"{tmp_path}:{os.environ['PATH']}"), ("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "n1"),
        ("SLURMD_NODENAME", "n1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    config = Config.model_validate(
        {"model": {"path": "x"}, "run": {"dir": tmp_path / "run"}, "launch": {"backend": "slurm"}}
    )
    with (tmp_path / "lock").open("w") as lock:
        backend = SlurmBackend(config, lock.fileno())
        backend.start(Role("engine-0", "engine", ["true"]), dict(os.environ), tmp_path / "engine-0.log")
        sentinel = backend._sentinel
        assert sentinel is not None
        wait_until(lambda: sentinel.exit_code is not None)
        assert backend.preempted() is preempted
        if not preempted:
            assert backend._sentinel is not sentinel, "another one watches"
        backend.close()


def test_requeues_without_progress_are_limited(tmp_path: Path) -> None:
    decisions = [
        may_requeue(tmp_path, tokens, limit=2) for tokens in (100, 100, 100, 100, 100, 150, 150, 150, 150)
    ]
    assert decisions == [True, True, True, False, False, True, True, True, False]
    (tmp_path / "requeues.json").write_text("torn")
    assert may_requeue(tmp_path, 0, limit=2)


def test_a_requeue_onto_a_node_without_the_folder_is_refused(tmp_path: Path) -> None:
    """Before: on another node's disk the run began again at step 0."""
    again = {"SLURM_RESTART_COUNT": "2"}
    with pytest.raises(
        UserError, match=r"run: missing on this node, .*SLURM_RESTART_COUNT = 2.* all nodes share"
    ):
        check_folder(tmp_path / "run", again)
    check_folder(tmp_path / "run", {})
    check_folder(tmp_path / "run", {"SLURM_RESTART_COUNT": "0"})
    (tmp_path / "run").mkdir()
    check_folder(tmp_path / "run", again)


# -- nodes that go (review 26) -------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1])
def test_lost_nodes_count_since_the_last_train_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Before: launch.max_restarts lost nodes ended a run of any length."""
    config = Config.model_validate(
        {"model": {"path": tmp_path}, "run": {"dir": tmp_path / "run"}, "launch": {"max_restarts": 2}}
    )
    lost = [0]

    def run(supervisor: Supervisor) -> None:
        """Trains so many steps, then a node goes; ten times."""
        for _ in range(steps):
            with (config.run.dir / "metrics.jsonl").open("a") as f:
                f.write(json.dumps({"kind": "step", "step": lost[0] + 1, "time": 0.0}) + "\n")
        if lost[0] < 10:
            lost[0] += 1
            raise NodeLost([f"n{lost[0]}"])

    monkeypatch.setattr(Supervisor, "run", run)
    if steps:
        main.supervise(config, lambda _: LaunchPlan([]))
        assert lost[0] == 10
    else:
        with pytest.raises(NodeLost):
            main.supervise(config, lambda _: LaunchPlan([]))
        assert lost[0] == 3


# -- whose words a log has (review 26) -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "own"),
    [("os.kill(os.getpid(), signal.SIGKILL)", False), ("os._exit(2)", True), ("os._exit(1)", True)],
)
def test_a_logged_user_error_counts_only_if_it_ended_the_role(tmp_path: Path, end: str, own: bool) -> None:
    """A reward prints such a line, and its role is killed later. Before: that forbade the restart."""
    config = Config.model_validate({"model": {"path": "x"}, "run": {"dir": tmp_path}})
    code = f"import os, signal; print('rlsys: error: data.file = x [exit 2]', flush=True); {end}"
    role = Role("engine-0", "engine", [sys.executable, "-c", code])
    with (tmp_path / "lock").open("w") as lock:
        backend = LocalBackend(config, lock.fileno())
        process = RoleProcess(backend, role, dict(os.environ), tmp_path / "log")
    wait_until(lambda: process.exit_code is not None)
    error = process.failure("exited")
    assert isinstance(error, UserError) is own
    assert ("data.file = x" in str(error)) is own
    process.release()
