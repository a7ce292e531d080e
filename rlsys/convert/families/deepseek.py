"""DeepSeek-V2 and V3, Kimi-K2 and Moonlight (with V3's architecture), GLM-4.7-Flash (with V3's layers)."""

from __future__ import annotations

from rlsys.convert.rows import (
    COMMON,
    DENSE,
    EMBEDDING,
    HEAD,
    LATENT_ATTENTION,
    NORMS,
    PLAIN,
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

_BEGIN = EMBEDDING + NORMS + LATENT_ATTENTION + DENSE + router()
_END = experts() + shared_experts() + HEAD

FAMILIES = (
    Family(
        "DeepseekV3ForCausalLM",
        _BEGIN + router_bias() + _END,
        moe=True,
        mla=True,
        sigmoid=True,
        biased=True,
        fields={"num_experts": "n_routed_experts"},
        defaults={
            **SIGMOID,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 1536,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "rope_interleave": True,
        },
        allowed={**SIGMOID_ALLOWED, "rope_interleave": (True,)},
        other_names=fused(),
        mtp=mtp(),
    ),
    Family(
        "Glm4MoeLiteForCausalLM",
        _BEGIN + router_bias() + _END,
        moe=True,
        mla=True,
        sigmoid=True,
        biased=True,
        fields={"num_experts": "n_routed_experts"},
        defaults={
            **SIGMOID,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.8,
            "q_lora_rank": 768,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": True,
        },
        allowed={**SIGMOID_ALLOWED, "rope_interleave": (True,)},
        other_names=fused(),
        mtp=mtp(),
    ),
    Family(
        "DeepseekV2ForCausalLM",
        _BEGIN + _END,
        moe=True,
        mla=True,
        group_worth=1,
        fields={"num_experts": "n_routed_experts"},
        defaults={
            **COMMON,
            "routed_scaling_factor": 1.0,
            "q_lora_rank": 1536,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
        },
        allowed={
            **PLAIN,
            "topk_method": ("greedy", "group_limited_greedy"),
            "scoring_func": ("softmax",),
            "moe_layer_freq": (1,),
            "norm_topk_prob": (False,),
        },
        other_names=fused(),
    ),
)
