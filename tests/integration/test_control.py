"""Ranks that wait for the rollout: no data group's time limit ends them."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.helpers.servers import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.gate]

LIMIT = 2.0
"""Seconds that the data group waits: stands for the ten minutes of NCCL."""


def rank() -> None:
    """A take that lasts longer than the data group's limit, then one that rank 0 dies of."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
    from rlsys.trainer.control import Control

    control = Control()

    def take() -> str:
        time.sleep(2 * LIMIT)
        return "groups"

    assert control.on_main(take) == "groups"
    print(f"rank {dist.get_rank()} took", flush=True)
    dist.destroy_process_group()  # gloo's threads may abort a process that ends with them


def test_a_take_may_last_longer_than_the_data_groups_limit() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.run(
        [*command, "-m", "tests.integration.test_control"], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert sorted(line for line in process.stdout.splitlines() if "took" in line) == [
        f"rank {i} took" for i in range(2)
    ]


if __name__ == "__main__":
    rank()
