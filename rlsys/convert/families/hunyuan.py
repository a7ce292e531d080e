"""HY-V3 (Hunyuan)."""

from __future__ import annotations

from rlsys.convert.rows import (
    ATTENTION,
    DENSE,
    EMBEDDING,
    HEAD,
    NORMS,
    PLAIN,
    SIGMOID,
    H,
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
        "HYV3ForCausalLM",
        EMBEDDING
        + NORMS
        + ATTENTION
        + DENSE
        + router("mlp.router.gate.weight", H + "mlp.gate.weight")
        + router_bias("mlp.expert_bias")
        + experts()
        + shared_experts("mlp.shared_mlp")
        + HEAD,
        moe=True,
        sigmoid=True,
        biased=True,
        fields={
            "n_shared_experts": "num_shared_experts",
            "routed_scaling_factor": "router_scaling_factor",
            "norm_topk_prob": "route_norm",
        },
        defaults={
            **SIGMOID,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "qk_norm": True,
            "routed_scaling_factor": 2.826,
            "mlp_bias": False,
            "moe_router_use_sigmoid": True,
            "moe_router_enable_expert_bias": True,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        allowed={
            **PLAIN,
            "mlp_bias": (False,),
            "norm_topk_prob": (True,),
            "qk_norm": (True,),
            "moe_router_use_sigmoid": (True,),
            "moe_router_enable_expert_bias": (True,),
        },
        other_names=fused(),
        mtp=mtp("final_layernorm"),  # the name that SGLang reads in published folders
    ),
)
