"""A real Slurm cluster of three nodes and a Ray cluster of two, which the first test that needs them starts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ray_cluster import RayCluster
from tests.helpers.runs import SYNCHRONOUS, curve, train_locally
from tests.helpers.slurm_cluster import SlurmCluster, missing


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """Slurm cluster that is idle before and after the test."""
    yield slurm_cluster
    slurm_cluster.cancel_all()


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    if reason := missing():
        pytest.skip(f"Slurm is {reason}")
    with tempfile.TemporaryDirectory(
        prefix="slurm"
    ) as folder:  # short: sockets have a limit of 107 characters
        cluster = SlurmCluster(Path(folder), nodes=3)
        try:
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Ray cluster of two nodes on this machine, each with its own loopback address."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'rlsys[ray]')")
    with tempfile.TemporaryDirectory(prefix="ray") as folder, RayCluster(Path(folder), nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def local_curve(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Curve of the synchronous tiny run with the local backend."""
    run = tmp_path_factory.mktemp("local") / "run"
    train_locally(run, *SYNCHRONOUS)
    return curve(run)
