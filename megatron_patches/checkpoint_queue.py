"""Checkpoints without a manager process for the writers' results.

Symptom: The first save of every rank starts a multiprocessing manager, which imports the main module again. This
takes seconds and the memory of a second copy of torch and megatron, and the manager outlives a killed rank.
Upstream: 0.16.1 - 0.19.2.
Why numbers stay equal: The queue carries the writers' results, not tensors. Both of its ends are in this process,
because rlsys.trainer.checkpoints.background writes in a thread. A writer in another process would raise an error for
the empty queue.
Delete when: Upstream starts the manager only if another process writes.
"""

from __future__ import annotations

import queue
from types import ModuleType

from megatron_patches.registry import Patch, target


def _edit(module: ModuleType) -> None:
    renamed = hasattr(module, "get_write_results_queue")  # 0.19
    name = "get_write_results_queue" if renamed else "_get_write_results_queue"
    target(
        "checkpoint_queue",
        module,
        name,
        "global _results_queue",
        "if _results_queue is None",
        "ctx.Manager()",
    )
    module._results_queue = queue.Queue()  # type: ignore[attr-defined]


PATCH = Patch(
    "checkpoint_queue", "megatron.core.dist_checkpointing.strategies.filesystem_async", "always",
    "0.16.1 - 0.19.2", "the first save spawns a process that imports the main module again", _edit,
)  # fmt: skip
