"""Checkpoints: one folder a step, in megatron's torch_dist format, which any parallel layout can load.

checkpoints/step-000010/     whole, or not there: written as .partial, then renamed
    manifest.json            step, evaluation score, SHA-256 of every other file; checked before anything is loaded

A save copies this rank's tensors to the CPU and writes them in a thread while training goes on; `finish` publishes
them. A process killed in between leaves the checkpoint before it as the newest.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rlsys.algo.objective import Objective
from rlsys.convert.hf import publish
from rlsys.convert.torch_dist import DistReader
from rlsys.core.errors import RunError, disk_errors
from rlsys.core.owner import Owner
from rlsys.trainer.checkpoints import manifest
from rlsys.trainer.checkpoints.background import Writing
from rlsys.trainer.control import Control
from rlsys.trainer.model.chunks import MTP, Chunks

_CRITIC = "critic."
"""Before the keys of a critic's weights."""
_NAME = re.compile(r"step-(\d+)")

# Any layout can load the optimizer's state only when it is stored by parameter, not by flat buffer.
# Each rank stores what it holds (megatron_patches/optimizer_local_shards.py).
_OPTIMIZER = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}

# 0.19 has two writers, and takes one that may not be installed.
_STRATEGY = (
    {"async_strategy": "mcore"} if "async_strategy" in signature(dist_checkpointing.save).parameters else {}
)

# What loading was seen to raise on a checkpoint of another model.
_FOREIGN = (
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


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint, not a Hugging Face folder."""
    return (path / ".metadata").is_file()


def load_weights(path: Path, model: Chunks) -> None:
    """Only the model, without layers for multi-token prediction, from a checkpoint that `rlsys convert` made. Raises
    RunError as Checkpoints.load does, and UserError for a type that is no weight's."""
    _verify(path, [])
    stored = DistReader(path)
    stored.check_types(stored.shapes)
    described = {
        chunk: {name: shard for name, shard in weights.items() if not name.startswith(MTP)}
        for chunk, weights in model.sharded_state_dict().items()
    }
    model.load_state_dict(_loaded({"model": described}, path)["model"], but=MTP)


def _loaded(state: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), _replicas())
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(path), strategy)
    except _FOREIGN as e:
        reason = " ".join(str(e).split())[-300:]
        raise RunError(f"{path}: the checkpoint cannot be loaded: {type(e).__name__}: {reason}") from e
    return loaded


