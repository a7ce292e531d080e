"""AdamW and multi-tensor functions, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019). It counts steps per group as TE, not per parameter as torch."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, bias_correction: bool = True, adam_w_mode: bool = True,
        capturable: bool = False, master_weights: bool = False, master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32, exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False, store_param_remainders: bool = False, set_grad_none: bool | None = None,
    ) -> None:  # fmt: skip
        assert bias_correction and adam_w_mode and not master_weights and not amsgrad
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None, grad_scaler: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(p.grad, 1 - first)
                square.mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                scale = (square.sqrt() / (1 - second**step) ** 0.5).add_(
                    group["eps"]
                )  # the order of torch's operations
                p.addcdiv_(mean, scale, value=-group["lr"] / (1 - first**step))


class FusedSGD(torch.optim.SGD): ...


def multi_tensor_applier(op: Callable[..., Any], noop: Tensor, lists: list[list[Tensor]], *args: Any) -> Any:
    return op(2048 * 32, noop, lists, *args)


def multi_tensor_scale(chunk: int, noop: Tensor, lists: list[list[Tensor]], scale: Any) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_l2norm(chunk: int, noop: Tensor, lists: list[list[Tensor]], per_parameter: bool) -> Any:
    norms = torch.stack([t.float().norm() for t in lists[0]])
    return norms.norm()[None], norms
