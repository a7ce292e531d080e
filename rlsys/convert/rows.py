"""Rules of the name tables and fields of config.json that several families have in common. No torch."""

from __future__ import annotations

from typing import Any

from rlsys.convert.rules import Feature, Rule

M, H = "decoder.layers.{l}.", "model.layers.{l}."
"""Prefixes of the names of a layer's parameters in Megatron and in Hugging Face folders."""
P = "mtp.layers.{l}."
"""Prefix of the names of an MTP layer's parameters in Megatron. In folders, MTP layers follow the last layer."""

_QKV = tuple(H + f"self_attn.{x}_proj." for x in "qkv")
EMBEDDING = (
    Rule("embedding.word_embeddings.weight", {"model.embed_tokens.weight": "vh"}, "vocabulary", shard_axis=0),
)
HEAD = (
    Rule("decoder.final_layernorm.weight", {"model.norm.weight": "h"}),
    Rule("output_layer.weight", {"lm_head.weight": "vh"}, "vocabulary", shard_axis=0),
)
NORMS = (
    Rule(M + "input_layernorm.weight", {H + "input_layernorm.weight": "h"}),
    Rule(M + "pre_mlp_layernorm.weight", {H + "post_attention_layernorm.weight": "h"}),
)
PROJECTIONS = (
    Rule(
        M + "self_attention.linear_qkv.weight",
        dict(zip((n + "weight" for n in _QKV), ("qh", "kh", "kh"), strict=True)),
        "qkv",
        shard_axis=0,
    ),
    Rule(
        M + "self_attention.linear_qkv.bias",
        dict(zip((n + "bias" for n in _QKV), "qkk", strict=True)),
        "qkv",
        shard_axis=0,
        only="qkv_bias",
    ),
    Rule(M + "self_attention.linear_proj.weight", {H + "self_attn.o_proj.weight": "hq"}, shard_axis=1),
)
ATTENTION = (
    *PROJECTIONS,
    Rule(M + "self_attention.q_layernorm.weight", {H + "self_attn.q_norm.weight": "d"}, only="qk_norm"),
    Rule(M + "self_attention.k_layernorm.weight", {H + "self_attn.k_norm.weight": "d"}, only="qk_norm"),
)
HEAD_NORMED_ATTENTION = (
    *PROJECTIONS,
    Rule(M + "self_attention.q_layernorm.weight", {H + "self_attn.q_norm.weight": "q"}, shard_axis=0),
    Rule(M + "self_attention.k_layernorm.weight", {H + "self_attn.k_norm.weight": "k"}, shard_axis=0),
)


def _latent(megatron: str, hf: str, shape: str, **fields: Any) -> Rule:
    """Return the rule of a weight in latent attention. `shape`: letters of its Hugging Face shape."""
    return Rule(f"{M}self_attention.{megatron}.weight", {f"{H}self_attn.{hf}.weight": shape}, **fields)


LATENT_ATTENTION = (
    _latent("linear_q_proj", "q_proj", "bh", shard_axis=0, only="q_full"),
    _latent("linear_q_down_proj", "q_a_proj", "ah", only="q_rank"),
    _latent("q_layernorm", "q_a_layernorm", "a", only="q_rank"),
    _latent("linear_q_up_proj", "q_b_proj", "ba", shard_axis=0, only="q_rank"),
    _latent("linear_kv_down_proj", "kv_a_proj_with_mqa", "ph"),
    _latent("kv_layernorm", "kv_a_layernorm", "c"),
    _latent("linear_kv_up_proj", "kv_b_proj", "xc", shard_axis=0),
    _latent("linear_proj", "o_proj", "ho", shard_axis=1),
)


