"""The same reduction over real processes: two gloo ranks give the loss, gradients and metrics of one process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from algo_world import World, run, section

ALGO: dict[str, Any] = {
    "anchor": "old",
    "advantage": "reinforce_pp_baseline",
    "loss": [{"name": "m2po"}, {"name": "kl"}, "entropy"],
    "corrections": [{"name": "tis", "normalise": True}, "minpro"],
    "selectors": [{"name": "d3s"}],
    "hooks": ["vcpo"],
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def rank_main(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def reduce(value: torch.Tensor) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    outcome = run(World(), section(**ALGO), lambda rows: [[r] for r in rows[rank::2]], reduce)
    torch.save(
        (outcome.loss, outcome.gradients, outcome.metrics, outcome.lr_factor), Path(folder) / f"{rank}.pt"
    )
    dist.destroy_process_group()


def test_two_gloo_ranks_equal_one_process(tmp_path: Path) -> None:
    one = run(World(), section(**ALGO), lambda rows: [rows])
    mp.spawn(rank_main, args=(free_port(), str(tmp_path)), nprocs=2)
    loaded = [torch.load(tmp_path / f"{r}.pt") for r in range(2)]
    gradients = loaded[0][1] | loaded[1][1]
    for loss, _, metrics, lr_factor in loaded:
        assert abs(loss - one.loss) < 1e-6
        assert abs(lr_factor - one.lr_factor) < 1e-6
        assert all(abs(metrics[k] - v) < 1e-6 for k, v in one.metrics.items())
    assert gradients.keys() == one.gradients.keys()
    for row, gradient in one.gradients.items():
        torch.testing.assert_close(gradients[row], gradient, atol=1e-6, rtol=0)
