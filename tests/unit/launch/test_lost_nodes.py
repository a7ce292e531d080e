"""A run that loses a machine: it goes on without the engines there, or on other machines."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.backends.slurm import SlurmBackend
from launch.plan import LaunchPlan, Role
from launch.stops import NodeLost
from launch.submit import JobOptions, job_script
from launch.supervisor import Supervisor
from rlsys.cli import main
from rlsys.config import Config
from rlsys.core.errors import RunError
from tests.helpers.supervisor_stage import SERVE_FOREVER, Stage

LEAVES = SERVE_FOREVER.replace(
    "while", "wait_for('rollout probed', name + ' probed')\nnote('node lost')\nos._exit(9)\nwhile"
)
"""An engine whose machine goes after the run has begun."""
GOES_ONCE = """serve()
if count(name + ' began') == 1:
    wait_for('rollout probed', name + ' probed')
    note('node lost')
    os._exit(9)
while True: signal.pause()
"""


def stage_with(tmp_path: Path, fewest: int | None = 1) -> Stage:
    stage = Stage(tmp_path)
    engine = stage.config.engine.model_copy(update={"count": 2})
    launch = stage.config.launch.model_copy(update={"min_engines": fewest})
    stage.config = stage.config.model_copy(update={"engine": engine, "launch": launch})
    return stage


def roles_of(stage: Stage, second: str, trainer: str) -> list[Role]:
    """An engine on node 0, another on node 1, and the rest on node 0."""
    second_engine = stage.role("engine", second, serves=True)
    second_engine.argv[-1] = second_engine.argv[-1].replace("name = 'engine-0'", "name = 'engine-1'")
    return [
        stage.role("engine", SERVE_FOREVER, serves=True),
        replace(second_engine, name="engine-1", unit="engine-1", node=1),
        stage.role("rollout", SERVE_FOREVER, serves=True),
        stage.role("trainer", trainer),
    ]


@pytest.mark.gate
def test_a_run_continues_without_the_engines_of_a_lost_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: they are not restarted where nothing is. They are when the node is back."""
    monkeypatch.setattr("launch.restart_backoff._FIRST_WAIT", 0.1)
    stage = stage_with(tmp_path)
    polls = [0]

    def lost() -> list[int]:
        """Back at the third look."""
        if "node lost" not in stage.notes:
            return []
        polls[0] += 1
        return [1] if polls[0] < 3 else []

    stage.run(
        *roles_of(stage, GOES_ONCE, "while count('engine-1 began') < 2: time.sleep(0.01)"), lost_nodes=lost
    )
    phases = stage.display.phases
    without = [p for p in phases if p.startswith("continuing without engine-1, with 1 engines")]
    assert len(without) == 1 and "node n1 is lost" in without[0], phases
    assert phases.count("restarting engine-1") == 1
    assert not any("restart 1" in p for p in phases)
    assert stage.notes.count("engine-0 ended") == 1, "only at the end"


@pytest.mark.gate
@pytest.mark.parametrize(("node_of_trainer", "fewest"), [(0, None), (0, 2), (1, 1)])
def test_a_node_that_the_run_cannot_do_without_ends_everything(
    tmp_path: Path, node_of_trainer: int, fewest: int | None
) -> None:
    """It needs all engines, or as many as there were, or the trainer was there."""
    stage = stage_with(tmp_path, fewest)
    *other_roles, trainer = roles_of(stage, LEAVES, "while True: signal.pause()")
    with pytest.raises(
        NodeLost, match="node n1 is lost; the same command resumes the run when enough nodes are available"
    ):
        stage.run(
            *other_roles, replace(trainer, node=node_of_trainer),
            lost_nodes=lambda: [1] if "node lost" in stage.notes else [],
        )  # fmt: skip
    assert "engine-0 ended" in stage.notes and "rollout ended" in stage.notes


@pytest.mark.gate
def test_an_unresponsive_scheduler_does_not_stop_the_run(tmp_path: Path) -> None:
    stage = stage_with(tmp_path)

    def lost() -> list[int]:
        raise RunError("scontrol: no answer within 60 s")

    stage.run(
        *roles_of(stage, GOES_ONCE, "while count('engine-1 began') < 2: time.sleep(0.01)"), lost_nodes=lost
    )
    assert "cannot determine the lost nodes: scontrol: no answer within 60 s" in stage.display.phases
    assert any(p.startswith("engine-1 died (exit code 9); restart 1") for p in stage.display.phases)


