"""Reader of config.json: validates the fields of all model families and converts them to common names."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
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
    """Sizes of multi-head latent attention (DeepSeek-V2, section 2.1). `q_rank` None: queries are not compressed.

    `plain` and `rotary`: a head's part of queries and keys without and with position; `value`: of values.
    """

    q_rank: int | None
    kv_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a gated delta net (Qwen3-Next). `width`: tokens that its convolution sees."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int

    @property
    def sections(self) -> list[int]:
        """Channels of queries, keys and values."""
        return [self.key_heads * self.key_size] * 2 + [self.value_heads * self.value_size]

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return sum(self.sections)

    @property
    def projected(self) -> int:
        """Channels of queries, keys, values and the gates of values."""
        return self.convolved + self.value_heads * self.value_size


@dataclass(frozen=True)
class Routing:
    """Routing of a token to its experts.

    softmax: over all experts, `normalised` to sum 1 over the selected ones, times `scale`. sigmoid: weighted by the
    normalised score times `scale` (DeepSeek-V3, section 2.1.2).

    Attributes:
        groups: > 1: experts are selected from the `top_groups` best groups only.
        biased: experts are selected by score + bias.
        group_worth: the score of a group is the sum of its best `group_worth` experts.
    """

    kind: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    biased: bool = False
    group_worth: int = 2


_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Fields under which models of several parts have the language part's."""


@dataclass(frozen=True)
class HFConfig:
    """The fields of config.json that determine shapes and numbers. Sizes in elements.

    `moe_layers`: for each layer whether it has experts. `prediction_layers`: number of layers for multi-token
    prediction after the last layer. `mtp`: they are part of the model and trained; else they are copied unchanged
    (rlsys.convert.carried). `window`: tokens to which a query attends, including its own, in the layers of
    `windowed_layers`. `linear_layers`: layers with a gated delta net of the sizes `delta` instead of attention.
    `megatron`: additional fields of megatron's TransformerConfig. `quantised`: format of the folder's weights
    (rlsys.convert.quantised).
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
            UserError: a field cannot be converted faithfully; the message names it.
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
        """Convert `raw`, the content of config.json; errors name `source`."""
        architectures = raw.get("architectures") or ["?"]
        if not isinstance(architectures, list) or not isinstance(architectures[0], str):
            raise UserError(f"{source}: architectures = {architectures!r:.80}: expected a list with one name")
        family = family_of(architectures[0])
        for name in () if family.part_of_more else _PARTS:
            if raw.get(name) is not None:  # engines would read it, and transformers raises for it
                raise UserError(
                    f"{source}: {name} = {raw[name]!r:.80}: {family.architecture} has no such part; "
                    "expected null or no field"
                )
        fields = _normalise_fields(language_part(raw, source) if family.part_of_more else raw, family, source)
        part = raw["text_config"] if family.part_of_more else raw
        # A size that is null is not as if it were absent: as many as heads, no matrix, no expert.
        null_sizes = {name: None for name in _NULLABLE if name in part and name not in fields}
        raw = {**family.defaults, **fields, **null_sizes}
        _check_numbers(raw, family, source)
        _check_supported(raw, family, source)
        try:
            _check_layer_kinds(raw, fields, family, source)
            heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
            experts = {
                "experts": raw["num_experts"],
                "experts_per_token": raw["num_experts_per_tok"],
                "expert_ffn_size": raw["moe_intermediate_size"],
                "shared_ffn_size": raw.get("shared_expert_intermediate_size")
                or raw.get("n_shared_experts", 0) * raw["moe_intermediate_size"],
                "routing": _routing(raw, family),
            } if family.moe else {}  # fmt: skip
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
                **experts,
            )
        except KeyError as e:
            raise UserError(f"{source}: field {e} is missing") from None

    @property
    def padded_vocab_size(self) -> int:
        """Rows of Megatron's embedding and head.

        Independent of the layout, so that checkpoints have one shape in all layouts. The rows after the vocabulary
        are 0, and no token selects them.
        """
        return -(-self.vocab_size // VOCABULARY_STEP) * VOCABULARY_STEP

    def in_folder(self, name: str) -> str:
        """Return the family's name in folders of a tensor of the name table."""
        prefix = self.family.prefix
        return prefix + name.removeprefix(TABLE_PREFIX) if name.startswith(TABLE_PREFIX) else name

    def in_table(self, name: str) -> str:
        """Return the name in the table of a tensor of the family's folders."""
        prefix = self.family.prefix
        return TABLE_PREFIX + name.removeprefix(prefix) if name.startswith(prefix) else name

    @property
    def features(self) -> frozenset[Feature]:
        """Features that all layers share; with those of a layer, they select its rules (see `rules`)."""
        ranked: Feature = "q_rank" if self.latent is not None and self.latent.q_rank else "q_full"
        have: dict[Feature, bool] = {"qk_norm": self.qk_norm, "qkv_bias": self.qkv_bias, ranked: True}
        return frozenset(name for name, present in have.items() if present)

    def rules(self, layer: int) -> list[Rule]:
        """Return the rules of one layer. A layer for multi-token prediction has the kind of the last layer."""
        like = min(layer, self.layers - 1)
        kind: Feature = "moe" if self.moe_layers[like] else "dense"
        attention: Feature = "linear" if self.linear_layers and self.linear_layers[like] else "full"
        have: set[Feature | None] = {*self.features, kind, attention, None}
        if kind == "moe" and self.shared_ffn_size:
            have.add("shared")
        return [r for r in self.family.rules if r.per_layer and r.only in have]

    def shape(self, letters: str) -> tuple[int, ...]:
        """Return the HF shape for the `letters` of the name table (rlsys.convert.rules)."""
        return tuple(self._sizes[letter] for letter in letters)

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
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
"""Fields that transformers reads under several names, whatever the family."""


