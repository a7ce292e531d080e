"""A Hugging Face model folder: its config, checked, and its tensors, read one at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlsys.convert.families import Family, family_of
from rlsys.errors import UserError

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
"""What travels with the tensors so that the folder serves by itself."""


@dataclass(frozen=True)
class HFConfig:
    """The fields of config.json that decide shapes and numbers. Sizes in elements."""

    family: Family
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    rope_theta: float
    norm_eps: float
    tied: bool
    context_length: int
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    norm_topk: bool = True

    @classmethod
    def read(cls, folder: Path) -> HFConfig:
        """Raises UserError that names the field when something would not be converted faithfully."""
        try:
            raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise UserError(f"{folder}: no readable config.json: {e}") from None
        architecture = (raw.get("architectures") or ["?"])[0]
        family = family_of(architecture)
        rope = raw.get("rope_parameters") or {}
        scaling = raw.get("rope_scaling") or {}
        kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
        if kind != "default":
            raise UserError(f"{folder}/config.json: rope type {kind!r} is not supported; expected 'default'")
        if raw.get("hidden_act", "silu") != "silu":
            raise UserError(f"{folder}/config.json: hidden_act = {raw['hidden_act']!r}; expected 'silu'")
        if raw.get("use_sliding_window"):
            raise UserError(f"{folder}/config.json: use_sliding_window = true is not supported")
        if family.moe and (raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1):
            raise UserError(f"{folder}/config.json: dense layers between MoE layers are not supported")
        try:
            heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
            return cls(
                family=family,
                vocab_size=raw["vocab_size"],
                hidden_size=hidden,
                layers=raw["num_hidden_layers"],
                heads=heads,
                kv_heads=raw.get("num_key_value_heads", heads),
                head_dim=raw.get("head_dim") or hidden // heads,
                ffn_size=raw["intermediate_size"],
                rope_theta=float(rope.get("rope_theta") or raw["rope_theta"]),
                norm_eps=raw["rms_norm_eps"],
                tied=bool(raw.get("tie_word_embeddings", False)),
                context_length=raw["max_position_embeddings"],
                experts=(raw.get("num_experts") or raw.get("num_local_experts", 0)) if family.moe else 0,
                experts_per_token=raw["num_experts_per_tok"] if family.moe else 0,
                expert_ffn_size=raw["moe_intermediate_size"] if family.moe else 0,
                norm_topk=bool(raw.get("norm_topk_prob", True)),
            )
        except KeyError as e:
            raise UserError(f"{folder}/config.json: field {e} is missing") from None


class HFTensors:
    """Tensors of a folder by name, read on demand. Fused expert tensors are also found by per-expert names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder}: no *.safetensors in it")
        self._where: dict[str, Path] = {}
        for file in files:
            try:
                with safe_open(str(file), framework="pt") as f:
                    self._where.update(dict.fromkeys(f.keys(), file))
            except SafetensorError as e:
                raise UserError(f"{file}: not a whole safetensors file: {e}") from None

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def __getitem__(self, name: str) -> Tensor:
        """Raises UserError when it is missing."""
        if name not in self._where:
            raise UserError(f"{self._folder}: tensor {name} is missing")
        with safe_open(str(self._where[name]), framework="pt") as f:
            tensor: Tensor = f.get_tensor(name)
        return tensor


def write_hf(folder: Path, source: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a model folder: tensors, and the side files of `source`. Atomic: `folder` appears whole or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(
        {n: t.contiguous() for n, t in tensors}, partial / "model.safetensors", metadata={"format": "pt"}
    )
    for name in SIDE_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, partial / name)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def raw_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands."""
    data: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return data
