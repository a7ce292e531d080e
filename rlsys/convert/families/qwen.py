"""Qwen2, Qwen2.5 and Qwen3, dense and with experts, and the language model of Qwen3-VL with experts."""

from __future__ import annotations

from rlsys.convert.rows import (
    ATTENTION,
    COMMON,
    DENSE,
    EMBEDDING,
    HEAD,
    NORMS,
    PLAIN,
    SHARED_GATED,
    H,
    experts,
    fused,
    router,
)
from rlsys.convert.rules import Family, Stack

_QWEN3 = {**COMMON, "qk_norm": True}
_EXPERT = H + "mlp.experts.{e}."
_GATE, _UP, _DOWN = (f"{_EXPERT}{x}_proj.weight" for x in ("gate", "up", "down"))

FAMILIES = (
    Family(
        "Qwen3MoeForCausalLM",
        EMBEDDING + NORMS + ATTENTION + router() + experts() + DENSE + HEAD,
        moe=True,
        defaults={**_QWEN3, "head_dim": None, "norm_topk_prob": False, "num_key_value_heads": 4},
        allowed=PLAIN,
        other_names=fused(),
    ),
    Family(
        "Qwen3ForCausalLM",
        EMBEDDING + NORMS + ATTENTION + DENSE + HEAD,
        defaults={**_QWEN3, "head_dim": 128, "num_key_value_heads": 32},
        allowed=PLAIN,
    ),
    Family(
        "Qwen2ForCausalLM",
        EMBEDDING + NORMS + ATTENTION + DENSE + HEAD,
        defaults={**COMMON, "attention_bias": True, "num_key_value_heads": 32},
        allowed={**PLAIN, "attention_bias": (True,)},
    ),
    Family(
        "Qwen2MoeForCausalLM",
        EMBEDDING + NORMS + ATTENTION + router() + experts() + SHARED_GATED + DENSE + HEAD,
        moe=True,
        fields={"attention_bias": "qkv_bias"},
        defaults={
            **COMMON,
            "attention_bias": True,
            "norm_topk_prob": False,
            "num_key_value_heads": 16,
            "shared_expert_intermediate_size": 5632,
        },
        allowed={**PLAIN, "attention_bias": (True,)},
        other_names=fused(),
        megatron=lambda raw: {"moe_shared_expert_gate": bool(raw.get("shared_expert_intermediate_size"))},
    ),
    Family(
        # A text token has the same position on all three axes of the rotary embedding, so that the usual one is
        # right.
        "Qwen3VLMoeForConditionalGeneration",
        EMBEDDING + NORMS + ATTENTION + router() + experts() + DENSE + HEAD,
        moe=True,
        part_of_more=True,
        prefix="model.language_model.",
        carried=("model.visual.",),
        defaults={**_QWEN3, "head_dim": None, "rope_theta": 500000.0, "num_key_value_heads": 16},
        allowed={**PLAIN, "norm_topk_prob": (True,)},
        stacks={
            H + "mlp.experts.gate_up_proj": Stack((_GATE, _UP), "w13_weight", 1, interleaved=False),
            H + "mlp.experts.down_proj": Stack((_DOWN,), "w2_weight", 2),
        },
    ),
)
