"""config.json of a Hugging Face model folder, in one set of words for all families, and checked."""

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
"""Tensor-parallel ranks, the most for which a vocabulary of any size can be cut."""


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
        return sum(self.sections)

    @property
    def projected(self) -> int:
        """Of queries, keys, values and the gates of values."""
        return self.convolved + self.value_heads * self.value_size


@dataclass(frozen=True)
class Routing:
    """How a token chooses its experts. `groups` > 1: only those of the `top_groups` best groups.

    softmax: over all experts, `normalised` to sum 1 over the chosen ones, times `scale`. sigmoid: weighted by the
    normalised score times `scale` (DeepSeek-V3, section 2.1.2). `biased`: chosen by score + bias. A group is worth
    the sum of its `group_worth` best experts.
    """

    kind: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    biased: bool = False
    group_worth: int = 2


@dataclass(frozen=True)
class HFConfig:
    """The fields of config.json that decide shapes and numbers. Sizes in elements.

    `moe_layers`: for each layer whether it has experts. `prediction_layers`: layers after the last one, for
    multi-token prediction. `mtp`: they are part of the model here, and trained; else they are carried along unchanged
    (rlsys.convert.carried). `window`: tokens that a query sees, its own among them, in the layers of
    `windowed_layers`. `linear_layers`: those with a gated delta net of the sizes `delta` instead of attention.
    `megatron`: more fields of megatron's TransformerConfig. `quantised`:
    how the folder holds weights (rlsys.convert.quantised).
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
        """Raises UserError that names the field when something would not be converted faithfully."""
        file = folder / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except OSError as e:
            raise UserError(f"{file}: cannot be read: {e.strerror}") from None
        except (ValueError, RecursionError) as e:
            raise UserError(f"{file}: not readable as JSON: {e}") from None
        if not isinstance(raw, dict):
            raise UserError(f"{file}: expected a JSON object, found {type(raw).__name__}")
        made = cls.of(raw, str(file))
        if (beside := folder / _BESIDE).is_file() and not made.quantised:
            raise UserError(f"{beside}: the weights are quantised ({_quantiser(beside)}); {_CAN_BE_READ}")
        return made

    @classmethod
    def of(cls, raw: dict[str, Any], where: str) -> HFConfig:
        """`raw` is config.json as read from `where`."""
        named = raw.get("architectures") or ["?"]
        if not isinstance(named, list) or not isinstance(named[0], str):
            raise UserError(f"{where}: architectures = {named!r:.80}: expected a list with one name")
        family = family_of(named[0])
        given = _in_our_words(language_part(raw, where) if family.part_of_more else raw, family, where)
        part = raw["text_config"] if family.part_of_more else raw
        raw = {**family.defaults, **given, **_null_sizes(part, given)}
        _check_numbers(raw, family, where)
        _check_supported(raw, family, where)
        try:
            _check_layer_kinds(raw, given, family, where)
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
                rope=read_rope(raw, family, where),
                norm_eps=raw["rms_norm_eps"],
                tied=raw["tie_word_embeddings"],
                context_length=raw["max_position_embeddings"],
                qk_norm=raw["qk_norm"],
                qkv_bias=raw["attention_bias"],
                moe_layers=_moe_layers(raw, family, where),
                latent=_latent(raw) if family.mla else None,
                prediction_layers=raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers", 0)),
                megatron=family.megatron(raw),
                quantised=_quantised(raw, family, where),
                **_windows(raw, family, where),
                **(_delta_net(raw, where) if family.delta_net else {}),
                **experts,
            )
        except KeyError as e:
            raise UserError(f"{where}: field {e} is missing") from None

    @property
    def padded_vocab_size(self) -> int:
        """Rows of Megatron's embedding and head: of the model's vocabulary alone, so that checkpoints have one shape
        in all layouts. The rows behind the vocabulary are 0, and no token is ever one of them."""
        return -(-self.vocab_size // VOCABULARY_STEP) * VOCABULARY_STEP

    def in_folder(self, name: str) -> str:
        """What the family's folders call a tensor of the name table."""
        prefix = self.family.prefix
        return prefix + name.removeprefix(TABLE_PREFIX) if name.startswith(TABLE_PREFIX) else name

    def in_table(self, name: str) -> str:
        """The inverse of in_folder."""
        prefix = self.family.prefix
        return TABLE_PREFIX + name.removeprefix(prefix) if name.startswith(prefix) else name

    @property
    def features(self) -> frozenset[Feature]:
        """What the whole model has."""
        ranked: Feature = "q_rank" if self.latent is not None and self.latent.q_rank else "q_full"
        have: dict[Feature, bool] = {"qk_norm": self.qk_norm, "qkv_bias": self.qkv_bias, ranked: True}
        return frozenset(name for name, present in have.items() if present)

    def rules(self, layer: int) -> list[Rule]:
        """The rules of one layer. One for multi-token prediction is of the last layer's kind."""
        like = min(layer, self.layers - 1)
        kind: Feature = "moe" if self.moe_layers[like] else "dense"
        attention: Feature = "linear" if self.linear_layers and self.linear_layers[like] else "full"
        have: set[Feature | None] = {*self.features, kind, attention, None}
        if kind == "moe" and self.shared_ffn_size:
            have.add("shared")
        return [r for r in self.family.rules if r.per_layer and r.only in have]

    def shape(self, letters: str) -> tuple[int, ...]:
        """The HF shape that the name table spells in `letters` (rlsys.convert.families)."""
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