def mtp(final_norm: str = "shared_head.norm") -> tuple[Rule, ...]:
    """Return the rules that an MTP layer has in addition to those of a layer (DeepSeek-V3, section 2.2).

    They are the rules of the norms of the token's embedding and of the hidden state, the projection of both, and the
    final norm. The layer uses the model's embedding and head.

    `final_norm`: name of the final norm in folders.
    """
    return (
        Rule(P + "enorm.weight", {H + "enorm.weight": "h"}),
        Rule(P + "hnorm.weight", {H + "hnorm.weight": "h"}),
        Rule(P + "eh_proj.weight", {H + "eh_proj.weight": "ht"}, shard_axis=0),
        Rule(P + "final_layernorm.weight", {f"{H}{final_norm}.weight": "h"}),
    )


def mlp(
    megatron: str, hf: str, letter: str, only: Feature, names: str = "gate_proj up_proj down_proj"
) -> tuple[Rule, ...]:
    """Return the rules of a gated feed-forward block.

    Args:
        megatron: Name of the block in Megatron's layer.
        hf: Name of the block in the folder's layer.
        letter: Letter of its hidden size.
        only: Feature of layers with the block.
        names: Names of the folder's gate, up and down projections.
    """
    gate, up, down = (f"{H}{hf}.{x}.weight" for x in names.split())
    return (
        Rule(
            f"{M}{megatron}.linear_fc1.weight",
            {gate: letter + "h", up: letter + "h"},
            "gate_up",
            shard_axis=0,
            only=only,
        ),
        Rule(f"{M}{megatron}.linear_fc2.weight", {down: "h" + letter}, shard_axis=1, only=only),
    )


def router(hf: str = "mlp.gate.weight", engine_name: str = "") -> tuple[Rule, ...]:
    """Return the rule of the router's weight. `hf`, `engine_name`: its names in folders and in SGLang."""
    return (Rule(M + "mlp.router.weight", {H + hf: "eh"}, only="moe", engine_name=engine_name),)


_BIAS = "mlp.gate.e_score_correction_bias"


def router_bias(hf: str = _BIAS, shape: str = "e", engine_name: str = "") -> tuple[Rule, ...]:
    """Return the rule of the bias that is added to the experts' scores only for the selection of experts.

    Args:
        hf: Name in the folder's layer.
        shape: Letters of the Hugging Face shape.
        engine_name: Name in SGLang; "": as in the folder.
    """
    return (Rule(M + "mlp.router.expert_bias", {H + hf: shape}, only="moe", engine_name=engine_name),)


def experts(hf: str = "mlp.experts.{e}", names: str = "gate_proj up_proj down_proj") -> tuple[Rule, ...]:
    """Return the rules of the experts, see `mlp`."""
    return mlp("mlp.experts.local_experts.{e}", hf, "m", "moe", names)


def shared_experts(hf: str = "mlp.shared_experts") -> tuple[Rule, ...]:
    """Return the rules of the shared experts, which are one block, see `mlp`."""
    return mlp("mlp.shared_experts", hf, "s", "shared")


SHARED_GATED = (
    *shared_experts("mlp.shared_expert"),
    Rule(M + "mlp.shared_experts.gate_weight", {H + "mlp.shared_expert_gate.weight": "1h"}, only="shared"),
)
DENSE = mlp("mlp", "mlp", "f", "dense")


def fused(
    experts: str = "mlp.experts", names: str = "gate_proj up_proj down_proj"
) -> dict[str, tuple[str, ...]]:
    """Return Family.other_names of the two tensors in which transformers 5 stores all experts of a layer.

    Args:
        experts: Name of the experts in the folder's layer.
        names: Names of the gate, up and down projections of one expert.
    """
    gate, up, down = (f"{H}{experts}.{{e}}.{x}.weight" for x in names.split())
    return {H + "mlp.experts.gate_up_proj": (gate, up), H + "mlp.experts.down_proj": (down,)}


PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
}
COMMON: dict[str, Any] = {
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "qk_norm": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "norm_topk_prob": True,
}
SIGMOID: dict[str, Any] = {
    **COMMON,
    "routed_scaling_factor": 1.0,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
SIGMOID_ALLOWED: dict[str, tuple[Any, ...]] = {
    **PLAIN,
    "norm_topk_prob": (True,),  # megatron always normalises sigmoid scores of several experts
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
