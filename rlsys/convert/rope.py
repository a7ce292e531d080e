"""Reader of the rotary embedding in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlsys.convert.rules import Family
from rlsys.core.errors import UserError

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Fields of llama3 scaling that are constants in megatron-core, with their values."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding.

    Attributes:
        theta: Base of the frequencies.
        share: Share of the head size that is rotated.
        kind: Scaling of the frequencies; default: none.
        factor: Factor of llama3 and yarn scaling.
        original_context: Context length before yarn scaling.
        beta_fast: Number of rotations from which yarn does not scale a dimension.
        beta_slow: Number of rotations below which yarn scales a dimension by the whole factor.
        mscale: Yarn's coefficient for the attention scale of rotary dimensions.
        mscale_all_dim: Yarn's coefficient for the attention scale of all dimensions.
        truncate: Whether yarn rounds the bounds of the scaled dimensions to whole numbers.
    """

    theta: float
    share: float = 1.0
    kind: Literal["default", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


def rope_fields(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the content of `rope_scaling`, or of `rope_parameters`, its newer name.

    If config.json has both, `rope_scaling` is used, as in transformers 5 and SGLang.

    Raises:
        UserError: One of the two is not an object, or `rope_scaling` lacks a value of `rope_parameters`, for which
            engines would use a default.
    """
    for name in ("rope_scaling", "rope_parameters"):
        value = raw.get(name)
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{source}: {name} = {value!r:.80}: expected an object")
    scaling, parameters = (_with_type(raw.get(name) or {}) for name in ("rope_scaling", "rope_parameters"))
    if not scaling:
        return parameters
    applied = {"rope_type": "default", **raw, **scaling}
    for name, value in parameters.items():
        if name not in scaling and applied.get(name) != value:
            raise UserError(
                f"{source}: rope_parameters has {name} = {value!r:.80}, and rope_scaling, which replaces it, lacks "
                f"{name}; expected {name} in rope_scaling, or one of the two fields"
            )
    return scaling


def _with_type(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null, with `type` renamed to its newer name `rope_type`."""
    fields = {name: value for name, value in rope.items() if name != "type" and value is not None}
    return fields | ({"rope_type": rope["type"]} if rope.get("type") and not rope.get("rope_type") else {})


_ROPE_FIELDS = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
_YARN = {"original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}


def read_rope(raw: dict[str, Any], family: Family, source: str) -> Rope:
    """Read the rotary embedding from `rope_parameters`, or `rope_theta` and `rope_scaling`.

    Args:
        raw: The normalised fields of config.json.
        family: The family.
        source: Path of config.json, for errors.

    Raises:
        UserError: A field has a value that rlsys does not support.
    """
    fields = rope_fields(raw, source)
    if nested := sorted(name for name, value in fields.items() if isinstance(value, dict)):
        raise UserError(
            f"{source}: rope_parameters.{nested[0]} is an object; expected one set of fields for all layers, because "
            "separate fields for each kind of layer are not supported"
        )
    kind = fields.get("rope_type") or "default"
    share = fields.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if raw.get("rotary_dim") and raw.get("head_dim"):
        share = raw["rotary_dim"] / raw["head_dim"]
    kinds = ("default", "yarn") if family.mla or family.yarn else ("default", "llama3")
    shares = (0.25, 0.5) if "partial_rotary_factor" in family.defaults else (1.0,)
    for field, value, allowed in (("rope type", kind, kinds), ("partial_rotary_factor", share, shares)):
        if value not in allowed:
            expected = " or ".join(repr(a) for a in allowed)
            raise UserError(f"{source}: {field} = {value!r} is not supported; expected {expected}")
    theta = float(fields.get("rope_theta") or raw["rope_theta"])
    if kind == "default":
        return Rope(theta, share)
    supported = _ROPE_FIELDS | (_YARN if kind == "yarn" else set(LLAMA3))
    if unknown := sorted(set(fields) - supported):
        raise UserError(
            f"{source}: rope {unknown[0]} = {fields[unknown[0]]!r} is not supported with {kind!r}; expected only "
            f"{', '.join(sorted(supported))}"
        )
    if kind == "yarn":
        return _read_yarn(Rope(theta, share, "yarn", fields["factor"]), fields, raw, family, source)
    for field, value in LLAMA3.items():
        if fields[field] != value:
            raise UserError(f"{source}: rope {field} = {fields[field]} is not supported; expected {value}")
    return Rope(theta, share, "llama3", fields["factor"])


def _read_yarn(rope: Rope, fields: dict[str, Any], raw: dict[str, Any], family: Family, source: str) -> Rope:
    """Return `rope` with the fields of yarn. `fields`: content of rope_scaling or rope_parameters."""
    if bool(fields.get("mscale")) != bool(fields.get("mscale_all_dim")):
        raise UserError(
            f"{source}: rope mscale = {fields.get('mscale')} and mscale_all_dim = {fields.get('mscale_all_dim')}: "
            "expected both or neither"
        )
    truncate = fields.get("truncate", True)
    if not isinstance(truncate, bool) or (family.mla and not truncate):
        raise UserError(f"{source}: rope truncate = {truncate!r} is not supported; expected True")
    optional_fields = {
        name: fields[name]
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        if fields.get(name)
    }
    context = fields.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    return replace(rope, original_context=context, truncate=truncate, **optional_fields)
