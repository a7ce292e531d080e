"""How a full Megatron parameter is cut over (expert) tensor-parallel ranks, and put together again."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch import Tensor

from rlsys.convert.families import Rule


def _group(rule: Rule) -> torch.distributed.ProcessGroup:
    if rule.per_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def shard(full: Tensor, rule: Rule) -> Tensor:
    """This rank's part. gate_up is cut within gate and within up, so that a rank holds matching halves."""
    if rule.cut is None or (group := _group(rule)).size() == 1:
        return full
    halves = full.chunk(2, dim=rule.cut) if rule.layout == "gate_up" else (full,)
    return torch.cat([h.chunk(group.size(), dim=rule.cut)[group.rank()] for h in halves], dim=rule.cut)


def unshard(part: Tensor, rule: Rule) -> Tensor:
    """The full parameter, on every rank of the group. Collective."""
    if rule.cut is None or (group := _group(rule)).size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    torch.distributed.all_gather(parts, part.contiguous(), group=group)
    if rule.layout != "gate_up":
        return torch.cat(parts, dim=rule.cut)
    gates, ups = zip(*(p.chunk(2, dim=rule.cut) for p in parts), strict=True)
    return torch.cat([*gates, *ups], dim=rule.cut)
