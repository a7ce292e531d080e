"""Transfer between this rank's parameters and full Hugging Face tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.hf import HFTensors
from rlsys.convert.layout import sections, to_hf, to_megatron
from rlsys.convert.rules import Rule
from rlsys.convert.table import Entry, entries
from rlsys.core.errors import UserError
from rlsys.trainer.model.chunks import Chunks

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""Norms that the Transformer Engine spec fuses into the next linear layer, if there is one. Checkpoints have the same
names with both specs."""


_EXPERT = re.compile(r"local_experts\.(\d+)\.(\w+)\.(weight|bias)$")


def te_name(plain: str) -> str:
    """Return the Transformer Engine name of a parameter: a norm fused into the next layer, experts grouped."""
    for end, fused in TE_NAMES.items():
        if plain.endswith(end):
            return plain.removesuffix(end) + fused
    return _EXPERT.sub(r"\2.\3\1", plain)


class LocalWeights:
    """Weights of one rank, by the entries of the name table, and the owner of each weight. Collective."""

    def __init__(self, model: Chunks, hf: HFConfig, *, merge: bool = True) -> None:
        self._by_name = dict(model.named_weights())
        self._lora = model.lora if merge else None
        self._tied = hf.tied
        self._experts = hf.experts // parallel_state.get_expert_model_parallel_world_size()
        self.pp_group = parallel_state.get_pipeline_model_parallel_group()
        dtypes = {name: weight.dtype for name, weight in self._by_name.items()}
        self._stages: list[dict[str, torch.dtype]] = [{} for _ in range(self.pp_group.size())]
        dist.all_gather_object(self._stages, dtypes, group=self.pp_group)

    @property
    def names(self) -> set[str]:
        return set(self._by_name)

    def owner(self, entry: Entry) -> int | None:
        """Return the expert-parallel rank that holds the entry; None if all ranks do."""
        return None if entry.expert is None else entry.expert // self._experts

    def locate(self, entry: Entry) -> tuple[int, str, torch.dtype]:
        """Return the pipeline stage, the name on the owning rank and the dtype.

        Raises:
            UserError: no rank has the entry.
        """
        names = self.candidates(entry)
        for stage, dtypes in enumerate(self._stages):
            for name in names:
                if name in dtypes:
                    return stage, name, dtypes[name]
        raise UserError(f"{', '.join(entry.hf)}: the model has no parameter {names[0]} for it")

    def candidates(self, entry: Entry) -> tuple[str, str]:
        """Return the possible names on the owning rank: of the local spec and of Transformer Engine."""
        plain = entry.megatron.format(e=None if entry.expert is None else entry.expert % self._experts)
        return plain, te_name(plain)

    def local_names(self, entry: Entry) -> list[str]:
        """Return the names under which this rank holds the entry or a part of it."""
        stage, name, _ = self.locate(entry)
        names = [name] if stage == self.pp_group.rank() else []
        if self._tied and name == _EMBEDDING and _HEAD in self:
            names.append(_HEAD)  # the last stage's copy; Megatron sums the gradients of both
        if name == _EMBEDDING and not names and name in self:
            names.append(name)  # the copy of a stage with an MTP layer
        owned = self.owner(entry) in (None, parallel_state.get_expert_model_parallel_rank())
        return names if owned else []

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Tensor:
        return self._by_name[name]

    def merged(self, name: str) -> Tensor:
        """Return the effective weight without a gradient: with its adapter if `merge` is set."""
        weight = self._by_name[name].detach()
        return weight if self._lora is None else self._lora.merged(name, weight)


def load_hf(model: Chunks, folder: Path, hf: HFConfig) -> None:
    """Load this rank's weights from `folder`, tensor by tensor. Collective.

    Raises:
        UserError: a tensor is missing, unknown or has another shape; the message names it.
    """
    loaded = fill(model, hf, entries(hf), HFTensors(folder, hf).read)
    if unfilled := sorted(LocalWeights(model, hf).names - loaded):
        raise UserError(
            f"{folder}: no tensor for the parameter {unfilled[0]} (and {len(unfilled) - 1} more); expected one for "
            "each"
        )


