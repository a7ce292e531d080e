"""This rank's parameters from Hugging Face tensors, and full Hugging Face tensors from all ranks' parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn import Parameter

from rlsys.convert.hf import HFConfig, HFTensors
from rlsys.convert.layout import Entry, check_names, entries, to_hf, to_megatron
from rlsys.errors import UserError
from rlsys.trainer.shards import shard, unshard

# The Transformer Engine spec fuses a norm into the linear layer behind it.
_TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


class LocalParameters:
    """The parameters of one rank, found by the entries of the name table."""

    def __init__(self, model: GPTModel, hf: HFConfig) -> None:
        self._by_name = dict(model.named_parameters())
        self._experts = hf.experts // parallel_state.get_expert_model_parallel_world_size()

    @property
    def names(self) -> set[str]:
        return set(self._by_name)

    def owner(self, entry: Entry) -> int | None:
        """Expert-parallel rank that holds it; None when all ranks do."""
        return None if entry.expert is None else entry.expert // self._experts

    def name(self, entry: Entry) -> str:
        """Its name on the rank that owns it."""
        name = entry.megatron.format(e=None if entry.expert is None else entry.expert % self._experts)
        if name in self._by_name:
            return name
        head, fused = next(
            ((name.removesuffix(plain), te) for plain, te in _TE_NAMES.items() if name.endswith(plain)),
            (name, ""),
        )
        return head + fused

    def __getitem__(self, name: str) -> Parameter:
        return self._by_name[name]


def load_hf(model: GPTModel, folder: Path, hf: HFConfig) -> None:
    """Fill this rank's parameters from `folder`, tensor by tensor.

    Raises UserError that names a missing, unknown or mis-shaped tensor.
    """
    tensors = HFTensors(folder, hf)
    check_names(hf, tensors.names, str(folder))
    local = LocalParameters(model, hf)
    rank, filled = parallel_state.get_expert_model_parallel_rank(), set()
    for entry in entries(hf):
        if local.owner(entry) not in (None, rank):
            continue
        full = to_megatron(entry.rule, [tensors.read(n, shape) for n, shape in entry.hf.items()], hf)
        name = local.name(entry)
        parameter = local[name]
        with torch.no_grad():
            parameter.copy_(shard(full, entry.rule))
        if entry.rule.cut is not None and not hasattr(parameter, "tensor_model_parallel"):
            # Megatron marks shards when it initialises them, which we skip; unmarked ones count as copies in
            # the gradient norm.
            set_tensor_model_parallel_attributes(parameter, True, entry.rule.cut, 1)
        filled.add(name)
    if rest := sorted(local.names - filled):
        raise UserError(f"{folder}: the name table fills no {rest[0]} (and {len(rest) - 1} more)")


def gather_hf(model: GPTModel, hf: HFConfig) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor), experts one by one, always in the same order. Collective: every rank iterates.

    A tensor may be a view of a parameter: use it before the next optimizer step.
    """
    local = LocalParameters(model, hf)
    group = parallel_state.get_expert_model_parallel_group()
    for entry in entries(hf):
        part = local[local.name(entry)].detach()
        owner = local.owner(entry)
        if owner is not None and group.size() > 1:
            # Experts have one shape everywhere, so this rank's own is the mould for another's.
            part = part if owner == group.rank() else torch.empty_like(part)
            dist.broadcast(part, src=dist.get_global_rank(group, owner), group=group)
        full = unshard(part, entry.rule)
        yield from zip(entry.hf, to_hf(entry.rule, full, hf), strict=True)
