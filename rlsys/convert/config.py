"""Reader of config.json, which validates the fields of all model families and converts them to common names."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from rlsys.config.precision import BLOCK
from rlsys.convert.families import family_of
from rlsys.convert.rope import Rope, read_rope, rope_fields
from rlsys.convert.rules import TABLE_PREFIX, Family, Feature, Rule
from rlsys.core.errors import UserError
from rlsys.core.model_folder import language_part

VOCABULARY_STEP = 8
"""Maximum number of tensor-parallel ranks that can shard a vocabulary of any size."""


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, section 2.1).

    Attributes:
        q_rank: Rank of the compressed queries; None: queries are not compressed.
        kv_rank: Rank of the compressed keys and values.
        plain: Size of the part of a head's query and key without rotary embedding.
        rotary: Size of the part with rotary embedding.
        value: Size of a head's value.
    """

    q_rank: int | None
    kv_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a gated delta net (Qwen3-Next). `width`: number of tokens in the convolution's window."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int

    @property
    def sections(self) -> list[int]:
        """Numbers of channels of the queries, the keys and the values."""
        return [self.key_heads * self.key_size] * 2 + [self.value_heads * self.value_size]

    @property
    def convolved(self) -> int:
        """Number of channels of the convolution."""
        return sum(self.sections)

    @property
    def projected(self) -> int:
        """Number of channels of queries, keys, values and the gates of values."""
        return self.convolved + self.value_heads * self.value_size


@dataclass(frozen=True)
class Routing:
    """Routing of a token to its experts.

    Attributes:
        kind: Scores of experts: a softmax over all experts, or a sigmoid of each logit (DeepSeek-V3, section 2.1.2).
        normalised: Whether the weights of the selected experts are their scores divided by the sum of these scores;
            otherwise they are the scores.
        groups: Number of groups of experts. If above 1, experts are selected only from the best groups.
        top_groups: Number of best groups.
        scale: Factor of the weights.
        biased: Whether experts are selected by the sum of score and bias.
        group_worth: The value of a group is the sum of the scores of its `group_worth` best experts.
    """

    kind: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    biased: bool = False
    group_worth: int = 2


_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Fields of config.json that contain the language model's fields in models with several parts."""