_SHARED_EXPERTS = {"n_shared_experts", "num_shared_experts", "moe_num_shared_experts"}


_NULLABLE = ("num_key_value_heads", "q_lora_rank", "shared_expert_intermediate_size")


def _normalise_fields(raw: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    """Return the fields under our names.

    Raises:
        UserError: two names of one field have different values, of which transformers and SGLang read different ones.
    """
    values = {name: value for name, value in raw.items() if value is not None}
    for name in _SHARED_EXPERTS & raw.keys() - values.keys():
        values[name] = 0  # null: SGLang builds none
    for name_here, family_name in (*family.fields.items(), ("num_experts", "num_local_experts")):
        if family_name not in values:
            continue
        if (
            name_here in _EXPERT_COUNTS
            and family.moe
            and values.get(name_here, values[family_name]) != values[family_name]
        ):
            raise UserError(
                f"{source}: {family_name} = {values[family_name]!r:.80} and {name_here} = "
                f"{values[name_here]!r:.80}: expected the same, or one of them"
            )
        values[name_here] = values[family_name]
    return values


MAX_SIZE = 2**31 - 1
"""Limit of any size; MAX_LAYERS limits the layers, which are enumerated."""
MAX_LAYERS = 10_000
MAX_EXPERTS = 1_000_000
"""Limit of all layers together: each expert has its own name."""
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
    """Reject numbers that are not finite (Python's JSON reads NaN), and sizes that are not whole numbers."""

    def refuse(field: str, value: object, expected: str) -> NoReturn:
        raise UserError(f"{source}: {field} = {value!r:.80}: expected {expected}")

    family_sizes = [
        name
        for names, present in (
            (_EXPERT_SIZES, family.moe),
            (_LATENT_SIZES, family.mla),
            ((*_DELTA_SIZES, "full_attention_interval"), family.delta_net),
        )
        if present
        for name in names
    ]
    for names, min_value in (((*_SIZES, *family_sizes), 1), (_COUNTS, 0)):
        for field in names:
            value, max_value = raw.get(field), MAX_LAYERS if field == "num_hidden_layers" else MAX_SIZE
            # A missing required field is reported when it is read.
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


def _check_divisions(
    raw: dict[str, Any], family: Family, refuse: Callable[[str, object, str], NoReturn]
) -> None:
    """Reject sizes that do not divide others as required."""
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
            "at least 2, or norm_topk_prob = false: the normalised weight of one expert is always 1, so the router "
            "would not learn, and megatron-core does not compute it",
        )
    groups, top = raw.get("n_group", 1), raw.get("topk_group", 1)
    if experts % groups:
        refuse("n_group", groups, f"a divisor of num_experts = {experts}")
    if top > groups:
        refuse("topk_group", top, f"at most n_group = {groups}")


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _check_supported(raw: dict[str, Any], family: Family, source: str) -> None:
    """Reject values that would silently change the computation."""
    for field, values in family.allowed.items():
        if raw.get(field) not in values:
            expected = " or ".join(repr(v) for v in values)
            raise UserError(
                f"{source}: {field} = {raw.get(field)!r:.80} is not supported; expected {expected}"
            )


_MODELOPT_FILE = "hf_quant_config.json"
"""File in which ModelOpt records the quantisation of weights; config.json does not."""
_READABLE_TYPES = (
    f"expected bfloat16 or float32, or what can be read: fp8 with weight_block_size [{BLOCK}, {BLOCK}], or mxfp4 of "
    "gpt-oss"
)


