"""Qwen3-Next: three of four layers have a gated delta net, and the others have gated attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsys.convert.rows import (
    COMMON,
    EMBEDDING,
    HEAD,
    NORMS,
    PLAIN,
    SHARED_GATED,
    H,
    M,
    experts,
    fused,
    router,
)
from rlsys.convert.rules import Family, Rule

_FULL, _DELTA = M + "self_attention.", H + "linear_attn."
# SGLang's names of these tensors do not contain `self_attn.`.
_ATTENTION = (
    Rule(
        _FULL + "linear_qkv.weight",
        {
            H + "self_attn.q_proj.weight": "rh",
            H + "self_attn.k_proj.weight": "kh",
            H + "self_attn.v_proj.weight": "kh",
        },
        "gated_qkv",
        shard_axis=0,
        only="full",
        engine_name=H + "qkv_proj.weight",
    ),
    Rule(
        _FULL + "linear_proj.weight",
        {H + "self_attn.o_proj.weight": "hq"},
        shard_axis=1,
        only="full",
        engine_name=H + "o_proj.weight",
    ),
    *(
        Rule(
            f"{_FULL}{x}_layernorm.weight",
            {f"{H}self_attn.{x}_norm.weight": "d"},
            only="full",
            engine_name=f"{H}{x}_norm.weight",
        )
        for x in "qk"
    ),
)
_DELTA_NET = (
    Rule(_FULL + "in_proj.weight", {_DELTA + "in_proj_qkvz.weight": "gh"}, shard_axis=0, only="linear"),
    Rule(_FULL + "gate_proj.weight", {_DELTA + "in_proj_ba.weight": "jh"}, shard_axis=0, only="linear"),
    Rule(_FULL + "conv", {_DELTA + "conv1d.weight": "u1w"}, "by_key_head", shard_axis=0, only="linear"),
    Rule(_FULL + "A_log", {_DELTA + "A_log": "t"}, shard_axis=0, only="linear", engine_dtype="float32"),
    Rule(_FULL + "dt_bias", {_DELTA + "dt_bias": "t"}, shard_axis=0, only="linear"),
    Rule(_FULL + "norm", {_DELTA + "norm.weight": "y"}, only="linear"),
    Rule(_FULL + "out_proj.weight", {_DELTA + "out_proj.weight": "hz"}, shard_axis=1, only="linear"),
)


def _fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    layers = raw["num_hidden_layers"]
    # With a list, checkpoints store each layer under a separate name, as layers of different kinds require.
    return {
        "moe_shared_expert_gate": bool(raw.get("shared_expert_intermediate_size")),
        "attention_output_gate": True,
        "moe_layer_freq": [1] * layers,
    }


FAMILIES = (
    Family(
        "Qwen3NextForCausalLM",
        EMBEDDING + NORMS + _ATTENTION + _DELTA_NET + router() + experts() + SHARED_GATED + HEAD,
        moe=True,
        delta_net=True,
        carried=("mtp.",),
        defaults={
            **COMMON,
            "qk_norm": True,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "decoder_sparse_step": 1,
            "num_key_value_heads": 2,
            "shared_expert_intermediate_size": 512,
        },
        # SGLang builds experts in every layer.
        allowed={**PLAIN, "decoder_sparse_step": (1,), "mlp_only_layers": (None, [])},
        other_names=fused(),
        megatron=_fields,
    ),
)
