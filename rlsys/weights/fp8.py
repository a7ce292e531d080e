"""Weights as engines in FP8 hold them: blocks of 128 x 128, each with one scale.

Shapes: a weight is `[rows, columns]`, its scales `[ceil(rows / 128), ceil(columns / 128)]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.config.precision import BLOCK, SCALE, is_quantised

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def for_engines(config: Config, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """What a push sends of the trainer's tensors (Hugging Face names). All scales come last, in buckets of their own.

    With `model.fp8: both` the trainer's own GEMMs use such scales as well (launch/environment.py tells Transformer
    Engine so; by default its are powers of two).
    """
    if config.model.fp8 == "none":
        yield from tensors
        return
    scales = []
    for name, tensor in tensors:
        if not is_quantised(name):
            yield name, tensor
            continue
        values, scale = quantise(tensor)
        scales.append((name.removesuffix("weight") + SCALE, scale))
        yield name, values
    yield from scales


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn values and float32 scales: weight = values * scale of their block.

    A block's scale puts its largest weight at the format's largest number, 448. A block of zeros has the scale 1.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows', 128, columns', 128]
    largest = blocks.abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    values = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scale


def restore(values: Tensor, scale: Tensor) -> Tensor:
    """The weight `[rows, columns]` that values and scales stand for, float32."""
    rows, columns = values.shape
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values.float() * spread[:rows, :columns]
