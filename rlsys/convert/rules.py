"""Types of the name tables: Rule, Stack and Family. No torch.

A `Rule` relates a Megatron parameter, by its name in Megatron's own layers, to the Hugging Face tensors of which it
consists. In names, `{l}` stands for the layer and `{e}` for the expert. The shape of a Hugging Face tensor is a
string with one letter per axis:

    v   vocabulary size
    h   hidden size
    n   heads
    d   head size
    q   heads x head size
    k   key-value heads x head size
    f   feed-forward size
    m   feed-forward size of an expert
    s   feed-forward size of the shared experts
    e   experts
    1   1
    t   2 x hidden size

For multi-head latent attention (DeepSeek-V2, section 2.1), a head has queries and keys of size n without and r with
rotary embedding, and values of size w:

    a   rank of queries
    b   heads x (n + r)
    c   rank of keys and values
    p   c + r, because all heads share the r elements of the keys
    x   heads x (n + w)
    o   heads x w

For gated delta nets and gated attention (Qwen3-Next), key heads have size p and value heads have size w:

    g   2 x key heads x p + 2 x value heads x w, for queries, keys, values and the values' gates
    j   2 x value heads
    t   value heads
    u   2 x key heads x p + value heads x w, the channels of the convolution
    w   width of the convolution
    y   w
    z   value heads x w
    r   2 x heads x head size, for queries and gates of attention

The layout of a rule defines how the Hugging Face tensors are combined (rlsys/convert/layout.py):

    same         one tensor, unchanged
    qkv          queries, keys and values by key-value group: [group][queries of the group, key, value][head size]
    gated_qkv    as qkv, for queries with gates: [group][queries, their gates, key, value][head size]
    by_key_head  channels of queries, keys and values by key head: [key head][query, key, its values][size]
    gate_up      gate, then up
    vocabulary   one tensor, followed by rows of zeros for padding
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Layout = Literal["same", "qkv", "gated_qkv", "by_key_head", "gate_up", "vocabulary"]
TABLE_PREFIX = "model."
"""Prefix of the model's names in the name table."""
Feature = Literal["dense", "moe", "qk_norm", "qkv_bias", "q_rank", "q_full", "full", "linear", "shared"]
"""Property of a model or a layer that determines which rules apply to it."""


@dataclass(frozen=True)
class Rule:
    """Rule of the name table for a Megatron parameter.

    Attributes:
        megatron: Name of the parameter in Megatron.
        hf: Letters of the shape of each Hugging Face tensor of the parameter, by name.
        layout: Layout of these tensors in the parameter.
        shard_axis: Axis along which tensor-parallel ranks, or expert-tensor-parallel ranks for an expert, shard the
            parameter; None: every rank holds the whole parameter.
        only: Feature that a layer or the model must have; None: the rule always applies.
        engine_name: Name in SGLang; "": the name of the folder, or derived from it (table.engine_name_of).
        engine_dtype: Type in SGLang; None: the type of the model.
    """

    megatron: str
    hf: dict[str, str]
    layout: Layout = "same"
    shard_axis: Literal[0, 1] | None = None
    only: Feature | None = None
    engine_name: str = ""
    engine_dtype: Literal["bfloat16", "float32"] | None = None

    @property
    def per_layer(self) -> bool:
        """Whether each layer has such a parameter."""
        return "{l}" in self.megatron

    @property
    def per_expert(self) -> bool:
        """Whether each expert has such a parameter."""
        return "{e}" in self.megatron


@dataclass(frozen=True)
class Stack:
    """Tensor of a family's folders and of engines that contains all experts of a layer.

    In folders, n parts `[out, in]` of each expert are transposed and joined to `[experts, in, n out]`, and n biases
    `[out]` to `[experts, n out]`. SGLang has weights `[experts, n out, in]`.

    Attributes:
        parts: Names of an expert's tensors in the name table.
        engine: Last part of the name in SGLang.
        shard_axis: Axis of SGLang's tensor that tensor-parallel ranks shard; None: every rank holds all of it.
        interleaved: Whether rows of the parts alternate; otherwise one part follows the other.
    """

    parts: tuple[str, ...]
    engine: str
    shard_axis: int | None
    interleaved: bool = True

    @property
    def sections(self) -> int:
        """Number of separately sharded sections of SGLang's tensor along its shard axis."""
        return 1 if self.interleaved else len(self.parts)


@dataclass(frozen=True)
class Family:
    """Model family: an architecture of Hugging Face models.

    Attributes:
        architecture: Name in config.json.
        rules: The name table.
        moe: Whether layers have experts.
        mla: Whether attention is multi-head latent attention.
        sigmoid: Whether the scores of experts are sigmoids.
        biased: Whether experts are selected by the sum of score and bias.
        group_worth: Number of best experts whose scores are summed to the value of a group of experts.
        head_norms: Whether queries and keys are normalised over all heads together.
        windowed: Whether some layers have windowed attention (`layer_types`, `sliding_window`).
        delta_net: Whether some layers have gated delta nets (`layer_types`, `full_attention_interval`). The weights
            of norms are then stored as the difference from 1.
        yarn: Whether rotary frequencies may be scaled by yarn; with latent attention they always may.
        part_of_more: Whether the model is the language part of a model with several parts, whose config.json contains
            the fields under `text_config`.
        prefix: Prefix in folders of the names that begin with `model.` in the name table and in engines.
        carried: Prefixes of names of tensors that are copied unchanged (rlsys.convert.carried).
        fields: The family's names of fields of config.json, by the common name, if they differ.
        defaults: Values of fields that config.json may omit.
        allowed: Supported values of fields that change the computation.
        other_names: Names in the name table of tensors that folders may store under an alternative name, by this
            name. Several names, with {e}, are equal parts, along the second axis, of a tensor with all experts.
        stacks: Tensors that contain all experts of a layer in folders and engines, by name.
        megatron: (fields of config.json) -> additional fields of Megatron's TransformerConfig, which override others.
            Activation functions are given by name.
        mtp: Rules that an MTP layer has in addition to those of a layer; empty: MTP layers cannot be trained.
    """

    architecture: str
    rules: tuple[Rule, ...]
    moe: bool = False
    mla: bool = False
    sigmoid: bool = False
    biased: bool = False
    group_worth: int = 2
    head_norms: bool = False
    windowed: bool = False
    delta_net: bool = False
    yarn: bool = False
    part_of_more: bool = False
    prefix: str = TABLE_PREFIX
    carried: tuple[str, ...] = ()
    fields: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    allowed: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    other_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    stacks: dict[str, Stack] = field(default_factory=dict)
    megatron: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda raw: {}
    mtp: tuple[Rule, ...] = ()
