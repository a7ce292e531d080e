"""Qwen2, Qwen2.5, Qwen3, dense and with experts."""

from __future__ import annotations

from rlsys.convert.rows import (
    ATTENTION,
    COMMON,
    DENSE,
    EMBEDDING,
    HEAD,
    NORMS,
    PLAIN,
    H,
    M,
    experts,
    fused,
    router,
    shared_experts,
)
from rlsys.convert.rules import Family, Rule

_QWEN3 = {**COMMON, "qk_norm": True}
_SHARED = (
    *shared_experts("mlp.shared_expert"),
    Rule(M + "mlp.shared_experts.gate_weight", {H + "mlp.shared_expert_gate.weight": "1h"}, only="moe"),
)

FAMILIES = (
    Family(
        "Qwen3MoeForCausalLM",
        EMBEDDING + NORMS + ATTENTION + router() + experts() + DENSE + HEAD,
        moe=True,
        defaults={**_QWEN3, "head_dim": None, "norm_topk_prob": False},
        allowed=PLAIN,
        other_names=fused(),
    ),
    Family(
        "Qwen3ForCausalLM",
        EMBEDDING + NORMS + ATTENTION + DENSE + HEAD,
        defaults={**_QWEN3, "head_dim": 128},
        allowed=PLAIN,
    ),
    Family(
        "Qwen2ForCausalLM",
        EMBEDDING + NORMS + ATTENTION + DENSE + HEAD,
        defaults={**COMMON, "attention_bias": True},
        allowed={**PLAIN, "attention_bias": (True,)},
    ),
    Family(
        "Qwen2MoeForCausalLM",
        EMBEDDING + NORMS + ATTENTION + router() + experts() + _SHARED + DENSE + HEAD,
        moe=True,
        fields={"attention_bias": "qkv_bias"},
        defaults={**COMMON, "attention_bias": True, "norm_topk_prob": False},
        allowed={**PLAIN, "attention_bias": (True,)},
        other_names=fused(),
        megatron=lambda _: {"moe_shared_expert_gate": True},
    ),
)
