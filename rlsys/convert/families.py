"""ONE name table per model family, read in both directions: Hugging Face <-> Megatron-Core's GPTModel (local spec).

A `Rule` pairs one Megatron parameter with the HF tensors that make it up. `{l}` is the layer, `{e}` the expert.
How they combine is one of four layouts:

    same      one HF tensor, unchanged
    qkv       q, k, v interleaved by query group: [group][queries of the group, key, value][head_dim]
    gate_up   gate over up
    bias_qkv  as qkv, for biases
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlsys.errors import UserError

Layout = Literal["same", "qkv", "gate_up"]


@dataclass(frozen=True)
class Rule:
    """`megatron` is made of `hf`, combined by `layout`."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = "same"


@dataclass(frozen=True)
class Family:
    """Names of one architecture. `hf_defaults`: values its HF config may leave out."""

    architecture: str
    qk_norm: bool
    qkv_bias: bool
    moe: bool
    rules: tuple[Rule, ...]
    hf_defaults: dict[str, Any] = field(default_factory=dict)


_M, _H = "decoder.layers.{l}.", "model.layers.{l}."
_ENDS = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",)),
)
_ATTENTION = (
    Rule(_M + "input_layernorm.weight", (_H + "input_layernorm.weight",)),
    Rule(
        _M + "self_attention.linear_qkv.weight",
        tuple(_H + f"self_attn.{x}_proj.weight" for x in "qkv"),
        "qkv",
    ),
    Rule(_M + "self_attention.linear_proj.weight", (_H + "self_attn.o_proj.weight",)),
    Rule(_M + "pre_mlp_layernorm.weight", (_H + "post_attention_layernorm.weight",)),
)
_QK_NORM = (
    Rule(_M + "self_attention.q_layernorm.weight", (_H + "self_attn.q_norm.weight",)),
    Rule(_M + "self_attention.k_layernorm.weight", (_H + "self_attn.k_norm.weight",)),
)
_DENSE = (
    Rule(_M + "mlp.linear_fc1.weight", (_H + "mlp.gate_proj.weight", _H + "mlp.up_proj.weight"), "gate_up"),
    Rule(_M + "mlp.linear_fc2.weight", (_H + "mlp.down_proj.weight",)),
)
_EXPERT = _M + "mlp.experts.local_experts.{e}."
_MOE = (
    Rule(_M + "mlp.router.weight", (_H + "mlp.gate.weight",)),
    Rule(
        _EXPERT + "linear_fc1.weight",
        (_H + "mlp.experts.{e}.gate_proj.weight", _H + "mlp.experts.{e}.up_proj.weight"),
        "gate_up",
    ),
    Rule(_EXPERT + "linear_fc2.weight", (_H + "mlp.experts.{e}.down_proj.weight",)),
)

FAMILIES: dict[str, Family] = {
    f.architecture: f
    for f in (
        Family("Qwen3MoeForCausalLM", True, False, True, _ENDS + _ATTENTION + _QK_NORM + _MOE),
        Family("Qwen3ForCausalLM", True, False, False, _ENDS + _ATTENTION + _QK_NORM + _DENSE),
    )
}


def family_of(architecture: str) -> Family:
    """Raises UserError when there is no table for this architecture."""
    if architecture not in FAMILIES:
        raise UserError(
            f"config.json: architecture {architecture!r} has no conversion table; known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]
