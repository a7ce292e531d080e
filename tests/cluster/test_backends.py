"""One contract for all backends: small commands instead of roles, real processes, real Slurm, real Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from launch.backends import END, END_NOW, Backend, Handle
from launch.backends.selection import open_backend
from launch.environment import Kind
from launch.plan import Role
from rlsys.config import Config
from tests.helpers.python_path import python_path
from tests.helpers.ray_cluster import RayCluster
from tests.helpers.runs import ROOT
from tests.helpers.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.cluster, pytest.mark.gate]
NODES = 2
GRACE = 20


@pytest.fixture(params=["local", "slurm", "ray"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def backend(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Backend]:
    if kind == "slurm":
        enter_job(request.getfixturevalue("slurm"), monkeypatch)
    if kind == "ray":
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("ray_cluster").address)
    with closing(open_backend(settings(tmp_path, kind), lock_fd=2)) as opened:
        yield opened


def settings(folder: Path, kind: str) -> Config:
    launch = {"backend": kind, "nodes": 1 if kind == "local" else NODES, "grace_seconds": GRACE}
    return Config.model_validate({"model": {"path": "none"}, "run": {"dir": folder}, "launch": launch})


HET = "#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=1\n"
"""Two nodes, each a component of a heterogeneous job."""


def enter_job(
    slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch, options: str = f"#SBATCH --nodes={NODES}\n"
) -> None:
    """As in the batch script of a job with these options."""
    script = f"#!/bin/sh\n{options}env | grep ^SLURM > {slurm.folder}/job.env.part\n"
    script += f"mv {slurm.folder}/job.env.part {slurm.folder}/job.env\nsleep 600\n"
    (slurm.folder / "job.sh").write_text(script)
    env = slurm.folder / "job.env"
    env.unlink(missing_ok=True)
    slurm.run("sbatch", "--output=/dev/null", str(slurm.folder / "job.sh"))
    slurm.wait(env.exists, "the job does not start")
    for line in env.read_text().splitlines():
        name, _, value = line.partition("=")
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", slurm.env["PATH"])


class Stage:
    def __init__(self, backend: Backend, folder: Path) -> None:
        self.backend, self.folder = backend, folder

    def start(self, code: str, node: int = 0, kind: Kind = "engine", **env: str) -> Handle:
        role = Role("role", kind, [sys.executable, "-c", code], node=node)
        return self.backend.start(role, {**os.environ, **env}, self.folder / "role.log")

    def log(self) -> str:
        return (self.folder / "role.log").read_text()

    def wait(self, true: Callable[[], bool]) -> None:
        """To be woken by a state, never to prove a speed."""
        deadline = time.monotonic() + 600
        while not true():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def end_of(self, handle: Handle) -> int:
        self.wait(lambda: handle.exit_code is not None)
        code = handle.exit_code
        handle.release()
        assert code is not None
        return code

    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"^pid (\d+)$", self.log(), re.MULTILINE)]

    def no_process_left(self) -> bool:
        return not any(psutil.pid_exists(pid) for pid in self.pids())


@pytest.fixture
def stage(backend: Backend, tmp_path: Path) -> Stage:
    return Stage(backend, tmp_path)


PATIENT = """
import os, signal, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(f"pid {os.getpid()}\\npid {child.pid}", flush=True)
def on_term(*_):
    print("told to end", flush=True); raise SystemExit(0)
