"""One real Slurm cluster of three nodes and one Ray cluster of two, started by the first test that needs them."""

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
    """The cluster, idle before and after."""
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
    """Two nodes on this machine, each with a loopback address of its own."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'rlsys[ray]')")
    with tempfile.TemporaryDirectory(prefix="ray") as folder, RayCluster(Path(folder), nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def local_curve(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the synchronous tiny run learns through the backend local."""
    run = tmp_path_factory.mktemp("local") / "run"
    train_locally(run, *SYNCHRONOUS)
    return curve(run)
