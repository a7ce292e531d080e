"""Fake tensors, and the results of data-dependent operations on them.

Floating or big tensors are FakeTensors: shapes without memory. Small integral tensors (tokens, lengths, the routing
map, counts of tokens, splits) stay real, so that each `.tolist()` of Megatron reads correct numbers. Therefore
FakeTensorMode is not enabled globally: only factories of floating tensors run under it, and results of fake tensors
are fake.
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
    _aten.full.default, _aten.randn.default, _aten.rand.default, _aten.rand.generator,
}  # fmt: skip
BIG = 64 << 20
"""Bytes from which an integer tensor is fake as well."""


class FakeTensors:
    """Fake mode. `guessed` counts requests for values of fake tensors, which return 1 or true, by request."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.guessed: Counter[str] = Counter()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], phase: str) -> Any:
        """Run `func(*args, **kwargs)` without memory for fake tensors."""
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
            return func(args[0], [part for index in args[1] for part in self._indices(index, phase)])
        return func(*args, **kwargs)

    def _guess(self, tensor: Tensor, phase: str) -> float | int | bool:
        self.guessed[f"{phase}: item() of a {str(tensor.dtype).removeprefix('torch.')}"] += 1
        if tensor.dtype.is_floating_point:
            return 1.0
        return True if tensor.dtype == torch.bool else 1

    def _indices(self, index: Tensor | None, phase: str) -> list[Tensor | None]:
        """Convert a mask to the indices where it is true, whose number is known."""
        if index is None or index.dtype != torch.bool:
            return [index]
        if isinstance(index, FakeTensor):
            self.guessed[f"{phase}: which elements of a mask are true"] += 1
            index = torch.ones(index.shape, dtype=torch.bool)
        return list(index.nonzero(as_tuple=True))


def _is_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is None:
        integral = func is _aten.full.default and not isinstance(args[1], float)
        dtype = torch.int64 if integral else torch.get_default_dtype()
    return bool(dtype.is_floating_point or math.prod(args[0]) * dtype.itemsize >= BIG)