signal.signal(signal.SIGTERM, on_term if os.environ.get("POLITE") else signal.SIG_IGN)
while True: time.sleep(1)
"""


def test_exit_code_output_and_environment_are_passed_through(stage: Stage) -> None:
    code = "import os, sys; print(os.environ['GREETING'], os.getcwd()); sys.exit(7)"
    for node in range(len(stage.backend.nodes)):
        assert stage.end_of(stage.start(code, node, GREETING=f"hello {node}")) == 7
        assert f"hello {node} {os.getcwd()}\n" in stage.log()


def test_an_order_ends_a_role_with_all_it_started(stage: Stage) -> None:
    handle = stage.start(PATIENT, len(stage.backend.nodes) - 1, POLITE="1")
    stage.wait(lambda: len(stage.pids()) == 2)
    handle.order(END)
    assert stage.end_of(handle) == 0
    assert "told to end" in stage.log()
    stage.wait(stage.no_process_left)


def test_an_immediate_end_kills_a_process_that_ignores_termination(stage: Stage) -> None:
    handle = stage.start(PATIENT)
    stage.wait(lambda: len(stage.pids()) == 2)
    handle.order(END)
    handle.order(END_NOW)
    assert stage.end_of(handle) == 137
    stage.wait(stage.no_process_left)


def test_a_role_ends_with_its_lifeline(stage: Stage) -> None:
    handle = stage.start(PATIENT, POLITE="1")
    stage.wait(lambda: len(stage.pids()) == 2)
    handle.release()
    stage.wait(stage.no_process_left)


def test_a_killed_role_is_noticed(stage: Stage) -> None:
    handle = stage.start("import os; os.kill(os.getpid(), 9)")
    assert stage.end_of(handle) == 137


def test_free_ports_of_every_node(stage: Stage) -> None:
    ports = stage.backend.free_ports(dict.fromkeys(range(len(stage.backend.nodes)), 3))
    assert [len(set(node_ports)) for node_ports in ports.values()] == [3] * len(stage.backend.nodes)
    assert not stage.backend.preempted()


def test_components_of_a_heterogeneous_job_are_one_cluster(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_job(slurm, monkeypatch, HET)
    with closing(open_backend(settings(tmp_path, "slurm"), lock_fd=2)) as backend:
        stage = Stage(backend, tmp_path)
        for node in backend.nodes:
            index = backend.nodes.index(node)
            assert stage.end_of(stage.start("import os; print(os.environ['SLURMD_NODENAME'])", index)) == 0
            assert stage.log().splitlines()[-1] == node.name
        assert len({node.name for node in backend.nodes}) == 2


def test_a_job_near_its_time_limit_requeues_itself(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_job(slurm, monkeypatch)
    show = ("scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"])
    with closing(open_backend(settings(tmp_path, "slurm"), lock_fd=2)) as backend:
        assert "Restarts=0" in slurm.run(*show)
        backend.requeue()
        slurm.wait(lambda: "Restarts=1" in slurm.run(*show))


def test_a_job_that_may_lose_nodes_takes_a_spare_one(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_job(slurm, monkeypatch, "#SBATCH --nodes=3 --no-kill\n")
    with closing(open_backend(settings(tmp_path, "slurm"), lock_fd=2)) as backend:
        stage = Stage(backend, tmp_path)
        names_before = [node.name for node in backend.nodes]
        assert backend.lost_nodes() == [] and len(names_before) == 2
        handle = stage.start(PATIENT, 1, "trainer")
        stage.wait(lambda: len(stage.pids()) == 2)
        slurm.kill_node(names_before[1])
        try:
            stage.wait(lambda: backend.lost_nodes() == [1])
            assert stage.end_of(handle) == 255, "srun itself says 0"
            assert backend.replace_nodes(lambda: False)
            assert backend.lost_nodes() == []
            names_after = [node.name for node in backend.nodes]
            assert names_after[0] == names_before[0] and names_after[1] not in names_before
            script = "import os; print(os.environ['SLURMD_NODENAME'])"
            assert stage.end_of(stage.start(script, 1, "trainer")) == 0
            assert stage.log().splitlines()[-1] == names_after[1]
            assert len(set(backend.free_ports({0: 2, 1: 2})[1])) == 2
        finally:
            slurm.start_node(names_before[1])


@pytest.mark.full
def test_a_returning_ray_node_is_used_again(
    ray_cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    with closing(open_backend(settings(tmp_path, "ray"), lock_fd=2)) as backend:
        stage = Stage(backend, tmp_path)
        assert backend.lost_nodes() == []
        handle = stage.start(PATIENT, 1)
        stage.wait(lambda: len(stage.pids()) == 2)
        ray_cluster.kill(1)
        assert stage.end_of(handle) == 255
        stage.wait(lambda: backend.lost_nodes() == [1])
        ray_cluster.restart_node(1)
        stage.wait(lambda: backend.lost_nodes() == [])
        assert stage.end_of(stage.start("raise SystemExit(7)", 1)) == 7


def test_the_schedulers_signal_to_all_steps_is_a_preemption(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_job(slurm, monkeypatch)
    with closing(open_backend(settings(tmp_path, "slurm"), lock_fd=2)) as backend:
        stage = Stage(backend, tmp_path)
        handle = stage.start(PATIENT)
        stage.wait(lambda: len(stage.pids()) == 2)
        assert not backend.preempted()
        slurm.run("scancel", "--signal=TERM", os.environ["SLURM_JOB_ID"])
        stage.wait(backend.preempted)
        assert handle.exit_code is None, "a role outlives it"
        handle.order(END_NOW)
        stage.end_of(handle)


OWN_RAY = """
import sys
from contextlib import closing
from pathlib import Path
import psutil
from launch.backends.selection import open_backend
from tests.cluster.test_backends import Stage, settings
config = settings(Path(sys.argv[1]), "ray")
config = config.model_copy(update={"launch": config.launch.model_copy(update={"nodes": 1})})
with closing(open_backend(config, lock_fd=2)) as backend:
    stage = Stage(backend, Path(sys.argv[1]))
    assert stage.end_of(stage.start("raise SystemExit(7)")) == 7
    assert any(p.name() == "raylet" for p in psutil.Process().children())
gone, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=60)
assert not alive, alive
"""


def test_without_an_address_ray_is_its_own_and_ends_with_it(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'rlsys[ray]')")
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        env |= {"HOME": str(tmp_path), "RAY_TMPDIR": short, "PYTHONPATH": python_path(ROOT)}
        command = [sys.executable, "-c", OWN_RAY, str(tmp_path)]
        process = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert not (tmp_path / ".ray" / "auth_token").exists(), (
        "every later `ray start` of this user would ask for it"
    )