def _null_sizes(raw: dict[str, Any], fields: dict[str, Any]) -> dict[str, None]:
    """Return the sizes that are null, which is not as if they were absent: as many as heads, no matrix, no expert."""
    return {name: None for name in _NULLABLE if name in raw and name not in fields}


def _in_our_words(raw: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
    """What the file says, under our names for the family's fields. Raises UserError where two names of one field have
    different values: transformers and SGLang each take another one."""
    given = {name: value for name, value in raw.items() if value is not None}
    for name in _SHARED_EXPERTS & raw.keys() - given.keys():
        given[name] = 0  # null: SGLang builds none
    for ours, theirs in (*family.fields.items(), ("num_experts", "num_local_experts")):
        if theirs not in given:
            continue
        if ours in _EXPERT_COUNTS and family.moe and given.get(ours, given[theirs]) != given[theirs]:
            raise UserError(
                f"{where}: {theirs} = {given[theirs]!r:.80} and {ours} = {given[ours]!r:.80}: expected the same, or "
                "one of them"
            )
        given[ours] = given[theirs]
    return given


LARGEST = 2**31 - 1
"""Of any size; of the layers, which are counted one by one, MOST_LAYERS."""
MOST_LAYERS = 10_000
MOST_EXPERTS = 1_000_000
"""Of all layers together: each has a name of its own."""
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


def _check_numbers(raw: dict[str, Any], family: Family, where: str) -> None:
    """Python's JSON takes NaN, and a size that is no whole number would show far from here, or never."""

    def refuse(field: str, value: object, expected: str) -> NoReturn:
        raise UserError(f"{where}: {field} = {value!r:.80}: expected {expected}")

    more = [
        name
        for names, needed in (
            (_EXPERT_SIZES, family.moe),
            (_LATENT_SIZES, family.mla),
            ((*_DELTA_SIZES, "full_attention_interval"), family.delta_net),
        )
        if needed
        for name in names
    ]
    for names, least in (((*_SIZES, *more), 1), (_COUNTS, 0)):
        for field in names:
            value, most = raw.get(field), MOST_LAYERS if field == "num_hidden_layers" else LARGEST
            # One that is needed and missing is told when it is read.
            if value is not None and (type(value) is not int or not least <= value <= most):
                refuse(field, value, f"a whole number from {least} to {most}")
    for field in _SWITCHES:
        if not isinstance(raw[field], bool):
            refuse(field, raw[field], "true or false")
    if not _whole_numbers(layers := raw.get("mlp_only_layers", [])):
        refuse("mlp_only_layers", layers, "a list of layers")
    rope = rope_fields(raw, where)
    for field, value in {**raw, **rope}.items():
        if isinstance(value, float) and not math.isfinite(value):
            refuse(field, value, "a finite number")
    for found, fields in ((raw, _POSITIVE), (rope, _ROPE_POSITIVE)):
        for field in fields:
            value = found.get(field)
            if value is not None and not (_is_number(value) and 0 < value <= LARGEST):
                refuse(field, value, f"a number above 0, at most {LARGEST}")
    for field in ("mscale", "mscale_all_dim"):
        if not (_is_number(value := rope.get(field) or 0) and abs(value) <= LARGEST):
            refuse(f"rope {field}", value, "a number")
    _check_divisions(raw, family, refuse)


def _check_divisions(
    raw: dict[str, Any], family: Family, refuse: Callable[[str, object, str], NoReturn]
) -> None:
    """Sizes that have to go into others."""
    heads, groups = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if heads and groups and heads % groups and not family.mla:
        refuse("num_key_value_heads", groups, f"a divisor of num_attention_heads = {heads}")
    if heads and not raw.get("head_dim") and heads > raw.get("hidden_size", heads):
        refuse("num_attention_heads", heads, f"at most hidden_size = {raw['hidden_size']}, or a head_dim")
    if not family.moe:
        return
    experts, chosen = raw.get("num_experts", 0), raw.get("num_experts_per_tok", 0)
    if experts * (layers := raw.get("num_hidden_layers", 1)) > MOST_EXPERTS:
        refuse("num_experts", experts, f"at most {MOST_EXPERTS} in all {layers} layers")
    if chosen > experts:
        refuse("num_experts_per_tok", chosen, f"at most num_experts = {experts}")
    if chosen == 1 and (family.sigmoid or raw["norm_topk_prob"]):
        field = family.fields.get("num_experts_per_tok", "num_experts_per_tok")
        refuse(
            field,
            1,
            "2 experts and more, or norm_topk_prob = false: the normalised weight of one expert is 1, whatever its "
            "score, which megatron-core does not compute, and by which no router would learn",
        )
    groups, top = raw.get("n_group", 1), raw.get("topk_group", 1)
    if experts % groups:
        refuse("n_group", groups, f"a divisor of num_experts = {experts}")
    if top > groups:
        refuse("topk_group", top, f"at most n_group = {groups}")


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int for v in value)


