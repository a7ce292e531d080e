"""Checkpoints: one folder per step, in megatron's torch_dist format, which any parallel layout can load.

checkpoints/step-000010/     always complete: written as .partial, then renamed
    manifest.json            step, evaluation score, SHA-256 of every other file; checked before anything is loaded

A save copies this rank's tensors to the CPU and writes them in a thread while training continues; `finish` publishes
them. If the process is killed before that, the previous checkpoint stays the newest.
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
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
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
from rlsys.trainer.checkpoints.background import TensorWrite
from rlsys.trainer.control import Control
from rlsys.trainer.model.chunks import MTP, Chunks

_CRITIC = "critic."
"""Prefix of the keys of a critic's weights."""
_NAME = re.compile(r"step-(\d+)")

# Any layout can load the optimizer's state only when it is stored by parameter, not by flat buffer.
# Each rank stores its own shards (megatron_patches/optimizer_local_shards.py).
_OPTIMIZER = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}

# megatron-core 0.19 has two writers, and the default one needs a package that may not be installed.
_STRATEGY = (
    {"async_strategy": "mcore"} if "async_strategy" in signature(dist_checkpointing.save).parameters else {}
)

# Errors that Megatron and torch raise when a checkpoint of another model is loaded.
_LOAD_ERRORS = (
    CheckpointingException, CheckpointException, OSError, RuntimeError, ValueError, EOFError, KeyError,
    pickle.UnpicklingError,
)  # fmt: skip


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)))


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint, not a Hugging Face folder."""
    return (path / ".metadata").is_file()


def load_weights(path: Path, model: Chunks) -> None:
    """Load the model, without MTP layers, from a checkpoint that `rlsys convert` wrote.

    Raises:
        RunError: A file is missing or changed, or the checkpoint belongs to another model.
        UserError: A tensor of the checkpoint has a type that is not allowed for weights.
    """
    _verify(path, [])
    reader = DistReader(path)
    reader.check_types(reader.shapes)
    shards = {
        chunk: {name: shard for name, shard in weights.items() if not name.startswith(MTP)}
        for chunk, weights in model.sharded_state_dict().items()
    }
    model.load_state_dict(_load_state({"model": shards}, path)["model"], ignore_prefix=MTP)


def _load_state(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Load the tensors that `state` describes.

    DistReader checks the files first, because torch's own reader unpickles any object.

    Raises:
        RunError: The checkpoint contains another object than a tensor, or belongs to another model.
    """
    requested_objects = {part.unique_key for part in nested_values(state) if isinstance(part, ShardedObject)}
    if objects := sorted(DistReader(path).objects - requested_objects):
        raise RunError(f"{path}: contains {objects[0]} as a pickled object; expected a tensor")
    try:
        strategy = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(path)), _replica_group()
        )
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(path), strategy)
    except _LOAD_ERRORS as e:
        reason = " ".join(str(e).split())[-300:]
        raise RunError(f"{path}: the checkpoint cannot be loaded: {type(e).__name__}: {reason}") from e
    return loaded