@dataclass(frozen=True)
class HFConfig:
    """Fields of config.json that determine the architecture. Sizes are numbers of elements.

    Attributes:
        kv_heads: Number of key-value heads.
        ffn_size: Hidden size of dense feed-forward blocks.
        tied: Whether the head's weight is that of the embedding.
        context_length: Maximum number of tokens of a sequence.
        qk_norm: Whether queries and keys are normalised.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        moe_layers: Whether each layer has experts.
        megatron: Additional fields of Megatron's TransformerConfig.
        expert_ffn_size: Hidden size of an expert.
        shared_ffn_size: Hidden size of the shared experts together; 0: there are none.
        latent: Sizes of latent attention; None: the model has no latent attention.
        prediction_layers: Number of layers for multi-token prediction (MTP) after the last layer.
        mtp: Whether the MTP layers are trained; otherwise they are copied unchanged (rlsys.convert.carried).
        quantised: Format of the folder's weights (rlsys.convert.quantised); "": they are not quantised.
        window: Number of tokens to which a query attends, including its own, in windowed layers.
        windowed_layers: Whether each layer is windowed; empty: none is.
        delta: Sizes of the gated delta nets; None: the model has none.
        linear_layers: Whether each layer has a gated delta net in place of attention; empty: none has.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    rope: Rope
    norm_eps: float
    tied: bool
    context_length: int
    qk_norm: bool
    qkv_bias: bool
    moe_layers: tuple[bool, ...]
    megatron: dict[str, Any]
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    shared_ffn_size: int = 0
    routing: Routing = Routing()
    latent: LatentAttention | None = None
    prediction_layers: int = 0
    mtp: bool = False
    quantised: Literal["", "mxfp4", "fp8"] = ""
    window: int = 0
    windowed_layers: tuple[bool, ...] = ()
    delta: DeltaSizes | None = None
    linear_layers: tuple[bool, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> HFConfig:
        """Read config.json of a folder.

        Raises:
            UserError: The file cannot be read, a field has a value that rlsys does not support, or the weights have
                an unsupported quantisation.
        """
        file = folder / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except OSError as e:
            raise UserError(f"{file}: cannot be read: {e.strerror}") from None
        except (ValueError, RecursionError) as e:
            raise UserError(f"{file}: not readable as JSON: {e}") from None
        if not isinstance(raw, dict):
            raise UserError(f"{file}: expected a JSON object, found {type(raw).__name__}")
        config = cls.of(raw, str(file))
        if (quantisation_file := folder / _MODELOPT_FILE).is_file() and not config.quantised:
            raise UserError(
                f"{quantisation_file}: the weights are quantised ({_quantiser(quantisation_file)}); {_READABLE_TYPES}"
            )
        return config

    @classmethod
    def of(cls, raw: dict[str, Any], source: str) -> HFConfig:
        """Convert the content of config.json.

        Args:
            raw: The content.
            source: Path of the file, for errors.

        Raises:
            UserError: A field is missing or has a value that rlsys does not support.
        """
        architectures = raw.get("architectures") or ["?"]
        if not isinstance(architectures, list) or not isinstance(architectures[0], str):
            raise UserError(f"{source}: architectures = {architectures!r:.80}: expected a list with one name")
        family = family_of(architectures[0])
        if not family.part_of_more:
            _check_no_parts(raw, family, source)
        fields = _normalise_fields(language_part(raw, source) if family.part_of_more else raw, family, source)
        part = raw["text_config"] if family.part_of_more else raw
        # A missing size has the family's default, but null means: as many key-value heads as heads, no query rank, or
        # no shared experts.
        null_sizes = {name: None for name in _NULLABLE if name in part and name not in fields}
        raw = {**family.defaults, **fields, **null_sizes}
        _check_numbers(raw, family, source)
        _check_supported(raw, family, source)
        try:
            _check_layer_kinds(raw, fields, family, source)
            heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
            return cls(
                family=family,
                vocab_size=raw["vocab_size"],
                hidden_size=hidden,
                layers=raw["num_hidden_layers"],
                heads=heads,
                kv_heads=raw.get("num_key_value_heads") or heads,
                head_dim=raw.get("head_dim") or hidden // heads,
                ffn_size=raw["intermediate_size"],
                rope=read_rope(raw, family, source),
                norm_eps=raw["rms_norm_eps"],
                tied=raw["tie_word_embeddings"],
                context_length=raw["max_position_embeddings"],
                qk_norm=raw["qk_norm"],
                qkv_bias=raw["attention_bias"],
                moe_layers=_moe_layers(raw, family, source),
                latent=_latent(raw) if family.mla else None,
                prediction_layers=raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers", 0)),
                megatron=family.megatron(raw),
                quantised=_quantised(raw, family, source),
                **_windows(raw, family, source),
                **(_delta_net(raw, source) if family.delta_net else {}),
                **(_experts(raw, family) if family.moe else {}),
            )
        except KeyError as e:
            raise UserError(f"{source}: field {e} is missing") from None

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of Megatron's embedding and head.

        It does not depend on the layout, so that checkpoints have the same shape in all layouts. The rows after the
        vocabulary are 0, and no token uses them.
        """
        return -(-self.vocab_size // VOCABULARY_STEP) * VOCABULARY_STEP

    def in_folder(self, name: str) -> str:
        """Convert a tensor's name in the name table to its name in the family's model folders."""
        prefix = self.family.prefix
        return prefix + name.removeprefix(TABLE_PREFIX) if name.startswith(TABLE_PREFIX) else name

    def in_table(self, name: str) -> str:
        """Convert a tensor's name in the family's model folders to its name in the name table."""
        prefix = self.family.prefix
        return TABLE_PREFIX + name.removeprefix(prefix) if name.startswith(prefix) else name

    @property
    def features(self) -> frozenset[Feature]:
        """Features that all layers share. With the features of a layer, they select its rules (see `rules`)."""
        queries: Feature = "q_rank" if self.latent is not None and self.latent.q_rank else "q_full"
        is_present: dict[Feature, bool] = {"qk_norm": self.qk_norm, "qkv_bias": self.qkv_bias, queries: True}
        return frozenset(name for name, present in is_present.items() if present)

    def rules(self, layer: int) -> list[Rule]:
        """Return the rules of layer `layer`. Layers for multi-token prediction are of the last layer's kind."""
        model_layer = min(layer, self.layers - 1)
        kind: Feature = "moe" if self.moe_layers[model_layer] else "dense"
        attention: Feature = "linear" if self.linear_layers and self.linear_layers[model_layer] else "full"
        features: set[Feature | None] = {*self.features, kind, attention, None}
        if kind == "moe" and self.shared_ffn_size:
            features.add("shared")
        return [r for r in self.family.rules if r.per_layer and r.only in features]

    def shape(self, letters: str) -> tuple[int, ...]:
        """Return the Hugging Face shape that `letters` of the name table denote (rlsys.convert.rules)."""
        return tuple(self._sizes[letter] for letter in letters)

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """Sizes by the letters of the name table."""
        sizes = {
            "v": self.vocab_size,
            "h": self.hidden_size,
            "q": self.heads * self.head_dim,
            "k": self.kv_heads * self.head_dim,
            "d": self.head_dim,
            "f": self.ffn_size,
            "m": self.expert_ffn_size,
            "e": self.experts,
            "s": self.shared_ffn_size,
            "n": self.heads,
            "1": 1,
            "t": 2 * self.hidden_size,
        }
        if (latent := self.latent) is not None:
            sizes |= {
                "a": latent.q_rank or 0,
                "b": self.heads * (latent.plain + latent.rotary),
                "c": latent.kv_rank,
                "p": latent.kv_rank + latent.rotary,
                "x": self.heads * (latent.plain + latent.value),
                "o": self.heads * latent.value,
            }
        if (delta := self.delta) is not None:
            sizes |= {
                "r": 2 * self.heads * self.head_dim,
                "g": delta.projected,
                "j": 2 * delta.value_heads,
                "t": delta.value_heads,
                "u": delta.convolved,
                "w": delta.width,
                "y": delta.value_size,
                "z": delta.value_heads * delta.value_size,
            }
        return sizes


_EXPERT_COUNTS = ("num_experts", "num_experts_per_tok", "n_shared_experts")
"""Fields for which transformers accepts several names in every family."""


_SHARED_EXPERTS = {"n_shared_experts", "num_shared_experts", "moe_num_shared_experts"}
"""Names of the number of shared experts."""


_NULLABLE = ("num_key_value_heads", "q_lora_rank", "shared_expert_intermediate_size")
"""Sizes in whose place null has its own meaning."""


def _check_no_parts(raw: dict[str, Any], family: Family, source: str) -> None:
    """Raise UserError if a config.json without parts has the field of a part."""
    for name in _PARTS:
        if raw.get(name) is not None:  # SGLang would use it, and transformers raises an error
            raise UserError(
                f"{source}: {name} = {raw[name]!r:.80}: expected null or no field, because {family.architecture} has "
                "no such part"
            )


def _normalise_fields(raw: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    """Return the fields that are not null, under the common names and those of the family.

    Raises:
        UserError: Two names of one field have different values, and transformers and SGLang use different ones.
    """
    values = {name: value for name, value in raw.items() if value is not None}
    for name in _SHARED_EXPERTS & raw.keys() - values.keys():
        values[name] = 0  # SGLang builds no shared experts for null
    for common_name, family_name in (*family.fields.items(), ("num_experts", "num_local_experts")):
        if family_name not in values:
            continue
        value = values[family_name]
        common_value = values.get(common_name, value)
        if common_name in _EXPERT_COUNTS and family.moe and common_value != value:
            raise UserError(
                f"{source}: {family_name} = {value!r:.80} and {common_name} = {common_value!r:.80}: expected the "
                "same value, or one of the fields"
            )
        values[common_name] = value
    return values


MAX_SIZE = 2**31 - 1
"""Maximum of a size."""
MAX_LAYERS = 10_000
"""Maximum number of layers, each of which has entries in the name table."""
MAX_EXPERTS = 1_000_000
"""Maximum number of experts in all layers together, each of which has entries in the name table."""
_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "decoder_sparse_step",
)  # fmt: skip
_EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group")
_LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DELTA_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
_COUNTS = (
    "n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers", "num_mtp_layers", "rotary_dim",
    "shared_expert_intermediate_size", "sliding_window",
)  # fmt: skip
_SWITCHES = ("tie_word_embeddings", "qk_norm", "attention_bias", "norm_topk_prob")
_POSITIVE = ("rms_norm_eps", "rope_theta", "routed_scaling_factor", "swiglu_limit")
_ROPE_POSITIVE = ("rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")


def _check_numbers(raw: dict[str, Any], family: Family, source: str) -> None:
    """Check the types and bounds of all fields that rlsys reads.

    Raises:
        UserError: A size is not a whole number, a number is not finite (Python's JSON reader accepts NaN), or a field
            is out of bounds.
    """

    def refuse(field: str, value: object, expected: str) -> NoReturn:
        raise UserError(f"{source}: {field} = {value!r:.80}: expected {expected}")

    for field, min_value, max_value in _size_bounds(family):
        value = raw.get(field)
        # HFConfig.of reports a required field that is missing.
        if value is not None and (type(value) is not int or not min_value <= value <= max_value):
            refuse(field, value, f"a whole number from {min_value} to {max_value}")
    for field in _SWITCHES:
        if not isinstance(raw[field], bool):
            refuse(field, raw[field], "true or false")
    layers = raw.get("mlp_only_layers", [])
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        refuse("mlp_only_layers", layers, "a list of layers")
    rope = rope_fields(raw, source)
    for field, value in {**raw, **rope}.items():
        if isinstance(value, float) and not math.isfinite(value):
            refuse(field, value, "a finite number")
    for values, fields in ((raw, _POSITIVE), (rope, _ROPE_POSITIVE)):
        for field in fields:
            value = values.get(field)
            if value is not None and not (_is_number(value) and 0 < value <= MAX_SIZE):
                refuse(field, value, f"a number above 0, at most {MAX_SIZE}")
    for field in ("mscale", "mscale_all_dim"):
        if not (_is_number(value := rope.get(field) or 0) and abs(value) <= MAX_SIZE):
            refuse(f"rope {field}", value, "a number")
    _check_divisions(raw, family, refuse)


def _size_bounds(family: Family) -> Iterator[tuple[str, int, int]]:
    """Yield (field, minimum, maximum) of the whole numbers in the family's config.json."""
    sizes = [*_SIZES]
    if family.moe:
        sizes += _EXPERT_SIZES
    if family.mla:
        sizes += _LATENT_SIZES
    if family.delta_net:
        sizes += [*_DELTA_SIZES, "full_attention_interval"]
    for field in sizes:
        yield field, 1, MAX_LAYERS if field == "num_hidden_layers" else MAX_SIZE
    for field in _COUNTS:
        yield field, 0, MAX_SIZE


def _check_divisions(
    raw: dict[str, Any], family: Family, refuse: Callable[[str, object, str], NoReturn]
) -> None:
    """Check the relations between sizes.

    Args:
        raw: The normalised fields.
        family: The family.
        refuse: (field, value, expectation): raises UserError.
    """
    heads, groups = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if heads and groups and heads % groups and not family.mla:
        refuse("num_key_value_heads", groups, f"a divisor of num_attention_heads = {heads}")
    if heads and not raw.get("head_dim") and heads > raw.get("hidden_size", heads):
        refuse("num_attention_heads", heads, f"at most hidden_size = {raw['hidden_size']}, or a head_dim")
    if not family.moe:
        return
    experts, experts_per_token = raw.get("num_experts", 0), raw.get("num_experts_per_tok", 0)
    if experts * (layers := raw.get("num_hidden_layers", 1)) > MAX_EXPERTS:
        refuse("num_experts", experts, f"at most {MAX_EXPERTS} in all {layers} layers")
    if experts_per_token > experts:
        refuse("num_experts_per_tok", experts_per_token, f"at most num_experts = {experts}")
    if experts_per_token == 1 and (family.sigmoid or raw["norm_topk_prob"]):
        field = family.fields.get("num_experts_per_tok", "num_experts_per_tok")
        refuse(
            field,
            1,
            "at least 2, or norm_topk_prob = false: the normalised weight of a single expert is always 1, so the "
            "router would not learn",
        )
    groups, top = raw.get("n_group", 1), raw.get("topk_group", 1)
    if experts % groups:
        refuse("n_group", groups, f"a divisor of num_experts = {experts}")
    if top > groups:
        refuse("topk_group", top, f"at most n_group = {groups}")


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _check_supported(raw: dict[str, Any], family: Family, source: str) -> None:
    """Raise UserError for a value that would change the computation and that rlsys does not implement."""
    for field, values in family.allowed.items():
        if raw.get(field) not in values:
            expected = " or ".join(repr(v) for v in values)
            raise UserError(
                f"{source}: {field} = {raw.get(field)!r:.80} is not supported; expected {expected}"
            )


_MODELOPT_FILE = "hf_quant_config.json"
"""File in which ModelOpt stores the quantisation of weights, instead of config.json."""
_READABLE_TYPES = (
    f"expected bfloat16 or float32, fp8 with weight_block_size = [{BLOCK}, {BLOCK}], or mxfp4 in the format of "
    "gpt-oss"
)
"""Expectation in errors about the format of weights."""


def _quantised(raw: dict[str, Any], family: Family, source: str) -> Literal["", "mxfp4", "fp8"]:
    """Return the format of quantised weights; "": the weights are not quantised.

    Raises:
        UserError: The format is not supported.
    """
    # Older versions of compressed-tensors write compression_config.
    value = raw.get("quantization_config") or raw.get("compression_config")
    if not value:
        return ""
    settings = value if isinstance(value, dict) else {"quant_method": value}
    method = settings.get("quant_method")
    if method == "mxfp4" and any(stack.interleaved for stack in family.stacks.values()):
        return "mxfp4"
    if method == "fp8" and not family.stacks and settings.get("weight_block_size") == [BLOCK, BLOCK]:
        return "fp8"
    kind = " ".join(str(method or settings.get("quant_algo")).split())[:40]
    raise UserError(f"{source}: the weights are quantised ({kind}); {_READABLE_TYPES}")


def _quantiser(file: Path) -> str:
    """Return the name of the quantisation in ModelOpt's file; "ModelOpt" if the file has none."""
    try:
        method = json.loads(file.read_text(encoding="utf-8"))["quantization"]["quant_algo"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "ModelOpt"
    return " ".join(str(method).split())[:40]


_DENSE_LAYERS = ("first_k_dense_replace", "moe_layer_end_index", "mlp_only_layers", "decoder_sparse_step")
"""Fields that determine the layers with experts without a list of all layers."""


def _check_layer_kinds(raw: dict[str, Any], fields: dict[str, Any], family: Family, source: str) -> None:
    """Check that lists of the layers' kinds agree with the fields that SGLang reads instead of them.

    Raises:
        UserError: They disagree.
    """
    if family.moe and "mlp_layer_types" in fields:
        competing_fields = [field for field in _DENSE_LAYERS if field in fields]
        _check_agreement(
            raw, "mlp_layer_types", competing_fields, lambda raw: _moe_layers(raw, family, source), source
        )
    if family.delta_net and "layer_types" in fields:
        competing_fields = [field for field in ("full_attention_interval",) if field in fields]
        _check_agreement(
            raw, "layer_types", competing_fields, lambda raw: _linear_layers(raw, source), source
        )


def _check_agreement(
    raw: dict[str, Any],
    list_field: str,
    competing_fields: Sequence[str],
    layers_of: Callable[[dict[str, Any]], tuple[bool, ...]],
    source: str,
) -> None:
    """Check that a list of the layers' kinds and the fields that compete with it determine the same layers.

    Args:
        raw: The normalised fields.
        list_field: Field with the list.
        competing_fields: Fields of config.json that determine the same layers; empty: the list competes with none.
        layers_of: Returns the layers that normalised fields determine; the list has precedence over other fields.
        source: Path of the file, for errors.

    Raises:
        UserError: The layers differ.
    """
    without_list = {field: value for field, value in raw.items() if field != list_field}
    if competing_fields and layers_of(raw) != layers_of(without_list):
        competing_values = ", ".join(f"{field} = {raw[field]!r:.80}" for field in competing_fields)
        raise UserError(
            f"{source}: {list_field} = {raw[list_field]!r:.80} and {competing_values}: expected the same layers, or "
            f"only {list_field}"
        )


def _moe_layers(raw: dict[str, Any], family: Family, source: str) -> tuple[bool, ...]:
    """Return whether each layer has experts.

    Newer folders list the kind of every layer. Otherwise DeepSeek and GLM define the number of first layers that are
    dense, Qwen lists dense layers or has experts in every n-th layer, and Ernie defines the last layer with experts.

    Raises:
        UserError: A field has an invalid value.
    """
    layers = raw["num_hidden_layers"]
    if family.moe and (kinds := raw.get("mlp_layer_types")) is not None:
        return tuple(
            kind == "sparse" for kind in _kinds(raw, "mlp_layer_types", kinds, ("dense", "sparse"), source)
        )
    first, step = raw.get("first_k_dense_replace", 0), raw.get("decoder_sparse_step", 1)
    last = raw.get("moe_layer_end_index", -1)
    if type(last) is not int or not -1 <= last < layers:
        raise UserError(
            f"{source}: moe_layer_end_index = {last!r:.80}: expected a layer, 0 to {layers - 1}, or -1 for the last"
        )
    dense = set(raw.get("mlp_only_layers", ()))
    end = last if last >= 0 else layers - 1
    return tuple(
        family.moe and first <= i <= end and i not in dense and (i + 1) % step == 0 for i in range(layers)
    )


def _windows(raw: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    """Return the fields of HFConfig for windowed attention; empty if the family has none."""
    if not family.windowed:
        return {}
    allowed = ("full_attention", "sliding_attention")
    kinds = _kinds(raw, "layer_types", raw["layer_types"], allowed, source)
    if not (window := raw.get("sliding_window")):
        raise UserError(f"{source}: sliding_window = {window!r}: expected a number of tokens above 0")
    return {"window": window, "windowed_layers": tuple(kind == "sliding_attention" for kind in kinds)}


def _delta_net(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the fields of HFConfig for gated delta nets."""
    delta = DeltaSizes(*(raw[name] for name in _DELTA_SIZES))
    if delta.value_heads % delta.key_heads:
        raise UserError(
            f"{source}: linear_num_value_heads = {delta.value_heads}: expected a multiple of linear_num_key_heads = "
            f"{delta.key_heads}"
        )
    return {"delta": delta, "linear_layers": _linear_layers(raw, source)}


def _linear_layers(raw: dict[str, Any], source: str) -> tuple[bool, ...]:
    """Return whether each layer has a gated delta net."""
    layers, interval = raw["num_hidden_layers"], raw.get("full_attention_interval", 4)
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    kinds = _kinds(raw, "layer_types", kinds, ("full_attention", "linear_attention"), source)
    return tuple(kind == "linear_attention" for kind in kinds)


def _kinds(
    raw: dict[str, Any], field: str, value: object, allowed: tuple[str, ...], source: str
) -> list[str]:
    """Return `value`, the list of the layers' kinds.

    Args:
        raw: The normalised fields.
        field: Name of the list in config.json.
        value: The list.
        allowed: Kinds that rlsys supports.
        source: Path of the file, for errors.

    Raises:
        UserError: The list does not have one allowed kind for each layer.
    """
    layers = raw["num_hidden_layers"]
    if not isinstance(value, list) or len(value) != layers or any(kind not in allowed for kind in value):
        expected = " or ".join(repr(kind) for kind in allowed)
        raise UserError(
            f"{source}: {field} = {value!r:.80}: expected a list of {layers} entries, one per layer: {expected}"
        )
    return value


def _experts(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of HFConfig for experts."""
    expert_ffn_size = raw["moe_intermediate_size"]
    shared_ffn_size = raw.get("shared_expert_intermediate_size")
    return {
        "experts": raw["num_experts"],
        "experts_per_token": raw["num_experts_per_tok"],
        "expert_ffn_size": expert_ffn_size,
        "shared_ffn_size": shared_ffn_size or raw.get("n_shared_experts", 0) * expert_ffn_size,
        "routing": _routing(raw, family),
    }


def _routing(raw: dict[str, Any], family: Family) -> Routing:
    groups, top = raw.get("n_group", 1), raw.get("topk_group", 1)
    if raw.get("topk_method") == "greedy":  # DeepSeek-V2-Lite defines groups that it does not use
        groups = top = 1
    scale = raw.get("routed_scaling_factor", 1.0)
    if family.sigmoid:
        return Routing("sigmoid", True, groups, top, scale, family.biased, family.group_worth)
    return Routing("softmax", raw["norm_topk_prob"], groups, top, scale, family.biased, family.group_worth)


def _latent(raw: dict[str, Any]) -> LatentAttention:
    return LatentAttention(
        raw.get("q_lora_rank"),
        raw["kv_lora_rank"],
        raw["qk_nope_head_dim"],
        raw["qk_rope_head_dim"],
        raw["v_head_dim"],
    )
