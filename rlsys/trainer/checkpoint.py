"""Checkpoints: one folder a step, in megatron's torch_dist format, which any parallel layout can load.

checkpoints/step-000010/     whole, or not there: written as .partial, then renamed
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rlsys.algo.objective import Objective
from rlsys.convert.hf import publish
from rlsys.errors import RunError
from rlsys.trainer.chunks import Chunks

_AVERAGE = "average."
"""Before the keys of averaged weights."""
_NAME = re.compile(r"step-(\d+)")

# Any layout can load the optimizer's state only when it is stored by parameter, not by flat buffer.
_OPTIMIZER = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}

# What loading was seen to raise on files that were cut short or exchanged.
_DAMAGED = (
    CheckpointingException, CheckpointException, OSError, RuntimeError, ValueError, EOFError, KeyError,
    pickle.UnpicklingError,
)  # fmt: skip


def steps(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)))


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def _state(model: Chunks, optimizer: Any, objective: Objective | None, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"model": model.sharded_state_dict()}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=_OPTIMIZER)
    if objective is not None and (averages := objective.averages(model.named_parameters())):
        state["averages"] = _averages(model, averages)
    return state


def _averages(model: Chunks, averages: dict[str, Tensor]) -> dict[str, Any]:
    """Averaged weights `{parameter's name: tensor}`, cut over ranks like the weights: any layout can load them."""
    like = model.shards(_AVERAGE)
    out = {}
    for name, value in averages.items():
        shard = like[name]
        dtype = {"dtype": value.dtype} if isinstance(shard, ShardedTensor) else {}  # the other kind has none
        out[name] = replace(shard, data=value, **dtype)
    return out


def save(
    folder: Path, step: int, model: Chunks, optimizer: Any, keep: int, objective: Objective | None = None
) -> None:
    """Collective. After it, the newest `keep` checkpoints are left."""
    target = path_of(folder, step)
    partial = target.with_suffix(".partial")
    if dist.get_rank() == 0:
        for left_by_a_crash in folder.glob("*.partial"):
            shutil.rmtree(left_by_a_crash)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _state(model, optimizer, objective, loading=False)
    state["step"] = step
    state["rng"] = torch.get_rng_state()
    if objective is not None:
        state["objective"] = json.dumps(objective.state_dict())
    dist_checkpointing.save(state, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        publish(partial, target)
        for old in steps(folder)[:-keep]:
            shutil.rmtree(path_of(folder, old))
    dist.barrier()


def load(folder: Path, model: Chunks, optimizer: Any, objective: Objective | None = None) -> int:
    """Load the newest checkpoint into model and optimizer; its step, or 0 when there is none. Collective."""
    found = steps(folder)
    if not found:
        return 0
    path = path_of(folder, found[-1])
    try:
        state = dist_checkpointing.load(_state(model, optimizer, objective, loading=True), str(path))
    except _DAMAGED as e:
        reason = " ".join(str(e).split())[-300:]
        raise RunError(f"{path}: the checkpoint cannot be loaded: {type(e).__name__}: {reason}") from e
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    if objective is not None and "objective" in state:
        objective.load_state_dict(json.loads(state["objective"]))
        objective.load_averages(state.get("averages", {}))
    return int(state["step"])
