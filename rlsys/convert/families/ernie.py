"""Ernie-4.5 with experts."""

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
    experts,
    fused,
    router,
    router_bias,
    shared_experts,
)
from rlsys.convert.rules import Family

FAMILIES = (
    Family(
        "Ernie4_5_MoeForCausalLM",
        EMBEDDING
        + NORMS
        + ATTENTION
        + DENSE
        + router()
        + router_bias("mlp.moe_statics.e_score_correction_bias", "1e", H + "mlp.gate.e_score_correction_bias")
        + experts()
        + shared_experts()
        + HEAD,
        moe=True,
        biased=True,
        fields={
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "n_shared_experts": "moe_num_shared_experts",
            "first_k_dense_replace": "moe_layer_start_index",
            "decoder_sparse_step": "moe_layer_interval",
            "attention_bias": "use_bias",
        },
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
        allowed={**PLAIN, "norm_topk_prob": (True,)},
        other_names=fused(),
        megatron=lambda _: {"rotary_interleaved": True},
    ),
)
