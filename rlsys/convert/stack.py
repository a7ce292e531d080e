"""All experts of a layer in one tensor, where a family's folders and engines hold them so (rules.Stack)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.rules import Stack
from rlsys.convert.table import slots


def stacked(tensors: Iterable[tuple[str, Tensor]], hf: HFConfig) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, experts stacked as the family's folders have them. Holds one layer's experts at a time."""
    places = slots(hf)
    waiting: dict[str, dict[tuple[int, int], Tensor]] = {}
    for name, tensor in tensors:
        if (slot := places.get(name)) is None:
            yield name, tensor
            continue
        held, parts = waiting.setdefault(slot.name, {}), len(slot.stack.parts)
        held[slot.expert, slot.part] = tensor
        if len(held) == parts * hf.experts:
            del waiting[slot.name]
            each = ([held[expert, i] for i in range(parts)] for expert in range(hf.experts))
            yield slot.name, torch.stack([put_together(of_expert, slot.stack) for of_expert in each])
    if waiting:
        raise ValueError(f"not all experts came for {next(iter(waiting))}")


def put_together(parts: list[Tensor], stack: Stack) -> Tensor:
    """n tensors `[out, in]` -> `[in, n out]`; n biases `[out]` -> `[n out]`."""
    turned = [part.t() if part.dim() == 2 else part for part in parts]
    return torch.stack(turned, dim=-1).flatten(-2) if stack.interleaved else torch.cat(turned, dim=-1)


def part_of(expert: Tensor, part: int, stack: Stack) -> Tensor:
    """The inverse of put_together, for one part."""
    parts = len(stack.parts)
    found = expert[..., part::parts] if stack.interleaved else expert.chunk(parts, dim=-1)[part]
    return (found.t() if found.dim() == 2 else found).contiguous()