def _quantised(raw: dict[str, Any], family: Family, source: str) -> Literal["", "mxfp4", "fp8"]:
    value = raw.get("quantization_config") or raw.get(
        "compression_config"
    )  # of older compressed-tensors folders
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
    """Return the name of ModelOpt's method."""
    try:
        method = json.loads(file.read_text(encoding="utf-8"))["quantization"]["quant_algo"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "ModelOpt"
    return " ".join(str(method).split())[:40]


_DENSE_LAYERS = ("first_k_dense_replace", "moe_layer_end_index", "mlp_only_layers", "decoder_sparse_step")
"""Fields that determine the layers with experts without listing each layer."""


def _check_layer_kinds(raw: dict[str, Any], fields: dict[str, Any], family: Family, source: str) -> None:
    """Check that lists of the layers' kinds agree with the fields that SGLang reads instead.

    Raises:
        UserError: they do not.
    """
    dense = [field for field in _DENSE_LAYERS if field in fields]
    if family.moe and "mlp_layer_types" in fields and dense:
        unnamed = {name: value for name, value in raw.items() if name != "mlp_layer_types"}
        if _moe_layers(raw, family, source) != _moe_layers(unnamed, family, source):
            raise UserError(
                f"{source}: mlp_layer_types = {raw['mlp_layer_types']!r:.80} and {dense[0]} = {raw[dense[0]]!r:.80}: "
                "expected the same layers, or one of them"
            )
    if family.delta_net and "layer_types" in fields and "full_attention_interval" in fields:
        unnamed = {name: value for name, value in raw.items() if name != "layer_types"}
        if _linear_layers(raw, source) != _linear_layers(unnamed, source):
            raise UserError(
                f"{source}: layer_types = {raw['layer_types']!r:.80} and full_attention_interval = "
                f"{raw['full_attention_interval']!r:.80}: expected the same layers, or one of them"
            )


def _moe_layers(raw: dict[str, Any], family: Family, source: str) -> tuple[bool, ...]:
    """Return for each layer whether it has experts.

    In DeepSeek and GLM the first layers are dense; Qwen lists dense layers, or has experts in every n-th layer; in
    Ernie the last layers may be dense. Newer folders list the kind of every layer.
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
            f"{source}: moe_layer_end_index = {last!r:.80}: expected a layer, or -1 for the last one"
        )
    dense = set(raw.get("mlp_only_layers", ()))
    ends = last if last >= 0 else layers - 1
    return tuple(
        family.moe and first <= i <= ends and i not in dense and (i + 1) % step == 0 for i in range(layers)
    )


def _windows(raw: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    if not family.windowed:
        return {}
    allowed = ("full_attention", "sliding_attention")
    kinds = _kinds(raw, "layer_types", raw["layer_types"], allowed, source)
    if not (window := raw.get("sliding_window")):
        raise UserError(f"{source}: sliding_window = {window!r}: expected a number of tokens above 0")
    return {"window": window, "windowed_layers": tuple(kind == "sliding_attention" for kind in kinds)}


def _delta_net(raw: dict[str, Any], source: str) -> dict[str, Any]:
    delta = DeltaSizes(*(raw[name] for name in _DELTA_SIZES))
    if delta.value_heads % delta.key_heads:
        raise UserError(
            f"{source}: linear_num_value_heads = {delta.value_heads}: expected a multiple of linear_num_key_heads = "
            f"{delta.key_heads}"
        )
    return {"delta": delta, "linear_layers": _linear_layers(raw, source)}


def _linear_layers(raw: dict[str, Any], source: str) -> tuple[bool, ...]:
    """Return for each layer whether it has a gated delta net."""
    layers, interval = raw["num_hidden_layers"], raw.get("full_attention_interval", 4)
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    kinds = _kinds(raw, "layer_types", kinds, ("full_attention", "linear_attention"), source)
    return tuple(kind == "linear_attention" for kind in kinds)


def _kinds(
    raw: dict[str, Any], field: str, value: object, allowed: tuple[str, ...], source: str
) -> list[str]:
    """Return the kind of each layer.

    Raises:
        UserError: a layer has no allowed kind.
    """
    layers = raw["num_hidden_layers"]
    if not isinstance(value, list) or len(value) != layers or any(kind not in allowed for kind in value):
        expected = " or ".join(repr(kind) for kind in allowed)
        raise UserError(f"{source}: {field} = {value!r:.80}: expected a list of {layers} x {expected}")
    return value


def _routing(raw: dict[str, Any], family: Family) -> Routing:
    groups, top = raw.get("n_group", 1), raw.get("topk_group", 1)
    if raw.get("topk_method") == "greedy":  # DeepSeek-V2-Lite names groups and does not use them
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
