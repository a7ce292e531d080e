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
"""Names in Transformer Engine's layers of norms that they fuse into the next linear layer, by Megatron's name. If a
model has no such linear layer, the norm keeps its name. Checkpoints always have Transformer Engine's names."""


_EXPERT = re.compile(r"local_experts\.(\d+)\.(\w+)\.(weight|bias)$")


def te_name(plain: str) -> str:
    """Return the name in Transformer Engine's layers of a parameter with the name `plain` in Megatron's own."""
    for end, fused in TE_NAMES.items():
        if plain.endswith(end):
            return plain.removesuffix(end) + fused
    return _EXPERT.sub(r"\2.\3\1", plain)


class LocalWeights:
    """Weights of one rank by name, and the location of each entry of the name table among the ranks."""

    def __init__(self, model: Chunks, hf: HFConfig, *, merge: bool = True) -> None:
        """Exchange the names of the weights between pipeline stages. Collective.

        Args:
            model: This rank's model chunks.
            hf: The model's configuration.
            merge: Whether `merged` adds adapters.
        """
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
        """Names of this rank's weights."""
        return set(self._by_name)

    def owner(self, entry: Entry) -> int | None:
        """Return the expert-parallel rank that holds the entry; None if all ranks hold it."""
        return None if entry.expert is None else entry.expert // self._experts

    def locate(self, entry: Entry) -> tuple[int, str, torch.dtype]:
        """Return the entry's pipeline stage, its name on the rank that owns it, and its dtype.

        Raises:
            UserError: No rank has the entry.
        """
        names = self.candidates(entry)
        for stage, dtypes in enumerate(self._stages):
            for name in names:
                if name in dtypes:
                    return stage, name, dtypes[name]
        raise UserError(
            f"{', '.join(entry.hf)}: expected the parameter {names[0]}, which the built model lacks"
        )

    def candidates(self, entry: Entry) -> tuple[str, str]:
        """Return the names on the rank that owns the entry in Megatron's own and Transformer Engine's layers."""
        plain = entry.megatron.format(e=None if entry.expert is None else entry.expert % self._experts)
        return plain, te_name(plain)

    def local_names(self, entry: Entry) -> list[str]:
        """Return the names of this rank's weights that contain the entry or a part of it; empty: it has none."""
        stage, name, _ = self.locate(entry)
        names = [name] if stage == self.pp_group.rank() else []
        if self._tied and name == _EMBEDDING and _HEAD in self:
            names.append(_HEAD)  # the last stage's copy; Megatron sums the gradients of both copies
        if name == _EMBEDDING and not names and name in self:
            names.append(name)  # the copy of a stage with an MTP layer
        owned = self.owner(entry) in (None, parallel_state.get_expert_model_parallel_rank())
        return names if owned else []

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Tensor:
        return self._by_name[name]

    def merged(self, name: str) -> Tensor:
        """Return a weight without gradient, with its adapter merged if `merge` is set."""
        weight = self._by_name[name].detach()
        return weight if self._lora is None else self._lora.merged(name, weight)


def load_hf(model: Chunks, folder: Path, hf: HFConfig) -> None:
    """Load this rank's weights from a Hugging Face folder, tensor by tensor. Collective.

    Raises:
        UserError: A tensor is missing, unknown or has another shape than the model's.
    """
    loaded = fill(model, hf, entries(hf), HFTensors(folder, hf).read)
    if unfilled := sorted(LocalWeights(model, hf).names - loaded):
        raise UserError(
            f"{folder}: {len(unfilled)} parameters of the model have no tensor, first: {unfilled[0]}; expected a "
            "tensor for each"
        )


def fill(model: Chunks, hf: HFConfig, table: Iterable[Entry], read: Callable[[str], Tensor]) -> set[str]:
    """Load this rank's weights of some entries. Collective.

    Args:
        model: This rank's model chunks.
        hf: The model's configuration.
        table: The entries.
        read: Returns the full tensor with a Hugging Face name.

    Returns:
        Megatron's names of the loaded weights.
    """
    local = LocalWeights(model, hf)
    loaded: set[str] = set()
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
    """Mark the weights that are shards, so that Megatron includes all shards in the gradient norm. Collective.

    Megatron regards unmarked weights as copies. Its initialisation of weights, which rlsys skips, would mark shards.
    """
    local = LocalWeights(model, hf)
    for entry in entries(hf):
        for name in local.local_names(entry):
            weight = local[name]
            # No two tensor-parallel ranks have the same expert and tokens. This includes an expert's parameters that
            # are not sharded, such as its second bias, which Megatron would count only on the first rank.
            is_part = entry.rule.shard_axis is not None or entry.expert is not None
            if is_part and not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, True, entry.rule.shard_axis or 0, 1)


def gather_hf(
    model: Chunks, hf: HFConfig, table: Iterable[Entry] | None = None, *, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) on every rank. Collective.

    Each expert has its own tensors. A rank holds only its own weights and one full parameter at a time. A tensor may
    be a view of a parameter: it is valid until the next optimizer step.

    Args:
        model: This rank's model chunks.
        hf: The model's configuration.
        table: Entries to gather, in this order; None: the whole name table.
        merge: Whether to merge adapters.
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


def shard_group(rule: Rule) -> torch.distributed.ProcessGroup:
    """Return the group of ranks that shard parameters with this rule."""
    if rule.per_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def shard(full: Tensor, rule: Rule) -> Tensor:
    """Return this rank's part of a full parameter: its part of each section (rlsys.convert.layout)."""
    if rule.shard_axis is None or (group := shard_group(rule)).size() == 1:
        return full
    parts = full.chunk(sections(rule), dim=rule.shard_axis)
    return torch.cat(
        [s.chunk(group.size(), dim=rule.shard_axis)[group.rank()] for s in parts], dim=rule.shard_axis
    )


def unshard(part: Tensor, rule: Rule) -> Tensor:
    """Return the full parameter on every rank that has a part of it. Collective."""
    if rule.shard_axis is None or (group := shard_group(rule)).size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    torch.distributed.all_gather(parts, part.contiguous(), group=group)
    return join_shards(parts, rule)


def join_shards(parts: list[Tensor], rule: Rule) -> Tensor:
    """Return the full parameter of the parts in rank order; the inverse of `shard`."""
    if rule.shard_axis is None or len(parts) == 1:
        return parts[0]
    rank_sections = [part.chunk(sections(rule), dim=rule.shard_axis) for part in parts]
    # The full parameter contains the ranks' parts of the first section, then those of the second, and so on.
    sections_in_order = [part for section in zip(*rank_sections, strict=True) for part in section]
    return torch.cat(sections_in_order, dim=rule.shard_axis)