def fill(model: Chunks, hf: HFConfig, table: Iterable[Entry], read: Callable[[str], Tensor]) -> set[str]:
    """Load this rank's weights of these entries with the tensors that `read` returns. Collective.

    Returns Megatron's names of the weights.
    """
    local, loaded = LocalWeights(model, hf), set()
    for entry in table:
        if not (names := local.local_names(entry)):
            continue
        full = to_megatron(entry.rule, [read(part) for part in entry.hf], hf)
        for name in names:
            weight = local[name]
            with torch.no_grad():
                weight.copy_(shard(full, entry.rule))
            loaded.add(name)
    return loaded


def mark_shards(model: Chunks, hf: HFConfig) -> None:
    """Mark the weights that are shards, so that Megatron includes all of them in the gradient norm. Collective.

    Megatron counts unmarked weights as copies. It marks shards when it initialises weights, which rlsys skips.
    """
    local = LocalWeights(model, hf)
    for entry in entries(hf):
        for name in local.local_names(entry):
            weight = local[name]
            # No two tensor-parallel ranks have the same expert and tokens, even if a parameter is not sharded, like
            # its second bias, which Megatron would count on the first rank only.
            part = entry.rule.shard_axis is not None or entry.expert is not None
            if part and not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, True, entry.rule.shard_axis or 0, 1)


def gather_hf(
    model: Chunks, hf: HFConfig, table: Iterable[Entry] | None = None, *, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor), experts one by one, always in the same order, on every rank. Collective.

    `table`: requested entries; None: all of the name table. `merge`: merge adapters. One parameter at a time: no rank
    holds more than its own part and one whole parameter. A tensor may be a view of a parameter: use it before the
    next optimizer step.
    """
    local = LocalWeights(model, hf, merge=merge)
    for entry in entries(hf) if table is None else table:
        stage, name, dtype = local.locate(entry)
        if stage == local.pp_group.rank():
            tensors = to_hf(entry.rule, _gather_parameter(local, entry, name), hf)
        else:
            device = next(model.named_parameters())[1].device
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape in entry.hf.values()]
        if local.pp_group.size() > 1:
            tensors = [t.contiguous() for t in tensors]
            for tensor in tensors:
                dist.broadcast(tensor, dist.get_global_rank(local.pp_group, stage), local.pp_group)
        yield from zip(entry.hf, tensors, strict=True)


def _gather_parameter(local: LocalWeights, entry: Entry, name: str) -> Tensor:
    """Gather the full parameter from all ranks of this pipeline stage. Collective."""
    group = parallel_state.get_expert_model_parallel_group()
    owner = local.owner(entry)
    # Experts have the same shape on all ranks, so this rank's expert gives the buffer's shape.
    is_owner = owner in (None, group.rank())
    part = local.merged(name) if is_owner else torch.empty_like(local[name])
    if owner is not None and group.size() > 1:
        dist.broadcast(part, src=dist.get_global_rank(group, owner), group=group)
    return unshard(part, entry.rule)


def cutting_group(rule: Rule) -> torch.distributed.ProcessGroup:
    if rule.per_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def shard(full: Tensor, rule: Rule) -> Tensor:
    """Return this rank's part of each section of the parameter (rlsys.convert.layout)."""
    if rule.shard_axis is None or (group := cutting_group(rule)).size() == 1:
        return full
    parts = full.chunk(sections(rule), dim=rule.shard_axis)
    return torch.cat(
        [s.chunk(group.size(), dim=rule.shard_axis)[group.rank()] for s in parts], dim=rule.shard_axis
    )


def unshard(part: Tensor, rule: Rule) -> Tensor:
    """Gather the full parameter on every rank of the group. Collective."""
    if rule.shard_axis is None or (group := cutting_group(rule)).size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    torch.distributed.all_gather(parts, part.contiguous(), group=group)
    return join_shards(parts, rule)


def join_shards(parts: list[Tensor], rule: Rule) -> Tensor:
    """Join the parts of all ranks that share a parameter, in rank order."""
    if rule.shard_axis is None or len(parts) == 1:
        return parts[0]
    of_ranks = (p.chunk(sections(rule), dim=rule.shard_axis) for p in parts)
    return torch.cat([p for section in zip(*of_ranks, strict=True) for p in section], dim=rule.shard_axis)
