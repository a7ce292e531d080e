"""Types of the name tables: Rule, Stack and Family. No torch.

A `Rule` pairs one Megatron parameter (names of the local layer spec) with the HF tensors that make it up.
`{l}` is the layer, `{e}` the expert. The HF shape is spelt in letters, one an axis:

    v vocabulary    h hidden    q heads x head size    k key-value heads x head size    d head size    n heads
    f feed-forward  m an expert's feed-forward         e experts                        s shared experts' feed-forward
    1 one           t twice h

and for multi-head latent attention (DeepSeek-V2, section 2.1), with n + r the head size of queries and keys without
and with position, and w that of values:

    a rank of queries          b heads x (n + r)        c rank of keys and values
    p c and the shared r       x heads x (n + w)        o heads x w

and for gated delta nets and gated attention (Qwen3-Next), with key heads of size p, and value heads of size w:

    g both projections of keys' and values' sizes    j 2 x value heads    t value heads    z value heads x w
    u 2 x key heads x p + value heads x w, the channels of a convolution of width w         y w
    r 2 x heads x head size, queries and gates

How the HF tensors combine is one of the layouts of rlsys/convert/layout.py:

    same      one HF tensor, unchanged
    qkv       q, k, v interleaved by query group: [group][queries of the group, key, value][head size]
    gated_qkv the same of queries with a gate beside each head: [group][queries, their gates, key, value][head size]
    by_key_head  channels of queries, keys and values: [key head][query, key, its values][size]
    gate_up   gate over up
    vocabulary  one HF tensor, with rows of zeros behind it for ids that are not there
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Layout = Literal["same", "qkv", "gated_qkv", "by_key_head", "gate_up", "vocabulary"]
TABLE_PREFIX = "model."
Feature = Literal["dense", "moe", "qk_norm", "qkv_bias", "q_rank", "q_full", "full", "linear", "shared"]


@dataclass(frozen=True)
class Rule:
    """Rule of the name table: the parameter `megatron` is composed of the tensors in `hf` by `layout`.

    Attributes:
        hf: Hugging Face name -> letters of its shape.
        shard_axis: axis along which tensor-parallel ranks share it (expert-tensor-parallel ranks for an expert);
            None: every rank holds the whole parameter.
        only: the feature of a layer, or of a model, that it requires.
        engine_name: SGLang's name, where it is neither the folder's nor derived by rlsys/weights/checksums.py.
        engine_dtype: SGLang's type, where it is independent of the model's.
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
        return "{l}" in self.megatron

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.megatron


@dataclass(frozen=True)
class Stack:
    """Tensor of a family's folders and engines that holds all experts of a layer.

    n parts `[out, in]` are transposed and joined to `[experts, in, n out]`, n biases `[out]` to `[experts, n out]`.

    Attributes:
        parts: an expert's tensors of the table.
        engine: the end of SGLang's name, where the weights are `[experts, n out, in]`.
        shard_axis: the axis of SGLang's tensor that tensor-parallel ranks share.
        interleaved: whether the parts alternate; else one part follows the other.
    """

    parts: tuple[str, ...]
    engine: str
    shard_axis: int | None
    interleaved: bool = True

    @property
    def sections(self) -> int:
        """Sections of the engine's tensor along its shard axis, each of which is sharded separately."""
        return 1 if self.interleaved else len(self.parts)


@dataclass(frozen=True)
class Family:
    """One architecture.

    `fields`: our word for a field of config.json -> the family's, where they differ.
    `defaults`: what config.json means where it leaves a field out.
    `allowed`: fields that change what the model computes, and their values that we can compute.
    `other_names`: names under which a folder may also hold tensors of the table: one for the experts of a layer in
    one tensor (their equal parts along the axis after the experts'), or simply another one.
    `stacks`: names under which folders and engines do hold experts' tensors of the table.
    `megatron`: config.json in our words -> more fields of megatron's TransformerConfig, which win over the others. An
    activation is told by its name.
    `head_norms`: queries and keys are normalised over all heads together.
    `biased`: experts are chosen by score + bias.
    `group_worth`: a group of experts is worth its so many best ones together.
    `windowed`: some layers attend to the last tokens only (`layer_types`, `sliding_window`).
    `delta_net`: some layers have a gated delta net (`layer_types`, `full_attention_interval`), and norms are kept as
    their distance from 1.
    `yarn`: rotary frequencies may be scaled by yarn; latent attention's may be in any case.
    `part_of_more`: the model is the language part of one with a vision tower: its fields are under `text_config`.
    `prefix`: how folders begin the names that begin with `model.` in the table, and in engines.
    `carried`: how names of tensors begin that go along unchanged (rlsys.convert.carried).
    `mtp`: what a layer for multi-token prediction has beside a whole layer; empty: such layers cannot be trained.
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