def _check_supported(raw: dict[str, Any], family: Family, where: str) -> None:
    """Refuse what would silently compute something else."""
    for field, values in family.allowed.items():
        if raw.get(field) not in values:
            expected = " or ".join(repr(v) for v in values)
            raise UserError(
                f"{where}: {field} = {raw.get(field)!r:.80} is not supported; expected {expected}"
            )


_BESIDE = "hf_quant_config.json"
"""Where ModelOpt says that weights are quantised, config.json does not."""
_CAN_BE_READ = (
    f"expected bfloat16 or float32, or what can be read: fp8 with weight_block_size [{BLOCK}, {BLOCK}], or mxfp4 of "
    "gpt-oss"
)


def _quantised(raw: dict[str, Any], family: Family, where: str) -> Literal["", "mxfp4", "fp8"]:
    told = raw.get("quantization_config") or raw.get(
        "compression_config"
    )  # of older compressed-tensors folders
    if not told:
        return ""
    given = told if isinstance(told, dict) else {"quant_method": told}
    method = given.get("quant_method")
    if method == "mxfp4" and any(stack.interleaved for stack in family.stacks.values()):
        return "mxfp4"
    if method == "fp8" and not family.stacks and given.get("weight_block_size") == [BLOCK, BLOCK]:
        return "fp8"
    kind = " ".join(str(method or given.get("quant_algo")).split())[:40]
    raise UserError(f"{where}: the weights are quantised ({kind}); {_CAN_BE_READ}")


