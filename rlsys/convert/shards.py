"""How a full Megatron parameter is cut over (expert) tensor-parallel ranks, and put together again."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch import Tensor

from rlsys.convert.families import Layout, Rule

_COLUMN = ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1")
_ROW = ("linear_proj", "linear_fc2")


def shard_axis(rule: Rule, name: str) -> tuple[int, bool] | None:
    """(axis, whether it is cut by the experts' tensor-parallel group); None for a replicated parameter."""
    expert = ".experts." in name
    if any(part in name for part in _COLUMN):
        return 0, expert
    if any(part in name for part in _ROW):
        return 1, expert
    return None


def _group(expert: bool) -> torch.distributed.ProcessGroup:
    if expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def shard(full: Tensor, axis: tuple[int, bool] | None, layout: Layout) -> Tensor:
    """This rank's part. gate_up is cut within gate and within up, so that a rank holds matching halves."""
    if axis is None:
        return full
    group = _group(axis[1])
    if group.size() == 1:
        return full
    if layout == "gate_up":
        return torch.cat(
            [h.chunk(group.size(), dim=axis[0])[group.rank()] for h in full.chunk(2, dim=axis[0])]
        )
    return full.chunk(group.size(), dim=axis[0])[group.rank()]


def unshard(part: Tensor, axis: tuple[int, bool] | None, layout: Layout) -> Tensor:
    """The full parameter, on every rank of the group. Collective."""
    if axis is None or (group := _group(axis[1])).size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    torch.distributed.all_gather(parts, part.contiguous(), group=group)
    if layout == "gate_up":
        halves = [p.chunk(2, dim=axis[0]) for p in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves], dim=axis[0])
    return torch.cat(parts, dim=axis[0])
