"""AdamW and what goes with it, one tensor after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.AdamW):
    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, bias_correction: bool = True, adam_w_mode: bool = True,
        capturable: bool = False, master_weights: bool = False, master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32, exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False, store_param_remainders: bool = False, set_grad_none: bool | None = None,
    ) -> None:  # fmt: skip
        assert bias_correction and adam_w_mode and not master_weights and not amsgrad
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class FusedSGD(torch.optim.SGD): ...


def multi_tensor_applier(op: Callable[..., Any], noop: Tensor, lists: list[list[Tensor]], *args: Any) -> Any:
    return op(2048 * 32, noop, lists, *args)


def multi_tensor_scale(chunk: int, noop: Tensor, lists: list[list[Tensor]], scale: Any) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_l2norm(chunk: int, noop: Tensor, lists: list[list[Tensor]], per_parameter: bool) -> Any:
    norms = torch.stack([t.float().norm() for t in lists[0]])
    return norms.norm()[None], norms
