"""Stacking of all experts of a layer into one tensor, for families that store them so (rules.Stack)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.rules import Stack
from rlsys.convert.table import slots


def stack_experts(tensors: Iterable[tuple[str, Tensor]], hf: HFConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, experts stacked as in the family's folders. Holds one layer's experts at a time."""
    slot_of = slots(hf)
    incomplete: dict[str, dict[tuple[int, int], Tensor]] = {}
    for name, tensor in tensors:
        if (slot := slot_of.get(name)) is None:
            yield name, tensor
            continue
        received, parts = incomplete.setdefault(slot.name, {}), len(slot.stack.parts)
        received[slot.expert, slot.part] = tensor
        if len(received) == parts * hf.experts:
            del incomplete[slot.name]
            parts_of_experts = ([received[expert, i] for i in range(parts)] for expert in range(hf.experts))
            yield (
                slot.name,
                torch.stack([join_parts(of_expert, slot.stack) for of_expert in parts_of_experts]),
            )
    if incomplete:
        raise ValueError(f"{next(iter(incomplete))}: experts are missing; expected all experts of the layer")


def join_parts(parts: list[Tensor], stack: Stack) -> Tensor:
    """Join the parts of an expert: n tensors `[out, in]` -> `[in, n out]`; n biases `[out]` -> `[n out]`."""
    transposed = [part.t() if part.dim() == 2 else part for part in parts]
    return torch.stack(transposed, dim=-1).flatten(-2) if stack.interleaved else torch.cat(transposed, dim=-1)


def part_of(expert: Tensor, part: int, stack: Stack) -> Tensor:
    """Return one part of an expert: the inverse of join_parts."""
    parts = len(stack.parts)
    section = expert[..., part::parts] if stack.interleaved else expert.chunk(parts, dim=-1)[part]
    return (section.t() if section.dim() == 2 else section).contiguous()