# -- Slurm: spare nodes --------------------------------------------------------------------------------------

SCONTROL = """#!/bin/sh
case "$*" in
  *"hostnames n1,n2,n3"*) echo n1; echo n2; echo n3;;
  *"hostnames n1,n3"*) echo n1; echo n3;;
  *"hostnames n1"*) echo n1;;
  *"show node"*) echo "NodeName=$4 NodeAddr=127.0.0.1";;
  *"show job"*) echo "JobId=7 ReqNodeList=(null) NodeList=$(cat $0.left) NumNodes=3";;
esac
"""


def slurm_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock_fd: int) -> SlurmBackend:
    """Of a job of three nodes, for a run on two."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    left(tmp_path, "n1,n2,n3")
    for name, value in (
        ("PATH", f"{tmp_path}:{os.environ['PATH']}"), ("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "n1,n2,n3"),
        ("SLURMD_NODENAME", "n1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    launch = {"backend": "slurm", "nodes": 2}
    return SlurmBackend(
        Config.model_validate({"model": {"path": "x"}, "run": {"dir": tmp_path / "run"}, "launch": launch}),
        lock_fd,
    )


def left(tmp_path: Path, nodes: str) -> None:
    (tmp_path / "scontrol.left").write_text(nodes)


def test_a_spare_node_replaces_a_lost_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "lock").open("w") as lock:
        backend = slurm_backend(tmp_path, monkeypatch, lock.fileno())
        assert [n.name for n in backend.nodes] == ["n1", "n2"] and backend.lost_nodes() == []
        left(tmp_path, "n1,n3")
        assert backend.lost_nodes() == [1]
        assert backend.replace_nodes(lambda: False)
        assert [n.name for n in backend.nodes] == ["n1", "n3"] and backend.lost_nodes() == []
        left(tmp_path, "n1")
        assert backend.lost_nodes() == [1]
        assert not backend.replace_nodes(lambda: False), "none is left"
        backend.close()


@pytest.mark.parametrize("spare", [True, False])
def test_a_run_without_a_spare_node_requests_a_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: bool
) -> None:
    """A node is lost once. Slurm would have queued the job again without --no-kill."""
    config = Config.model_validate({"model": {"path": tmp_path}, "run": {"dir": tmp_path / "run"}})
    calls: list[str] = []

    class Losing:
        nodes: tuple[()] = ()

        def preempted(self) -> bool:
            return False

        def replace_nodes(self, _stopped: Any) -> bool:
            calls.append("replace")
            return spare

        def requeue(self) -> None:
            calls.append("requeue")

        def close(self) -> None: ...

    def run(_: Supervisor) -> None:
        if "replace" not in calls:
            raise NodeLost(["n2"])

    monkeypatch.setattr(Supervisor, "run", run)
    monkeypatch.setattr(main, "open_backend", lambda *_: Losing())
    if spare:
        main.supervise(config, lambda _: LaunchPlan([]))
        assert calls == ["replace"]
    else:
        with pytest.raises(NodeLost, match="node n2 is lost"):
            main.supervise(config, lambda _: LaunchPlan([]))
        assert calls == ["replace", "requeue"]


@pytest.mark.parametrize(
    ("launch", "nodes", "outlives"),
    [({}, 2, False), ({"spare_nodes": 1}, 3, True), ({"min_engines": 1}, 2, True)],
)
def test_a_job_outlives_a_node_where_the_run_does(launch: dict[str, Any], nodes: int, outlives: bool) -> None:
    config = Config.model_validate(
        {"model": {"path": "x"}, "launch": {"backend": "slurm", "nodes": 2, **launch}}
    )
    script = job_script(config, Path("c.yaml"), [], JobOptions()).splitlines()
    assert f"#SBATCH --nodes={nodes}" in script
    assert ("#SBATCH --no-kill" in script) is outlives


def test_ray_has_no_spare_nodes() -> None:
    launch = {"backend": "ray", "nodes": 2, "spare_nodes": 1}
    with pytest.raises(
        ValueError, match=r"launch\.spare_nodes = 1 with launch.backend = ray: Ray replaces nodes"
    ):
        Config.model_validate({"model": {"path": "x"}, "launch": launch})