def _replicas() -> dist.ProcessGroup:
    """The ranks that hold the same weights: they share the work of writing and reading these."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


@dataclass(frozen=True)
class Learner:
    """A model of this rank and megatron's optimizer of it. Of a model with adapters, a checkpoint holds these alone,
    and the fingerprint of the model that they belong to."""

    model: Chunks
    optimizer: Any


def _state(learners: Sequence[Learner], objective: Objective | None, loading: bool) -> dict[str, Any]:
    """Of the policy and, if it has one, its critic: both have parameters of the same names."""
    model, state = learners[0].model, _learned(learners[0], "", loading)
    for critic in learners[1:]:
        state["critic"] = _learned(critic, _CRITIC, loading)
    if objective is not None and (totals := objective.average_totals(model.named_parameters())):
        state["averages"] = {prefix: _like_weights(model, prefix, t) for prefix, t in totals.items()}
    return state


def _learned(learner: Learner, prefix: str, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"model": learner.model.sharded_state_dict()}
    if prefix:
        add_prefix_for_sharding(state, prefix)
    state["optimizer"] = learner.optimizer.sharded_state_dict(state, is_loading=loading, metadata=_OPTIMIZER)
    return state


def _like_weights(model: Chunks, prefix: str, totals: dict[str, Tensor]) -> dict[str, Any]:
    """Tensors `{parameter: tensor}` of a hook, cut over ranks like the weights: any layout loads them."""
    like = model.shards(prefix)
    out = {}
    for name, value in totals.items():
        shard = like[name]
        dtype = {"dtype": value.dtype} if isinstance(shard, ShardedTensor) else {}  # the other kind has none
        out[name] = replace(shard, data=value, **dtype)
    return out


@dataclass
class _Pending:
    step: int
    score: float | None
    writing: Writing
    begin_seconds: float


class Checkpoints:
    """Owns a run's checkpoint folder. Every rank calls every method together.

    Keeps the newest `keep` and the one with the best score (a held-out accuracy, say). `owner`: the launch that
    publishes; once a later launch owns the run it raises FencedError and publishes nothing. None: nobody else writes.
    """

    def __init__(self, folder: Path, keep: int, control: Control, owner: Owner | None = None) -> None:
        self._owner = owner
        self._folder = folder
        self._keep = keep
        self._control = control
        self._pending: _Pending | None = None
        self.seconds = 0.0
        """What the last save took on the slowest rank, also in an earlier session. 0 before the first: whoever must
        leave then tries one."""

    def begin(
        self,
        step: int,
        learners: Sequence[Learner],
        objective: Objective | None = None,
        score: float | None = None,
    ) -> None:
        """Copy the state and start to write it. It counts once `finish` has told its step.

        `learners`: the policy, then its critic if it has one.
        """
        if self._pending is not None:
            raise ValueError(
                f"the checkpoint of step {self._pending.step} is still being written; finish it first"
            )
        start = time.monotonic()
        partial = path_of(self._folder, step).with_suffix(".partial")
        if dist.get_rank() == 0:
            with disk_errors(partial):
                for left_by_a_crash in self._folder.glob("*.partial"):
                    shutil.rmtree(left_by_a_crash)
                partial.mkdir(parents=True)
        self._control.wait_for_all()
        state = _state(learners, objective, loading=False)
        state["step"] = step
        if (lora := learners[0].model.lora) is not None:
            state["base"] = lora.base
        state["rng"] = torch.get_rng_state()
        if objective is not None:
            state["objective"] = json.dumps(objective.state_dict())
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), _replicas())
        request = dist_checkpointing.save(state, str(partial), strategy, async_sharded_save=True, **_STRATEGY)
        writing = Writing(request, partial)
        self._pending = _Pending(step, score, writing, time.monotonic() - start)

    def finish(self, wait: bool) -> int | None:
        """Publish what was begun, once every rank has written its part; its step, or None when there is nothing yet.

        Raises RunError when a rank could not write.
        """
        if self._pending is None:
            return None
        pending = self._pending
        if not all(self._control.gather(pending.writing.done(wait))):
            return None
        self._pending = None
        start = time.monotonic()
        target = path_of(self._folder, pending.step)
        errors = self._control.gather(pending.writing.error)
        if told := [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]:
            raise RunError(f"{target}: the checkpoint could not be written: {'; '.join(told)}")
        pending.writing.finalize()
        sums = self._control.gather(pending.writing.checksums)
        if dist.get_rank() == 0:
            known = {name: value for part in sums for name, value in part.items()}
            so_far = pending.begin_seconds + pending.writing.seconds
            with disk_errors(target):
                manifest.write(pending.writing.folder, pending.step, pending.score, known, so_far)
                if self._owner is not None:
                    self._owner.check()
                publish(pending.writing.folder, target)
                self._prune()
        here = pending.begin_seconds + pending.writing.seconds + time.monotonic() - start
        self.seconds = max(self._control.gather(here))  # a barrier, too
        return pending.step

    def _prune(self) -> None:
        present = steps(self._folder)
        scores = {s: manifest.score(path_of(self._folder, s)) for s in present}
        scored = [(score, s) for s, score in scores.items() if score is not None]
        kept = {*present[-self._keep :], *([max(scored)[1]] if scored else [])}
        for step in present:
            if step not in kept:  # first its name: half of a checkpoint is none
                going = path_of(self._folder, step).with_suffix(".partial")
                path_of(self._folder, step).rename(going)
                shutil.rmtree(going)

    def load(self, learners: Sequence[Learner], objective: Objective | None = None) -> int:
        """Load the newest checkpoint into models and optimizers; its step, or 0 when there is none.

        Raises RunError that names the file which is missing or has changed, and for another model's checkpoint.
        """
        found = steps(self._folder)
        if not found:
            return 0
        path = path_of(self._folder, found[-1])
        _verify(path, found)
        state = _loaded(_state(learners, objective, loading=True), path)
        if (lora := learners[0].model.lora) is not None and state["base"] != lora.base:
            raise RunError(
                f"{path}: its adapters were trained beside other weights than those of model.path; give model.path "
                "the folder that the run began with"
            )
        for learner, part in zip(learners, (state, state.get("critic", {})), strict=False):
            learner.model.load_state_dict(part["model"])
            learner.optimizer.load_state_dict(part["optimizer"])
        torch.set_rng_state(state["rng"])
        if objective is not None and "objective" in state:
            objective.load_state_dict(json.loads(state["objective"]))
            objective.load_average_totals(state.get("averages", {}))
        self.seconds = manifest.seconds(path)
        return int(state["step"])


def _verify(path: Path, found: list[int]) -> None:
    """Every rank reads its share of the files. Raises RunError on all of them when one is damaged."""
    wrong: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(wrong, manifest.damaged(path, dist.get_rank(), dist.get_world_size()))
    if told := sorted({name for part in wrong for name in part}):
        rest = f"; the one before it is of step {found[-2]}" if len(found) > 1 else ""
        raise RunError(
            f"{path}: the checkpoint is damaged: {'; '.join(told)}. Delete it to do without it{rest}"
        )