def _replica_group() -> dist.ProcessGroup:
    """Return the group of ranks with the same weights, which divide writing and reading among themselves."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


@dataclass(frozen=True)
class Learner:
    """Model of this rank and its Megatron optimizer.

    Of a model with adapters, a checkpoint stores only the adapters and the fingerprint of the base model.
    """

    model: Chunks
    optimizer: Any


def _state(learners: Sequence[Learner], objective: Objective | None, loading: bool) -> dict[str, Any]:
    """Describe the state of the policy, its critic if it has one, and the objective's averages for Megatron.

    Keys of the critic start with `critic.`, because its parameters have the names of the policy's.
    """
    model, state = learners[0].model, _learner_state(learners[0], "", loading)
    for critic in learners[1:]:
        state["critic"] = _learner_state(critic, _CRITIC, loading)
    if objective is not None and (totals := objective.average_totals(model.named_parameters())):
        state["averages"] = {prefix: _shard_like_weights(model, prefix, t) for prefix, t in totals.items()}
    return state


def _learner_state(learner: Learner, prefix: str, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"model": learner.model.sharded_state_dict()}
    if prefix:
        add_prefix_for_sharding(state, prefix)
    state["optimizer"] = learner.optimizer.sharded_state_dict(state, is_loading=loading, metadata=_OPTIMIZER)
    return state


def _shard_like_weights(model: Chunks, prefix: str, totals: dict[str, Tensor]) -> dict[str, Any]:
    """Return sharded tensors of the averages, with the sharding of the weights, so that any layout can load them.

    Args:
        model: Model whose weights define the sharding.
        prefix: Prefix of the averages' keys in the checkpoint.
        totals: Parameter name -> this rank's average.

    Returns:
        Parameter name -> sharded tensor.
    """
    weight_shards = model.shards(prefix)
    shards = {}
    for name, value in totals.items():
        shard = weight_shards[name]
        # A ShardedTensorFactory has no dtype.
        dtype = {"dtype": value.dtype} if isinstance(shard, ShardedTensor) else {}
        shards[name] = replace(shard, data=value, **dtype)
    return shards


@dataclass
class _Pending:
    """A started save. `begin_seconds`: duration of the copy to host memory."""

    step: int
    score: float | None
    write: TensorWrite
    begin_seconds: float


class Checkpoints:
    """Owner of a run's checkpoint folder. All methods are collective.

    Args:
        folder: The checkpoint folder.
        keep: Number of newest checkpoints to keep, besides the one with the best score (for example held-out
            accuracy).
        control: Control group of the ranks.
        owner: This launch's ownership of the run. If a later launch owns the run, `finish` publishes nothing and
            raises FencedError. None: no other process writes to the folder.
    """

    def __init__(self, folder: Path, keep: int, control: Control, owner: Owner | None = None) -> None:
        self._owner = owner
        self._folder = folder
        self._keep = keep
        self._control = control
        self._pending: _Pending | None = None
        self.seconds = 0.0
        """Seconds that the last save took on the slowest rank, in this session or an earlier one; 0: unknown."""

    def begin(
        self,
        step: int,
        learners: Sequence[Learner],
        objective: Objective | None = None,
        score: float | None = None,
    ) -> None:
        """Copy the state and start to write it. The checkpoint is valid after `finish` has returned its step.

        Args:
            step: Number of completed train steps.
            learners: The policy, then its critic if it has one.
            objective: Objective whose state the checkpoint contains.
            score: Evaluation score of these weights; None: not evaluated.

        Raises:
            ValueError: A started checkpoint is not finished.
        """
        if self._pending is not None:
            raise ValueError(
                f"the checkpoint of step {self._pending.step} is still being written; call finish first"
            )
        start = time.monotonic()
        partial = path_of(self._folder, step).with_suffix(".partial")
        if dist.get_rank() == 0:
            with disk_errors(partial):
                for stale in self._folder.glob("*.partial"):
                    shutil.rmtree(stale)
                partial.mkdir(parents=True)
        self._control.wait_for_all()
        state = _state(learners, objective, loading=False)
        state["step"] = step
        if (lora := learners[0].model.lora) is not None:
            state["base"] = lora.base
        state["rng"] = torch.get_rng_state()
        if objective is not None:
            state["objective"] = json.dumps(objective.state_dict())
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), _replica_group())
        request = dist_checkpointing.save(state, str(partial), strategy, async_sharded_save=True, **_STRATEGY)
        writing = TensorWrite(request, partial)
        self._pending = _Pending(step, score, writing, time.monotonic() - start)

    def finish(self, wait: bool) -> int | None:
        """Publish the started checkpoint if every rank has written its part.

        Args:
            wait: Whether to wait for ranks that are still writing.

        Returns:
            The step of the checkpoint; None if no save was started, or if a rank is still writing.

        Raises:
            RunError: A rank could not write its part.
        """
        if self._pending is None:
            return None
        pending = self._pending
        if not all(self._control.gather(pending.write.is_done(wait))):
            return None
        self._pending = None
        start = time.monotonic()
        target = path_of(self._folder, pending.step)
        errors = self._control.gather(pending.write.error)
        if messages := [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]:
            raise RunError(f"{target}: the checkpoint could not be written: {'; '.join(messages)}")
        pending.write.finalize()
        rank_checksums = self._control.gather(pending.write.checksums)
        if dist.get_rank() == 0:
            self._publish(
                pending, target, {file: value for part in rank_checksums for file, value in part.items()}
            )
        seconds = pending.begin_seconds + pending.write.seconds + time.monotonic() - start
        self.seconds = max(self._control.gather(seconds))  # also a barrier
        return pending.step

    def _publish(self, pending: _Pending, target: Path, checksums: dict[str, str]) -> None:
        """Write the manifest, rename the folder to `target`, and delete checkpoints that are not kept."""
        write_seconds = pending.begin_seconds + pending.write.seconds
        with disk_errors(target):
            manifest.write(pending.write.folder, pending.step, pending.score, checksums, write_seconds)
            if self._owner is not None:
                self._owner.check()
            publish(pending.write.folder, target)
            self._prune()

    def _prune(self) -> None:
        """Delete all checkpoints except the newest `keep` and the one with the best score."""
        present = steps(self._folder)
        retained = set(present[-self._keep :])
        scores = {step: manifest.score(path_of(self._folder, step)) for step in present}
        if scored := [(score, step) for step, score in scores.items() if score is not None]:
            retained.add(max(scored)[1])
        for step in present:
            if step not in retained:
                # Renamed first: a partly deleted checkpoint must not look complete.
                partial = path_of(self._folder, step).with_suffix(".partial")
                path_of(self._folder, step).rename(partial)
                shutil.rmtree(partial)

    def load(self, learners: Sequence[Learner], objective: Objective | None = None) -> int:
        """Load the newest checkpoint into models and optimizers, and return its step; 0 if there is none.

        Raises:
            RunError: A file is missing or changed, or the checkpoint belongs to another model.
        """
        available = steps(self._folder)
        if not available:
            return 0
        path = path_of(self._folder, available[-1])
        _verify(path, available)
        state = _load_state(_state(learners, objective, loading=True), path)
        if (lora := learners[0].model.lora) is not None and state["base"] != lora.base:
            raise RunError(
                f"{path}: its adapters were trained with another base model than model.path; set model.path to the "
                "folder with which the run started"
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


def _verify(path: Path, available: list[int]) -> None:
    """Compare the checksums of all files with the manifest; each rank reads a part of the files. Collective.

    Args:
        path: The checkpoint.
        available: Steps of the checkpoints from which the run could resume, for the advice in the error.

    Raises:
        RunError: A file is missing or changed; raised on all ranks.
    """
    damage: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(damage, manifest.find_damage(path, dist.get_rank(), dist.get_world_size()))
    if messages := sorted({name for part in damage for name in part}):
        hint = (
            f" and resume from step {available[-2]}"
            if len(available) > 1
            else " and start from the beginning"
        )
        raise RunError(
            f"{path}: the checkpoint is damaged: {'; '.join(messages)}; delete the folder to discard it{hint}"
        )
