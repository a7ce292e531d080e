"""Gating of routers without Transformer Engine.

Symptom: NameError: te_general_gemm.
Upstream: 0.16.1 - 0.19.2.
Why numbers stay equal: With te_general_gemm = None, the router uses its torch.mm branch, as upstream intends.
Delete when: moe_utils defines the name if the import fails.
"""

from __future__ import annotations

from types import ModuleType

from megatron_patches.registry import Patch, target


def _edit(module: ModuleType) -> None:
    target("moe_gemm", module, "RouterGatingLinearFunction", "te_general_gemm is not None", "torch.mm")
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # type: ignore[attr-defined]


PATCH = Patch(
    "moe_gemm", "megatron.core.transformer.moe.moe_utils", "no-te", "0.16.1 - 0.19.2",
    "NameError: te_general_gemm in the router's gating", _edit,
)  # fmt: skip
