"""GLM-4.5 with experts. GLM-4.7-Flash is in deepseek.py."""

from __future__ import annotations

from rlsys.convert.rows import (
    ATTENTION,
    DENSE,
    EMBEDDING,
    HEAD,
    NORMS,
    SIGMOID,
    SIGMOID_ALLOWED,
    experts,
    fused,
    mtp,
    router,
    router_bias,
    shared_experts,
)
from rlsys.convert.rules import Family

FAMILIES = (
    Family(
        "Glm4MoeForCausalLM",
        EMBEDDING
        + NORMS
        + ATTENTION
        + DENSE
        + router()
        + router_bias()
        + experts()
        + shared_experts()
        + HEAD,
        moe=True,
        sigmoid=True,
        biased=True,
        fields={"num_experts": "n_routed_experts", "qk_norm": "use_qk_norm"},
        defaults={
            **SIGMOID,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "partial_rotary_factor": 0.5,
            "num_key_value_heads": 8,
        },
        allowed={**SIGMOID_ALLOWED, "attention_bias": (False, True)},
        other_names=fused(),
        mtp=mtp(),
    ),
)
