"""Linear layers: plain, with a preceding norm, and grouped. Weights are `[out, in]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F

Init = Callable[[Tensor], Any] | None


class _Layer(nn.Module):
    """Base of TE's layers, with an extra state in the state_dict and FP8 settings."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Accept any state, including None."""

    def _weight(
        self, out: int, into: int, dtype: torch.dtype, device: object, init: Init, cut: int
    ) -> Parameter:
        if str(device) == "meta":
            raise NotImplementedError(
                "Transformer Engine's layers cannot be initialised on the meta device here"
            )
        weight = Parameter(torch.empty(out, into, dtype=dtype, device=device))  # type: ignore[call-overload]
        if torch.get_default_device().type == "meta":
            raise NotImplementedError("a meta tensor in Transformer Engine's layer")
        if init is not None:
            init(weight.data)
        for name, value in (("tensor_model_parallel", True), ("partition_dim", cut), ("partition_stride", 1)):
            setattr(weight, name, value)
        return weight


def _dtype(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype


def _with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias after the product, as cuBLAS's epilogue and Megatron's layers do. torch adds it first."""
    return product if bias is None else product + bias


class Linear(_Layer):
    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Any = None, rng_tracker_name: str | None = None, init_method: Init = None,
        bias: bool = True, return_bias: bool = False, params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None, parameters_split: Any = None, device: Any = "cuda",
        ub_overlap_ag: bool = False, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False, ub_name: str | None = None,
        delay_wgrad_compute: bool = False, symmetric_ar_type: str | None = None,
        save_original_input: bool = False, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert tp_size == 1, "one process"
        self.parallel_mode, self.use_bias, self._return_bias = parallel_mode, bias, return_bias
        dtype = _dtype(params_dtype)
        cut = 1 if parallel_mode == "row" else 0
        self.weight = self._weight(out_features, in_features, dtype, device, init_method, cut)
        self.bias = Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        if self._return_bias:
            return F.linear(inp, self.weight), self.bias
        return _with_bias(F.linear(inp, self.weight), self.bias)


class LayerNormLinear(_Layer):
    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Any = None, init_method: Init = None, bias: bool = True,
        normalization: str = "LayerNorm", return_bias: bool = False, params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None, return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False, parameters_split: Any = None,
        zero_centered_gamma: bool = False, device: Any = "cuda", ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False, ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False, ub_name: str | None = None, delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert tp_size == 1 and normalization == "RMSNorm" and not zero_centered_gamma
        self.parallel_mode, self.use_bias, self._return_bias = parallel_mode, bias, return_bias
        self.eps = eps
        dtype = _dtype(params_dtype)
        self.weight = self._weight(out_features, in_features, dtype, device, init_method, 0)
        self.layer_norm_weight = Parameter(torch.ones(in_features, dtype=dtype, device=device))
        self.layer_norm_weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.bias = Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        normed = F.rms_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.eps)
        if self._return_bias:
            return F.linear(normed, self.weight), self.bias
        return _with_bias(F.linear(normed, self.weight), self.bias)


class GroupedLinear(_Layer):
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Any = None, rng_tracker_name: str | None = None, init_method: Init = None,
        bias: bool = True, return_bias: bool = False, params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None, device: Any = "cuda", ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False, ub_name: str | None = None, delay_wgrad_compute: bool = False,
        save_original_input: bool = False, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert tp_size == 1 and not bias
        self.num_gemms, self.use_bias, self.parallel_mode = num_gemms, bias, parallel_mode
        for i in range(num_gemms):
            weight = self._weight(out_features, in_features, _dtype(params_dtype), device, init_method, 0)
            self.register_parameter(f"weight{i}", weight)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        assert isinstance(m_splits, list) and all(isinstance(n, int) for n in m_splits), (
            "a list, not a tensor"
        )
        assert len(m_splits) == self.num_gemms and sum(m_splits) == len(inp)
        parts = zip(
            inp.split(m_splits), (getattr(self, f"weight{i}") for i in range(self.num_gemms)), strict=True
        )
        return torch.cat([F.linear(part, weight) for part, weight in parts])


class RMSNorm(nn.Module):
    def __init__(
        self, normalized_shape: Any = None, eps: float = 1e-5, sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None, zero_centered_gamma: bool = False,
        hidden_size: int | None = None, *, device: Any = "cuda", dtype: torch.dtype | None = None,
        sm_margin: Any = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        assert not zero_centered_gamma and str(device) != "meta"
        size = hidden_size if normalized_shape is None else normalized_shape
        self.weight = Parameter(torch.ones(size, dtype=_dtype(params_dtype or dtype), device=device))
        self.weight.sequence_parallel = bool(sequence_parallel)  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, inp: Tensor) -> Tensor:
        return F.rms_norm(inp, inp.shape[-1:], self.weight, self.eps)
