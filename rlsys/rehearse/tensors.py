"""Fake tensors, and the results of data-dependent operations on them.

Floating-point and big tensors are FakeTensors, which have shapes but no memory. Small integer tensors (tokens,
lengths, routing map, counts of tokens, splits) are real, so that every `.tolist()` in Megatron gives correct numbers.
FakeTensorMode is therefore enabled only while an operation creates a floating-point or big tensor. Operations on fake
tensors return fake tensors without it.
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
"""Size in bytes from which integer tensors are fake, too."""


class FakeTensors:
    """Runner of operations on fake and real tensors.

    Attributes:
        mode: Mode that creates fake tensors.
        guessed: Number of requests for values of fake tensors, by description. They returned 1 or True.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.guessed: Counter[str] = Counter()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], phase: str) -> Any:
        """Return `func(*args, **kwargs)`. `phase`: phase of the step, for `guessed`."""
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
        """Return a value for a fake tensor of one element, and count the request."""
        self.guessed[f"{phase}: item() of a {str(tensor.dtype).removeprefix('torch.')}"] += 1
        if tensor.dtype.is_floating_point:
            return 1.0
        return True if tensor.dtype == torch.bool else 1

    def _indices(self, index: Tensor | None, phase: str) -> list[Tensor | None]:
        """Convert a boolean mask to the indices of its true elements, so that the size of the result is known.

        All elements of a fake mask count as true. Other indices are returned unchanged.
        """
        if index is None or index.dtype != torch.bool:
            return [index]
        if isinstance(index, FakeTensor):
            self.guessed[f"{phase}: which elements of a mask are true"] += 1
            index = torch.ones(index.shape, dtype=torch.bool)
        return list(index.nonzero(as_tuple=True))


def _is_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a factory's result is a floating-point or big tensor."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        integral = func is _aten.full.default and not isinstance(args[1], float)
        dtype = torch.int64 if integral else torch.get_default_dtype()
    return bool(dtype.is_floating_point or math.prod(args[0]) * dtype.itemsize >= BIG)
