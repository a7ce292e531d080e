"""FP8 weights of engines: blocks of 128 x 128 with one scale each.

Shapes: a weight is `[rows, columns]`, its scales `[ceil(rows / 128), ceil(columns / 128)]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.config.precision import BLOCK, SCALE, is_quantised

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def quantise_for_engines(
    config: Config, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Quantise the tensors of a push if the engines serve FP8 weights (model.fp8); otherwise yield them unchanged.

    With `model.fp8: both` the trainer's GEMMs use the same kind of scales (launch/environment.py configures
    Transformer Engine, whose default scales are powers of two).

    Args:
        config: config of the run.
        tensors: Hugging Face names and tensors in the trainer's dtype.

    Yields:
        names and tensors in the order of `tensors`, then all scales.
    """
    if not config.model.fp8_engines:
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
    """Quantise a weight `[rows, columns]` in blocks, so that each element is about value * scale of the block.

    The scale of a block is its largest absolute element / 448, the maximum of the format; 1 for a block of zeros.

    Returns:
        float8_e4m3fn values and float32 scales.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows', 128, columns', 128]
    largest = blocks.abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    values = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scale


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 weight `[rows, columns]` of values and scales."""
    rows, columns = values.shape
    element_scales = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values.float() * element_scales[:rows, :columns]
