"""Which tensors are fake, and what data-dependent operations give on them.

What is floating, or big, is a FakeTensor: a shape without memory. What is small and integral (tokens, lengths, the
routing map, counts of tokens, splits) stays real, so that each `.tolist()` of Megatron's reads true numbers. So
FakeTensorMode is not switched on as a whole: only factories of floating tensors run under it, and what is computed
from a fake tensor is fake.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rlsys.rehearse.collectives import tensors_of

_aten = torch.ops.aten
_FACTORIES = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default, _aten.ones.default,
    _aten.full.default, _aten.randn.default, _aten.rand.default,
}  # fmt: skip
BIG = 64 << 20
"""Bytes from which a tensor of integers is fake as well."""


class FakeTensors:
    """`guessed` counts what code asked of a fake tensor, by question: it was told 1, or true."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.guessed: Counter[str] = Counter()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], phase: str) -> Any:
        """`func(*args, **kwargs)` without memory for what is fake."""
        if func in _FACTORIES and _is_fake(func, args, kwargs):
            with self.mode:
                return func(*args, **kwargs)
        if not any(isinstance(a, FakeTensor) for a in tensors_of((args, kwargs))):
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            return self._guess(args[0], phase)
        if func is _aten.masked_select.default and not isinstance(args[1], FakeTensor):
            return args[0].new_empty((int(args[1].expand(args[0].shape).sum()),))
        if func is _aten.index.Tensor:
            return func(args[0], [place for index in args[1] for place in self._places(index, phase)])
        return func(*args, **kwargs)

    def _guess(self, tensor: Tensor, phase: str) -> float | int | bool:
        self.guessed[f"{phase}: item() of a {str(tensor.dtype).removeprefix('torch.')}"] += 1
        if tensor.dtype.is_floating_point:
            return 1.0
        return True if tensor.dtype == torch.bool else 1

    def _places(self, index: Tensor | None, phase: str) -> list[Tensor | None]:
        """A mask as the places where it is true, which have a known number."""
        if index is None or index.dtype != torch.bool:
            return [index]
        if isinstance(index, FakeTensor):
            self.guessed[f"{phase}: which elements of a mask are true"] += 1
            index = torch.ones(index.shape, dtype=torch.bool)
        return list(index.nonzero(as_tuple=True))


def _is_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is None:
        whole = func is _aten.full.default and not isinstance(args[1], float)
        dtype = torch.int64 if whole else torch.get_default_dtype()
    return bool(dtype.is_floating_point or math.prod(args[0]) * dtype.itemsize >= BIG)
