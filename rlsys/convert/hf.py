"""A Hugging Face model folder: its config, checked, and its tensors, read and written one at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlsys.convert.families import Family, family_of
from rlsys.errors import UserError

SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
"""What travels with config.json and the tensors so that the folder serves by itself."""

MAX_FILE_BYTES = 4 << 30
INDEX = "model.safetensors.index.json"


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
        file = folder / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise UserError(f"{file}: not readable as JSON: {e}") from None
        if not isinstance(raw, dict):
            raise UserError(f"{file}: expected a JSON object, found {type(raw).__name__}")
        return cls.of(raw, str(file))

    @classmethod
    def of(cls, raw: dict[str, Any], where: str) -> HFConfig:
        """`raw` is config.json as read from `where`."""
        family = family_of((raw.get("architectures") or ["?"])[0])
        _check_supported(raw, family, where)
        raw = {**family.defaults, **raw}
        if "num_local_experts" in raw:
            raw.setdefault("num_experts", raw["num_local_experts"])
        rope = raw.get("rope_parameters") or {}
        try:
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
                rope_theta=float(rope.get("rope_theta") or raw["rope_theta"]),
                norm_eps=raw["rms_norm_eps"],
                tied=raw["tie_word_embeddings"],
                context_length=raw["max_position_embeddings"],
                experts=raw["num_experts"] if family.moe else 0,
                experts_per_token=raw["num_experts_per_tok"] if family.moe else 0,
                expert_ffn_size=raw["moe_intermediate_size"] if family.moe else 0,
                norm_topk=raw["norm_topk_prob"] if family.moe else True,
            )
        except KeyError as e:
            raise UserError(f"{where}: field {e} is missing") from None

    def shape(self, letters: str) -> tuple[int, ...]:
        """The HF shape that the name table spells in `letters` (rlsys.convert.families)."""
        sizes = {
            "v": self.vocab_size,
            "h": self.hidden_size,
            "q": self.heads * self.head_dim,
            "k": self.kv_heads * self.head_dim,
            "d": self.head_dim,
            "f": self.ffn_size,
            "m": self.expert_ffn_size,
            "e": self.experts,
        }
        return tuple(sizes[letter] for letter in letters)


def _check_supported(raw: dict[str, Any], family: Family, where: str) -> None:
    """Refuse what would silently compute something else."""
    rope, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    for field, value, expected in (
        ("rope type", kind, "default"),
        (
            "partial_rotary_factor",
            rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)),
            1.0,
        ),
        ("hidden_act", raw.get("hidden_act", "silu"), "silu"),
        ("use_sliding_window", raw.get("use_sliding_window") or False, False),
        ("attention_bias", raw.get("attention_bias") or False, family.qkv_bias),
    ):
        if value != expected:
            raise UserError(f"{where}: {field} = {value!r} is not supported; expected {expected!r}")
    if family.moe and (raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1):
        raise UserError(
            f"{where}: mlp_only_layers = {raw.get('mlp_only_layers')}, decoder_sparse_step = "
            f"{raw.get('decoder_sparse_step', 1)}: dense layers between MoE layers are not supported"
        )


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: a whole one, or part `part` of `parts` of expert `expert` of a fused one."""

    file: Path
    name: str
    expert: int | None = None
    part: int = 0
    parts: int = 1

    def read(self) -> Tensor:
        with safe_open(str(self.file), framework="pt") as f:
            if self.expert is None:
                tensor: Tensor = f.get_tensor(self.name)
                return tensor
            stacked: Tensor = f.get_slice(self.name)[self.expert]
            return stacked.chunk(self.parts, dim=0)[self.part]


class HFTensors:
    """Tensors of a folder by name, read on demand. The parts of fused experts have per-expert names here."""

    def __init__(self, folder: Path, config: HFConfig) -> None:
        """Raises UserError when there is no whole safetensors file in `folder`."""
        self._folder = folder
        self._places: dict[str, _Place] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder}: no *.safetensors in it")
        fused = {
            name.format(l=layer): tuple(p.replace("{l}", str(layer)) for p in parts)
            for name, parts in config.family.fused.items()
            for layer in range(config.layers)
        }
        for file in files:
            try:
                with safe_open(str(file), framework="pt") as f:
                    names = list(f.keys())
            except (SafetensorError, OSError) as e:
                raise UserError(f"{file}: not a whole safetensors file: {e}") from None
            for name in names:
                self._add(file, name, fused.get(name), config.experts)

    def _add(self, file: Path, name: str, parts: tuple[str, ...] | None, experts: int) -> None:
        if parts is None:
            self._places[name] = _Place(file, name)
            return
        with safe_open(str(file), framework="pt") as f:
            held = f.get_slice(name).get_shape()[0]
        if held != experts:
            raise UserError(f"{file}: {name} holds {held} experts, config.json says {experts}")
        for expert in range(experts):
            for at, part in enumerate(parts):
                self._places[part.format(e=expert)] = _Place(file, name, expert, at, len(parts))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Raises UserError when it is missing or has another shape."""
        if name not in self._places:
            raise UserError(f"{self._folder}: tensor {name} is missing")
        tensor = self._places[name].read()
        if tensor.shape != shape:
            raise UserError(
                f"{self._folder}: {name} has shape {tuple(tensor.shape)}; config.json says {shape}"
            )
        return tensor


def write_hf(
    folder: Path,
    source: Path,
    tensors: Iterable[tuple[str, Tensor]],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a model folder: `tensors` with the config and tokenizer of `source`.

    Holds at most one file's tensors in memory. Atomic: `folder` appears whole or not at all.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files: list[list[str]] = []
    dtypes: set[torch.dtype] = set()
    total = held_bytes = 0
    held: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(held, partial / f"{len(files)}.part", metadata={"format": "pt"})
        files.append(list(held))
        held.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held and held_bytes + size > max_file_bytes:
            flush()
            held_bytes = 0
        # A copy: the tensor may be a view of a parameter, and the next optimizer step must not reach it.
        held[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        dtypes.add(tensor.dtype)
        held_bytes, total = held_bytes + size, total + size
    flush()
    _name_files(partial, files, total)
    _write_side_files(partial, source, dtypes)
    publish(partial, folder)


def _name_files(folder: Path, files: list[list[str]], total_bytes: int) -> None:
    """The names that loaders expect, known only when the number of files is; an index where there are several."""
    if len(files) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for i, names in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{i}.part").rename(folder / file)
        where.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_side_files(folder: Path, source: Path, dtypes: set[torch.dtype]) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if len(dtypes) == 1:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtypes.pop()).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in SIDE_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def publish(partial: Path, folder: Path) -> None:
    """Give `partial` its final name, once everything in it is on the disk."""
    for path in [partial, *partial.rglob("*")]:
        _sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
