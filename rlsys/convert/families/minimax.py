"""MiniMax-M2."""

from __future__ import annotations

from rlsys.convert.rows import (
    EMBEDDING,
    HEAD,
    HEAD_NORMED_ATTENTION,
    NORMS,
    SIGMOID,
    SIGMOID_ALLOWED,
    H,
    experts,
    fused,
    router,
    router_bias,
)
from rlsys.convert.rules import Family

_MOE, _NAMES = "block_sparse_moe", "w1 w3 w2"
_GATE, _BIAS = _MOE + ".gate.weight", _MOE + ".e_score_correction_bias"

FAMILIES = (
    Family(
        "MiniMaxM2ForCausalLM",
        EMBEDDING
        + NORMS
        + HEAD_NORMED_ATTENTION
        + router(_GATE)
        + router_bias(_BIAS)
        + experts(_MOE + ".experts.{e}", _NAMES)
        + HEAD,
        moe=True,
        sigmoid=True,
        biased=True,
        head_norms=True,
        fields={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        defaults={
            **SIGMOID,
            "rope_theta": 5e6,
            "n_shared_experts": 0,
            "n_group": 1,
            "topk_group": 1,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        allowed={
            **SIGMOID_ALLOWED,
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "use_routing_bias": (True,),
        },
        other_names=fused(_MOE + ".experts", _NAMES)
        | {H + "mlp.gate.weight": (H + _GATE,), H + "mlp.e_score_correction_bias": (H + _BIAS,)},
    ),
)
