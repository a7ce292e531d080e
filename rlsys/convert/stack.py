"""All experts of a layer in one tensor, where a family's folders and engines hold them so (rules.Stack)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlsys.convert.config import HFConfig
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
            yield slot.name, torch.stack([interleave(of_expert) for of_expert in each])
    if waiting:
        raise ValueError(f"not all experts came for {next(iter(waiting))}")


def interleave(parts: list[Tensor]) -> Tensor:
    """n tensors `[out, in]` -> `[in, n out]`; n biases `[out]` -> `[n out]`."""
    return torch.stack([part.t() if part.dim() == 2 else part for part in parts], dim=-1).flatten(-2)


def part_of(expert: Tensor, part: int, parts: int) -> Tensor:
    """The inverse of interleave, for one part."""
    found = expert[..., part::parts]
    return (found.t() if found.dim() == 2 else found).contiguous()
