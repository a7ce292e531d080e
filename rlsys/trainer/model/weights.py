"""This rank's parameters from Hugging Face tensors, and full Hugging Face tensors from all ranks' parameters."""

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
"""The Transformer Engine spec fuses a norm into the linear layer after it, where there is one. Checkpoints have the
same names, whichever spec wrote them."""


_EXPERT = re.compile(r"local_experts\.(\d+)\.(\w+)\.(weight|bias)$")


def te_name(plain: str) -> str:
    """What the Transformer Engine spec calls a parameter: a norm fused into the layer after it, experts grouped."""
    for end, fused in TE_NAMES.items():
        if plain.endswith(end):
            return plain.removesuffix(end) + fused
    return _EXPERT.sub(r"\2.\3\1", plain)


class LocalWeights:
    """The weights of one rank, found by the entries of the name table, and who else holds which. Collective."""

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
        """Expert-parallel rank that holds it; None when all ranks do."""
        return None if entry.expert is None else entry.expert // self._experts

    def place(self, entry: Entry) -> tuple[int, str, torch.dtype]:
        """Its pipeline stage, its name on the rank that owns it, its dtype. Raises UserError when it has none."""
        names = self.candidates(entry)
        for stage, dtypes in enumerate(self._stages):
            for name in names:
                if name in dtypes:
                    return stage, name, dtypes[name]
        raise UserError(f"the model has no parameter {names[0]} for {', '.join(entry.hf)}")

    def candidates(self, entry: Entry) -> tuple[str, str]:
        """What the rank that owns it may call it: by the local spec's name, or by Transformer Engine's."""
        plain = entry.megatron.format(e=None if entry.expert is None else entry.expert % self._experts)
        return plain, te_name(plain)

    def here(self, entry: Entry) -> list[str]:
        """The names under which this rank holds it, or a part of it."""
        stage, name, _ = self.place(entry)
        here = [name] if stage == self.pp_group.rank() else []
        if self._tied and name == _EMBEDDING and _HEAD in self:
            here.append(_HEAD)  # the last stage's copy; megatron sums the gradients of both
        if name == _EMBEDDING and not here and name in self:
            here.append(name)  # the same beside a layer for multi-token prediction
        owned = self.owner(entry) in (None, parallel_state.get_expert_model_parallel_rank())
        return here if owned else []

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Tensor:
        return self._by_name[name]

    def merged(self, name: str) -> Tensor:
        """The weight as it acts, without a gradient: with its adapter, if it has one and is to be merged."""
        weight = self._by_name[name].detach()
        return weight if self._lora is None else self._lora.merged(name, weight)


def load_hf(model: Chunks, folder: Path, hf: HFConfig) -> None:
    """Fill this rank's weights from `folder`, tensor by tensor. Collective.

    Raises UserError that names a missing, unknown or mis-shaped tensor.
    """
    filled = fill(model, hf, entries(hf), HFTensors(folder, hf).read)
    if rest := sorted(LocalWeights(model, hf).names - filled):
        raise UserError(f"{folder}: the name table fills no {rest[0]} (and {len(rest) - 1} more)")


def fill(model: Chunks, hf: HFConfig, table: Iterable[Entry], read: Callable[[str], Tensor]) -> set[str]:
    """Fill this rank's weights of these entries with the tensors that `read` gives; megatron's names of the weights.
    Collective."""
    local, filled = LocalWeights(model, hf), set()
    for entry in table:
        if not (here := local.here(entry)):
            continue
        full = to_megatron(entry.rule, [read(part) for part in entry.hf], hf)
        for name in here:
            weight = local[name]
            with torch.no_grad():
                weight.copy_(shard(full, entry.rule))
            filled.add(name)
    return filled


def mark_shards(model: Chunks, hf: HFConfig) -> None:
    """Tell megatron which weights are parts: the others count as copies in the gradient norm. Collective.

    It does so itself when it initialises weights, which we skip.
    """
    local = LocalWeights(model, hf)
    for entry in entries(hf):
        for name in local.here(entry):
            weight = local[name]
            # No two tensor-parallel ranks have the same expert and tokens, also where they do not cut it: its second
            # bias, which megatron would count on the first of them only.
            part = entry.rule.cut is not None or entry.expert is not None
            if part and not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, True, entry.rule.cut or 0, 1)


def gather_hf(
    model: Chunks, hf: HFConfig, table: Iterable[Entry] | None = None, *, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor), experts one by one, always in the same order, on every rank; adapters merged. Collective.

    `table`: of which entries; when none is given, of all in the name table. `merge`: with adapters in them. One
    parameter at a time: no rank ever holds more than its own part and one whole parameter. A tensor may be a view of
    a parameter: use it before the next optimizer step.
    """
    local = LocalWeights(model, hf, merge=merge)
    for entry in entries(hf) if table is None else table:
        stage, name, dtype = local.place(entry)
        if stage == local.pp_group.rank():
            tensors = to_hf(entry.rule, _whole(local, entry, name), hf)
        else:
            device = next(model.named_parameters())[1].device
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape in entry.hf.values()]
        if local.pp_group.size() > 1:
            tensors = [t.contiguous() for t in tensors]
            for tensor in tensors:
                dist.broadcast(tensor, dist.get_global_rank(local.pp_group, stage), local.pp_group)
        yield from zip(entry.hf, tensors, strict=True)


def _whole(local: LocalWeights, entry: Entry, name: str) -> Tensor:
    """The full parameter from all ranks of this pipeline stage. Collective."""
    group = parallel_state.get_expert_model_parallel_group()
    owner = local.owner(entry)
    # Experts have one shape everywhere, so this rank's own is the mould for another's.
    mine = owner in (None, group.rank())
    part = local.merged(name) if mine else torch.empty_like(local[name])
    if owner is not None and group.size() > 1:
        dist.broadcast(part, src=dist.get_global_rank(group, owner), group=group)
    return unshard(part, entry.rule)


def cutting_group(rule: Rule) -> torch.distributed.ProcessGroup:
    if rule.per_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def shard(full: Tensor, rule: Rule) -> Tensor:
    """This rank's part, of each section of the parameter (rlsys.convert.layout)."""
    if rule.cut is None or (group := cutting_group(rule)).size() == 1:
        return full
    each = full.chunk(sections(rule), dim=rule.cut)
    return torch.cat([s.chunk(group.size(), dim=rule.cut)[group.rank()] for s in each], dim=rule.cut)


def unshard(part: Tensor, rule: Rule) -> Tensor:
    """The full parameter, on every rank of the group. Collective."""
    if rule.cut is None or (group := cutting_group(rule)).size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    torch.distributed.all_gather(parts, part.contiguous(), group=group)
    return join_shards(parts, rule)


def join_shards(parts: list[Tensor], rule: Rule) -> Tensor:
    """The full parameter from the parts of all ranks that share it, in their order."""
    if rule.cut is None or len(parts) == 1:
        return parts[0]
    of_ranks = (p.chunk(sections(rule), dim=rule.cut) for p in parts)
    return torch.cat([p for section in zip(*of_ranks, strict=True) for p in section], dim=rule.cut)
