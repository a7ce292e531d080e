"""Two names that the MoE layers take from Transformer Engine or from CUDA.

Why numbers stay equal: without TE the router's own torch.mm branch runs, the one upstream tests; splits are the
same integers as a numpy array instead of a tensor. Delete GEMM when moe_utils guards the name itself, SPLITS when
`as_numpy` no longer depends on the device.
"""

from __future__ import annotations

from types import ModuleType

import torch

from megatron_patches.registry import Patch, expect


def _gemm(module: ModuleType) -> None:
    expect(
        hasattr(module, "RouterGatingLinearFunction"), "moe_without_te", "RouterGatingLinearFunction is gone"
    )
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # type: ignore[attr-defined]


def _splits(module: ModuleType) -> None:
    expect(hasattr(module, "maybe_move_tensor_to_cpu"), "moe_without_te", "maybe_move_tensor_to_cpu is gone")
    upstream = module.maybe_move_tensor_to_cpu

    def move(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.cpu().numpy()
        return upstream(tensor, as_numpy, record_stream)

    module.maybe_move_tensor_to_cpu = move  # type: ignore[attr-defined]


GEMM = Patch(
    "moe_gemm", "megatron.core.transformer.moe.moe_utils", "no-te", "0.16.1",
    "NameError: te_general_gemm in the router's gating", _gemm,
)  # fmt: skip
SPLITS = Patch(
    "moe_splits", "megatron.core.transformer.moe.moe_utils", "no-cuda", "0.16.1",
    "all_to_all_single gets tensors as split sizes: only CUDA tensors were turned into numpy", _splits,
)  # fmt: skip
