"""Run a function on several ranks of a Gloo group, one process per rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launch.ports import free_ports

T = TypeVar("T")


def on_gloo_ranks(ranks: int, work: Callable[[int, int], T], folder: Path) -> list[T]:
    """Run `work(ranks, rank)` on each rank and return the results.

    Args:
        ranks: number of processes.
        work: function at module level, so that the processes can import it.
        folder: folder of the results.
    """
    mp.spawn(_rank, args=(ranks, free_ports("127.0.0.1", 1)[0], folder, work), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _rank(rank: int, ranks: int, port: int, folder: Path, work: Callable[[int, int], object]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.save(work(ranks, rank), folder / f"{rank}.pt")
    dist.destroy_process_group()
