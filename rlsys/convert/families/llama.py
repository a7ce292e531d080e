"""Llama and Mixtral."""

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
)
from rlsys.convert.rules import Family

_MIXTRAL = "block_sparse_moe"
_GATE, _NAMES = f"{_MIXTRAL}.gate.weight", "w1 w3 w2"

FAMILIES = (
    Family(
        "LlamaForCausalLM",
        EMBEDDING + NORMS + ATTENTION + DENSE + HEAD,
        defaults={**COMMON, "mlp_bias": False},
        allowed={**PLAIN, "mlp_bias": (False,)},
    ),
    Family(
        "MixtralForCausalLM",
        EMBEDDING + NORMS + ATTENTION + router(_GATE) + experts(_MIXTRAL + ".experts.{e}", _NAMES) + HEAD,
        moe=True,
        fields={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_key_value_heads": 8,
        },
        allowed={**PLAIN, "sliding_window": (None,)},
        other_names=fused(_MIXTRAL + ".experts", _NAMES) | {H + "mlp.gate.weight": (H + _GATE,)},
    ),
)
