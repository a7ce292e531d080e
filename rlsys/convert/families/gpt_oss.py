"""gpt-oss: attention with sinks and windows, biases in all linear layers, clamped activations, stacked experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsys.convert.rows import COMMON, EMBEDDING, HEAD, NORMS, PLAIN, PROJECTIONS, H, M, experts, router
from rlsys.convert.rules import Family, Rule, Stack

_EXPERT, _LOCAL = H + "mlp.experts.{e}.", M + "mlp.experts.local_experts.{e}."
_GATE, _UP, _DOWN = (f"{_EXPERT}{x}_proj." for x in ("gate", "up", "down"))
_BIASES = (
    Rule(M + "self_attention.linear_proj.bias", {H + "self_attn.o_proj.bias": "h"}),
    Rule(
        M + "self_attention.core_attention.softmax_offset",
        {H + "self_attn.sinks": "n"},
        shard_axis=0,
        engine_dtype="bfloat16",
    ),
    Rule(M + "mlp.router.bias", {H + "mlp.router.bias": "e"}, only="moe"),
    Rule(
        _LOCAL + "linear_fc1.bias",
        {_GATE + "bias": "m", _UP + "bias": "m"},
        "gate_up",
        shard_axis=0,
        only="moe",
    ),
    Rule(_LOCAL + "linear_fc2.bias", {_DOWN + "bias": "h"}, only="moe"),
)
_STACKED = H + "mlp.experts."


def _fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "add_bias_linear": True,
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": raw["swiglu_limit"],
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
    }


FAMILIES = (
    Family(
        "GptOssForCausalLM",
        EMBEDDING + NORMS + PROJECTIONS + router("mlp.router.weight") + _BIASES + experts() + HEAD,
        moe=True,
        windowed=True,
        yarn=True,
        fields={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "attention_bias": True,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
        # Megatron's quick_gelu contains the constant 1.702.
        allowed={**PLAIN, "attention_bias": (True,), "swiglu_alpha": (1.702,)},
        stacks={
            _STACKED + "gate_up_proj": Stack((_GATE + "weight", _UP + "weight"), "w13_weight", 1),
            _STACKED + "down_proj": Stack((_DOWN + "weight",), "w2_weight", 2),
            _STACKED + "gate_up_proj_bias": Stack((_GATE + "bias", _UP + "bias"), "w13_weight_bias", 1),
            _STACKED + "down_proj_bias": Stack((_DOWN + "bias",), "w2_weight_bias", None),
        },
        megatron=_fields,
    ),
)