def _quantiser(file: Path) -> str:
    """What ModelOpt says of its method, in a few words."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))["quantization"]["quant_algo"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "ModelOpt"
    return " ".join(str(told).split())[:40]


_DENSE_LAYERS = ("first_k_dense_replace", "moe_layer_end_index", "mlp_only_layers", "decoder_sparse_step")
"""Fields that say which layers have experts without naming each layer."""


def _check_layer_kinds(raw: dict[str, Any], given: dict[str, Any], family: Family, where: str) -> None:
    """Raises UserError where a list of the layers' kinds contradicts a field that SGLang reads in its place."""
    dense = [field for field in _DENSE_LAYERS if field in given]
    if family.moe and "mlp_layer_types" in given and dense:
        unnamed = {name: value for name, value in raw.items() if name != "mlp_layer_types"}
        if _moe_layers(raw, family, where) != _moe_layers(unnamed, family, where):
            raise UserError(
                f"{where}: mlp_layer_types = {raw['mlp_layer_types']!r:.80} and {dense[0]} = {raw[dense[0]]!r:.80}: "
                "expected the same layers, or one of them"
            )
    if family.delta_net and "layer_types" in given and "full_attention_interval" in given:
        unnamed = {name: value for name, value in raw.items() if name != "layer_types"}
        if _linear_layers(raw, where) != _linear_layers(unnamed, where):
            raise UserError(
                f"{where}: layer_types = {raw['layer_types']!r:.80} and full_attention_interval = "
                f"{raw['full_attention_interval']!r:.80}: expected the same layers, or one of them"
            )


def _moe_layers(raw: dict[str, Any], family: Family, where: str) -> tuple[bool, ...]:
    """DeepSeek and GLM begin with dense layers; Qwen names dense ones, or has experts in every n-th layer. Ernie may
    end with dense ones. Newer folders name the kind of every layer."""
    layers = raw["num_hidden_layers"]
    if family.moe and (kinds := raw.get("mlp_layer_types")) is not None:
        return tuple(
            kind == "sparse" for kind in _kinds(raw, "mlp_layer_types", kinds, ("dense", "sparse"), where)
        )
    first, step = raw.get("first_k_dense_replace", 0), raw.get("decoder_sparse_step", 1)
    last = raw.get("moe_layer_end_index", -1)
    if type(last) is not int or not -1 <= last < layers:
        raise UserError(
            f"{where}: moe_layer_end_index = {last!r:.80}: expected a layer, or -1 for the last one"
        )
    dense = set(raw.get("mlp_only_layers", ()))
    ends = last if last >= 0 else layers - 1
    return tuple(
        family.moe and first <= i <= ends and i not in dense and (i + 1) % step == 0 for i in range(layers)
    )


def _windows(raw: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
    if not family.windowed:
        return {}
    known = ("full_attention", "sliding_attention")
    kinds = _kinds(raw, "layer_types", raw["layer_types"], known, where)
    if not (window := raw.get("sliding_window")):
        raise UserError(f"{where}: sliding_window = {window!r}: expected a number of tokens above 0")
    return {"window": window, "windowed_layers": tuple(kind == "sliding_attention" for kind in kinds)}


def _delta_net(raw: dict[str, Any], where: str) -> dict[str, Any]:
    delta = DeltaSizes(*(raw[name] for name in _DELTA_SIZES))
    if delta.value_heads % delta.key_heads:
        raise UserError(
            f"{where}: linear_num_value_heads = {delta.value_heads}: expected a multiple of linear_num_key_heads = "
            f"{delta.key_heads}"
        )
    return {"delta": delta, "linear_layers": _linear_layers(raw, where)}


def _linear_layers(raw: dict[str, Any], where: str) -> tuple[bool, ...]:
    """For each layer whether it has a gated delta net."""
    layers, every = raw["num_hidden_layers"], raw.get("full_attention_interval", 4)
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    kinds = _kinds(raw, "layer_types", kinds, ("full_attention", "linear_attention"), where)
    return tuple(kind == "linear_attention" for kind in kinds)


def _kinds(raw: dict[str, Any], field: str, value: object, known: tuple[str, ...], where: str) -> list[str]:
    """The kind of each layer. Raises UserError unless there is one for each, and each is known."""
    layers = raw["num_hidden_layers"]
    if not isinstance(value, list) or len(value) != layers or any(kind not in known for kind in value):
        expected = " or ".join(repr(kind) for kind in known)
        raise UserError(f"{where}: {field} = {value!r:.80}: expected a list of {layers} x {expected}")
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
