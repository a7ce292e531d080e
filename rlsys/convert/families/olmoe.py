"""OLMoE."""

from __future__ import annotations

from rlsys.convert.rows import (
    COMMON,
    EMBEDDING,
    HEAD,
    HEAD_NORMED_ATTENTION,
    NORMS,
    PLAIN,
    experts,
    fused,
    router,
)
from rlsys.convert.rules import Family

FAMILIES = (
    Family(
        "OlmoeForCausalLM",
        EMBEDDING + NORMS + HEAD_NORMED_ATTENTION + router() + experts() + HEAD,
        moe=True,
        head_norms=True,
        fields={"moe_intermediate_size": "intermediate_size"},
        defaults={**COMMON, "rms_norm_eps": 1e-5, "norm_topk_prob": False, "clip_qkv": None},
        allowed={**PLAIN, "clip_qkv": (None,)},
        other_names=fused(),
    ),
)
