"""ONE name table per model family, read in both directions: Hugging Face <-> Megatron-Core's GPTModel.

A `Rule` pairs one Megatron parameter (names of the local layer spec) with the HF tensors that make it up.
`{l}` is the layer, `{e}` the expert. The HF shape is spelt in letters, one an axis:

    v vocabulary    h hidden    q heads x head size    k key-value heads x head size    d head size
    f feed-forward  m an expert's feed-forward         e experts                        s shared experts' feed-forward

and for multi-head latent attention (DeepSeek-V2, section 2.1), with n + r the head size of queries and keys without
and with position, and w that of values:

    a rank of queries          b heads x (n + r)        c rank of keys and values
    p c and the shared r       x heads x (n + w)        o heads x w

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
Feature = Literal["dense", "moe", "qk_norm", "qkv_bias", "q_rank", "q_full"]


@dataclass(frozen=True)
class Rule:
    """`megatron` is made of the tensors in `hf` (name -> letters of its shape), combined by `layout`.

    `cut` is the axis along which tensor-parallel ranks share it (an expert's: expert-tensor-parallel ranks);
    None: every rank holds all of it. `only`: it exists in layers, or in models, that have this feature.
    """

    megatron: str
    hf: dict[str, str]
    layout: Layout = "same"
    cut: Literal[0, 1] | None = None
    only: Feature | None = None

    @property
    def per_layer(self) -> bool:
        return "{l}" in self.megatron

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.megatron


@dataclass(frozen=True)
class Family:
    """One architecture.

    `fields`: our word for a field of config.json -> the family's, where they differ.
    `defaults`: what config.json means where it leaves a field out.
    `allowed`: fields that change what the model computes, and their values that we can compute.
    `other_names`: names under which a folder may also hold tensors of the table: one for the experts of a layer in
    one tensor (their equal parts along the axis after the experts'), or simply another one.
    """

    architecture: str
    rules: tuple[Rule, ...]
    moe: bool = False
    mla: bool = False
    sigmoid: bool = False
    fields: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    allowed: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    other_names: dict[str, tuple[str, ...]] = field(default_factory=dict)


_M, _H = "decoder.layers.{l}.", "model.layers.{l}."
_QKV = tuple(_H + f"self_attn.{x}_proj." for x in "qkv")
_EMBEDDING = (Rule("embedding.word_embeddings.weight", {"model.embed_tokens.weight": "vh"}, cut=0),)
_HEAD = (
    Rule("decoder.final_layernorm.weight", {"model.norm.weight": "h"}),
    Rule("output_layer.weight", {"lm_head.weight": "vh"}, cut=0),
)
_NORMS = (
    Rule(_M + "input_layernorm.weight", {_H + "input_layernorm.weight": "h"}),
    Rule(_M + "pre_mlp_layernorm.weight", {_H + "post_attention_layernorm.weight": "h"}),
)
_OUT = _H + "self_attn.o_proj.weight"
_ATTENTION = (
    Rule(
        _M + "self_attention.linear_qkv.weight",
        dict(zip((n + "weight" for n in _QKV), ("qh", "kh", "kh"), strict=True)),
        "qkv",
        cut=0,
    ),
    Rule(
        _M + "self_attention.linear_qkv.bias",
        dict(zip((n + "bias" for n in _QKV), "qkk", strict=True)),
        "qkv",
        cut=0,
        only="qkv_bias",
    ),
    Rule(_M + "self_attention.linear_proj.weight", {_OUT: "hq"}, cut=1),
    Rule(_M + "self_attention.q_layernorm.weight", {_H + "self_attn.q_norm.weight": "d"}, only="qk_norm"),
    Rule(_M + "self_attention.k_layernorm.weight", {_H + "self_attn.k_norm.weight": "d"}, only="qk_norm"),
)


def _latent(megatron: str, hf: str, shape: str, **more: Any) -> Rule:
    return Rule(f"{_M}self_attention.{megatron}.weight", {f"{_H}self_attn.{hf}.weight": shape}, **more)


_LATENT_ATTENTION = (
    _latent("linear_q_proj", "q_proj", "bh", cut=0, only="q_full"),
    _latent("linear_q_down_proj", "q_a_proj", "ah", only="q_rank"),
    _latent("q_layernorm", "q_a_layernorm", "a", only="q_rank"),
    _latent("linear_q_up_proj", "q_b_proj", "ba", cut=0, only="q_rank"),
    _latent("linear_kv_down_proj", "kv_a_proj_with_mqa", "ph"),
    _latent("kv_layernorm", "kv_a_layernorm", "c"),
    _latent("linear_kv_up_proj", "kv_b_proj", "xc", cut=0),
    _latent("linear_proj", "o_proj", "ho", cut=1),
)


def _mlp(
    megatron: str, hf: str, letter: str, only: Feature, names: str = "gate_proj up_proj down_proj"
) -> Any:
    """A gated feed-forward block of any kind."""
    gate, up, down = (f"{_H}{hf}.{x}.weight" for x in names.split())
    return (
        Rule(
            f"{_M}{megatron}.linear_fc1.weight",
            {gate: letter + "h", up: letter + "h"},
            "gate_up",
            cut=0,
            only=only,
        ),
        Rule(f"{_M}{megatron}.linear_fc2.weight", {down: "h" + letter}, cut=1, only=only),
    )


_DENSE = _mlp("mlp", "mlp", "f", "dense")
_ROUTER = (Rule(_M + "mlp.router.weight", {_H + "mlp.gate.weight": "eh"}, only="moe"),)
_BIAS = (Rule(_M + "mlp.router.expert_bias", {_H + "mlp.gate.e_score_correction_bias": "e"}, only="moe"),)
_EXPERTS = _mlp("mlp.experts.local_experts.{e}", "mlp.experts.{e}", "m", "moe")
_SHARED = _mlp("mlp.shared_experts", "mlp.shared_experts", "s", "moe")
_MOE = _ROUTER + _EXPERTS


def _fused(experts: str, gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """All experts of a layer in two tensors, as transformers 5 holds them."""
    gate, up, down = (f"{_H}{experts}.{{e}}.{x}.weight" for x in (gate, up, down))
    return {_H + "mlp.experts.gate_up_proj": (gate, up), _H + "mlp.experts.down_proj": (down,)}


_FUSED = _fused("mlp.experts", "gate_proj", "up_proj", "down_proj")

_MIXTRAL = "block_sparse_moe"
_MIXTRAL_GATE = f"{_H}{_MIXTRAL}.gate.weight"
_MIXTRAL_MOE = (
    Rule(_M + "mlp.router.weight", {_MIXTRAL_GATE: "eh"}, only="moe"),
    *_mlp("mlp.experts.local_experts.{e}", _MIXTRAL + ".experts.{e}", "m", "moe", "w1 w3 w2"),
)

_PLAIN = {"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)}
_COMMON = {
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "qk_norm": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "norm_topk_prob": True,
}
_QWEN3 = {**_COMMON, "qk_norm": True}
_SIGMOID = {
    **_COMMON,
    "routed_scaling_factor": 1.0,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
_SIGMOID_ALLOWED = {
    **_PLAIN,
    "norm_topk_prob": (True,),  # megatron always normalises sigmoid scores
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}

FAMILIES: dict[str, Family] = {
    f.architecture: f
    for f in (
        Family(
            "Qwen3MoeForCausalLM",
            _EMBEDDING + _NORMS + _ATTENTION + _MOE + _DENSE + _HEAD,
            moe=True,
            defaults={**_QWEN3, "head_dim": None, "norm_topk_prob": False},
            allowed=_PLAIN,
            other_names=_FUSED,
        ),
        Family(
            "Qwen3ForCausalLM",
            _EMBEDDING + _NORMS + _ATTENTION + _DENSE + _HEAD,
            defaults={**_QWEN3, "head_dim": 128},
            allowed=_PLAIN,
        ),
        Family(
            "Qwen2ForCausalLM",
            _EMBEDDING + _NORMS + _ATTENTION + _DENSE + _HEAD,
            defaults={**_COMMON, "attention_bias": True},
            allowed={**_PLAIN, "attention_bias": (True,)},
        ),
        Family(
            "LlamaForCausalLM",
            _EMBEDDING + _NORMS + _ATTENTION + _DENSE + _HEAD,
            defaults={**_COMMON, "mlp_bias": False},
            allowed={**_PLAIN, "mlp_bias": (False,)},
        ),
        Family(
            "MixtralForCausalLM",
            _EMBEDDING + _NORMS + _ATTENTION + _MIXTRAL_MOE + _HEAD,
            moe=True,
            fields={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
            defaults={**_COMMON, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
            allowed={**_PLAIN, "sliding_window": (None,)},
            other_names=_fused(_MIXTRAL + ".experts", "w1", "w3", "w2")
            | {_H + "mlp.gate.weight": (_MIXTRAL_GATE,)},
        ),
        Family(
            "DeepseekV3ForCausalLM",
            _EMBEDDING + _NORMS + _LATENT_ATTENTION + _DENSE + _ROUTER + _BIAS + _EXPERTS + _SHARED + _HEAD,
            moe=True,
            mla=True,
            sigmoid=True,
            fields={"num_experts": "n_routed_experts"},
            defaults={**_SIGMOID, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "n_group": 8,
                      "topk_group": 4, "rope_interleave": True},
            allowed={**_SIGMOID_ALLOWED, "rope_interleave": (True,)},
            other_names=_FUSED,
        ),
        Family(
            "Glm4MoeForCausalLM",
            _EMBEDDING + _NORMS + _ATTENTION + _DENSE + _ROUTER + _BIAS + _EXPERTS + _SHARED + _HEAD,
            moe=True,
            sigmoid=True,
            fields={"num_experts": "n_routed_experts", "qk_norm": "use_qk_norm"},
            defaults={**_SIGMOID, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "n_group": 1,
                      "topk_group": 1, "partial_rotary_factor": 0.5},
            allowed={**_SIGMOID_ALLOWED, "attention_bias": (False, True)},
            other_names=_FUSED,
        ),
    )
}  # fmt: skip


def family_of(architecture: str) -> Family:
    """Raises UserError when there is no table for this architecture."""
    if architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"config.json: architecture {architecture!r} has no conversion table; known: {known}")
    return FAMILIES[architecture]
