"""Listening sockets of runs under Slurm and Ray: loopback, or the address of a node, and all of them in the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.test_slurm_runs import submit, wait_for_end
from tests.helpers.runs import TINY
from tests.helpers.sessions import command_line
from tests.helpers.slurm_cluster import SlurmCluster
from tests.helpers.socket_table import (
    RAY,
    SLURM,
    TABLE,
    Entry,
    Watch,
    format_table,
    run_and_watch,
    violations,
)

pytestmark = pytest.mark.cluster

NODES = (
    *SLURM,
    Entry("tcp", r"-m rlsys\.train ", "the TCPStore of ranks on several nodes: nothing, as gloo and NCCL"),
    *TABLE,
)


def of_run(run: Path) -> Iterator[int]:
    """Processes that have the run's folder on their command lines; Slurm's own are not among them."""
    for process in psutil.process_iter():
        if any(word.startswith(str(run)) for word in command_line(process)):
            yield process.pid


def test_every_socket_of_a_run_on_two_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    run, watch = tmp_path / "run", Watch()
    with watch.over(lambda: of_run(run)):
        job = submit(slurm, run, "launch.nodes=2", "trainer.steps=2", "weights.method=broadcast")
        wait_for_end(slurm, job, run)
    print(format_table(watch.seen, NODES))
    assert violations(watch.seen, table=NODES) == []
    assert any("rlsys.engine.server" in entry.command for entry in watch.seen)


def test_every_socket_of_a_run_with_a_ray_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    table = (*TABLE, *RAY)
    words = (f"run.dir={tmp_path / 'run'}", "launch.backend=ray", "trainer.steps=2", *TINY)
    sockets, _ = run_and_watch("train", "configs/quickstart.yaml", *words)
    print(format_table(sockets, table))
    assert violations(sockets, table=table) == []
