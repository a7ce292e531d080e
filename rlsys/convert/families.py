"""ONE name table per model family, read in both directions: Hugging Face <-> Megatron-Core's GPTModel.

A `Rule` pairs one Megatron parameter (names of the local layer spec) with the HF tensors that make it up.
`{l}` is the layer, `{e}` the expert. The HF shape is spelt in letters, one an axis:

    v vocabulary    h hidden    q heads x head size    k key-value heads x head size    d head size
    f feed-forward  m an expert's feed-forward         e experts

How the HF tensors combine is one of three layouts:

    same      one HF tensor, unchanged
    qkv       q, k, v interleaved by query group: [group][queries of the group, key, value][head size]
    gate_up   gate over up
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlsys.errors import UserError

Layout = Literal["same", "qkv", "gate_up"]


@dataclass(frozen=True)
class Rule:
    """`megatron` is made of the tensors in `hf` (name -> letters of its shape), combined by `layout`.

    `cut` is the axis along which tensor-parallel ranks share it (an expert's: expert-tensor-parallel ranks);
    None: every rank holds all of it.
    """

    megatron: str
    hf: dict[str, str]
    layout: Layout = "same"
    cut: Literal[0, 1] | None = None

    @property
    def per_layer(self) -> bool:
        return "{l}" in self.megatron

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.megatron


@dataclass(frozen=True)
class Family:
    """One architecture.

    `fused`: other names under which a folder may hold all experts of a layer in one tensor, and the per-expert
    tensors that are its equal parts along the axis after the experts'.
    `defaults`: what config.json means where it leaves a field out.
    """

    architecture: str
    rules: tuple[Rule, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    moe: bool = False
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)


_M, _H = "decoder.layers.{l}.", "model.layers.{l}."
_EMBEDDING = (Rule("embedding.word_embeddings.weight", {"model.embed_tokens.weight": "vh"}, cut=0),)
_HEAD = (
    Rule("decoder.final_layernorm.weight", {"model.norm.weight": "h"}),
    Rule("output_layer.weight", {"lm_head.weight": "vh"}, cut=0),
)
_ATTENTION = (
    Rule(_M + "input_layernorm.weight", {_H + "input_layernorm.weight": "h"}),
    Rule(
        _M + "self_attention.linear_qkv.weight",
        {
            _H + "self_attn.q_proj.weight": "qh",
            _H + "self_attn.k_proj.weight": "kh",
            _H + "self_attn.v_proj.weight": "kh",
        },
        "qkv",
        cut=0,
    ),
    Rule(_M + "self_attention.linear_proj.weight", {_H + "self_attn.o_proj.weight": "hq"}, cut=1),
    Rule(_M + "pre_mlp_layernorm.weight", {_H + "post_attention_layernorm.weight": "h"}),
)
_QK_NORM = (
    Rule(_M + "self_attention.q_layernorm.weight", {_H + "self_attn.q_norm.weight": "d"}),
    Rule(_M + "self_attention.k_layernorm.weight", {_H + "self_attn.k_norm.weight": "d"}),
)
_DENSE = (
    Rule(
        _M + "mlp.linear_fc1.weight",
        {_H + "mlp.gate_proj.weight": "fh", _H + "mlp.up_proj.weight": "fh"},
        "gate_up",
        cut=0,
    ),
    Rule(_M + "mlp.linear_fc2.weight", {_H + "mlp.down_proj.weight": "hf"}, cut=1),
)
_GATE, _UP, _DOWN = (_H + f"mlp.experts.{{e}}.{x}_proj.weight" for x in ("gate", "up", "down"))
_EXPERT = _M + "mlp.experts.local_experts.{e}."
_MOE = (
    Rule(_M + "mlp.router.weight", {_H + "mlp.gate.weight": "eh"}),
    Rule(_EXPERT + "linear_fc1.weight", {_GATE: "mh", _UP: "mh"}, "gate_up", cut=0),
    Rule(_EXPERT + "linear_fc2.weight", {_DOWN: "hm"}, cut=1),
)
_FUSED = {_H + "mlp.experts.gate_up_proj": (_GATE, _UP), _H + "mlp.experts.down_proj": (_DOWN,)}

_QWEN3 = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "head_dim": 128}

FAMILIES: dict[str, Family] = {
    f.architecture: f
    for f in (
        Family(
            "Qwen3MoeForCausalLM",
            _EMBEDDING + _ATTENTION + _QK_NORM + _MOE + _HEAD,
            qk_norm=True,
            moe=True,
            fused=_FUSED,
            defaults={**_QWEN3, "head_dim": None, "norm_topk_prob": False},
        ),
        Family(
            "Qwen3ForCausalLM",
            _EMBEDDING + _ATTENTION + _QK_NORM + _DENSE + _HEAD,
            qk_norm=True,
            defaults=_QWEN3,
        ),
    )
}


def family_of(architecture: str) -> Family:
    """Raises UserError when there is no table for this architecture."""
    if architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"config.json: architecture {architecture!r} has no conversion table; known: {known}")
    return FAMILIES[architecture]
