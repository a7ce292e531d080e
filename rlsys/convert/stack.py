"""Stacking of all experts of a layer into one tensor, for families whose folders do so (rules.Stack)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.rules import Stack
from rlsys.convert.table import slots


def stack_experts(tensors: Iterable[tuple[str, Tensor]], hf: HFConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a model, with experts stacked as in the family's folders.

    The experts of one layer are in memory at once.

    Args:
        tensors: (name in the name table, tensor) of the model.
        hf: The model's configuration.

    Raises:
        ValueError: Some experts of a layer are missing.
    """
    slot_of = slots(hf)
    incomplete: dict[str, dict[tuple[int, int], Tensor]] = {}
    for name, tensor in tensors:
        if (slot := slot_of.get(name)) is None:
            yield name, tensor
            continue
        parts = incomplete.setdefault(slot.name, {})
        parts[slot.expert, slot.part] = tensor
        if len(parts) == len(slot.stack.parts) * hf.experts:
            del incomplete[slot.name]
            yield slot.name, _stack(parts, hf.experts, slot.stack)
    if incomplete:
        name, parts = next(iter(incomplete.items()))
        raise ValueError(
            f"{name}: {len(parts)} tensors of experts; expected those of all {hf.experts} experts"
        )


def _stack(parts: dict[tuple[int, int], Tensor], experts: int, stack: Stack) -> Tensor:
    """Join the parts, given by (expert, part), of all experts."""
    part_numbers = range(len(stack.parts))
    return torch.stack(
        [join_parts([parts[expert, part] for part in part_numbers], stack) for expert in range(experts)]
    )


def join_parts(parts: list[Tensor], stack: Stack) -> Tensor:
    """Join the parts of an expert: n weights `[out, in]` to `[in, n out]`, or n biases `[out]` to `[n out]`."""
    transposed = [part.t() if part.dim() == 2 else part for part in parts]
    return torch.stack(transposed, dim=-1).flatten(-2) if stack.interleaved else torch.cat(transposed, dim=-1)


def part_of(expert: Tensor, part: int, stack: Stack) -> Tensor:
    """Return part number `part` of an expert in a stack; the inverse of join_parts."""
    parts = len(stack.parts)
    section = expert[..., part::parts] if stack.interleaved else expert.chunk(parts, dim=-1)[part]
    return (section.t() if section.dim() == 2 else section).contiguous()
