"""Which tensors of a model folder are the model's, and where they lie, from the index and the files' headers: no
tensors, no torch.

Trainer and engine have to read the same bits. SGLang loads every tensor of every file that the index names, in the
order of the files' names, so the last copy of a tensor counts there; without an index it loads all files. The index
decides here, and what engines would read otherwise is refused.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlsys.config.precision import BLOCK
from rlsys.convert.config import HFConfig
from rlsys.convert.rules import Stack
from rlsys.convert.table import check_names, entries, stacked_names
from rlsys.core.errors import UserError

INDEX = "model.safetensors.index.json"
FP8_SCALES, MXFP4_BLOCKS, MXFP4_SCALES = "_scale_inv", "_blocks", "_scales"
"""How names of quantised tensors and of their scales end."""
WEIGHT_TYPES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Stored types that are numbers by themselves, and their bytes."""
_FP8, _FP8_SCALE_TYPES, _BYTE = "F8_E4M3", (*WEIGHT_TYPES, "F8_E8M0"), "U8"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip
_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""How names of tensors end that old folders hold and that are no weights; SGLang and transformers skip them, too."""
_SHARED_GATE = "shared_expert_gate.weight"
"""How the name of a gate ends that transformers keeps where it gates shared experts of size 0; SGLang skips it."""
_ORIGINAL, _WHOLE = "consolidated.safetensors", "model.safetensors"
"""Mistral's folders hold the weights a second time, in a format of their own."""
_PREDICTIONS, _PREDICTING = "mtp.safetensors", ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
"""A file that SGLang reads for these architectures where the index has left it out."""
_LARGEST_HEADER = 100_000_000  # the format's own bound

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor as a file's header describes it. `dtype`: safetensors' name of the type."""

    file: Path
    name: str
    dtype: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: a whole one, or part `part` of `parts` of expert `expert` of a fused one.

    `stack`: what the fused one is, if it is one of the family's. `scales`: of a quantised one, their file and name.
    `bytes`: of the tensor as it is read.
    """

    file: Path
    name: str
    shape: Shape
    expert: int | None = None
    part: int = 0
    parts: int = 1
    stack: Stack | None = None
    scales: tuple[Path, str] | None = None
    bytes: int = 0


def find_tensors(folder: Path, hf: HFConfig) -> dict[str, Place]:
    """Every tensor of the folder by its name in the table; the parts of fused experts have per-expert names.

    Raises UserError that names the first file that is missing or not whole; the first tensor that is stored twice,
    has a type that is no weight's, or a scale that does not belong to it; the first tensor that is missing, has no
    place in the model, or another shape than config.json says.
    """
    if (folder / ".metadata").is_file():
        raise UserError(
            f"{folder}: both a Megatron checkpoint (.metadata), which trainers load, and *.safetensors, which "
            "engines load; expected one of them"
        )
    headers = _read_headers(folder, hf)
    others = {
        hf.in_folder(name).format(l=layer): tuple(hf.in_folder(p).replace("{l}", str(layer)) for p in parts)
        for name, parts in hf.family.other_names.items()
        for layer in range(hf.layers + hf.mtp * hf.prediction_layers)
    }
    stacks = stacked_names(hf)
    scales = _take_scales(headers, hf, stacks)
    found: dict[str, Place] = {}
    for name, stored in headers.items():
        stack = stacks.get(name)
        parts = stack.parts if stack is not None else others.get(name, (name,))
        size = WEIGHT_TYPES.get(stored.dtype, 2)  # what is quantised becomes bfloat16
        for part, place in _places(stored, parts, hf.experts, stack).items():
            if (other := found.get(part)) is not None:
                raise UserError(
                    f"{folder}: {part} is stored twice: as {other.name} in {other.file.name} and as {name} in "
                    f"{stored.file.name}"
                )
            found[part] = replace(place, scales=scales.get(name), bytes=math.prod(place.shape) * size)
    check_names(hf, frozenset(found), str(folder))
    for entry in entries(hf):
        for name, expected in entry.hf.items():
            if (shape := found[name].shape) != expected:
                raise UserError(f"{folder}: {name} has shape {shape}; config.json says {expected}")
    return found


def _read_headers(folder: Path, hf: HFConfig) -> dict[str, Stored]:
    """The tensors of the folder by their names in its files. Raises UserError where two files hold the same one and
    nothing decides, or engines would decide otherwise."""
    index = _read_index(folder)
    copies: dict[str, list[Stored]] = defaultdict(list)
    skipped = _BUFFERS if hf.shared_ffn_size else (*_BUFFERS, _SHARED_GATE)
    for file in _files(folder, index, hf):
        for stored in read_header(file):
            if 0 not in stored.shape and not stored.name.endswith(skipped):
                copies[stored.name].append(stored)
    for name, stored_ones in copies.items():
        if len(stored_ones) == 1:
            continue
        twice = f"{folder}: {name} is stored twice: in {' and in '.join(s.file.name for s in stored_ones)}"
        if index is None:
            raise UserError(f"{twice}; there is no {INDEX} that says which counts")
        last = stored_ones[-1].file.name
        if index.get(name) != last:
            raise UserError(
                f"{twice}; {INDEX} says {index.get(name, 'nothing of it')}, and SGLang, which reads these files in "
                f"the order of their names, takes {last}"
            )
    return {name: stored_ones[-1] for name, stored_ones in copies.items()}


def _files(folder: Path, index: dict[str, str] | None, hf: HFConfig) -> list[Path]:
    """The files that SGLang reads, in its order."""
    names = {file.name for file in folder.glob("*.safetensors")}
    if not names:
        raise UserError(f"{folder}: no *.safetensors in it")
    if index is None:
        return [
            folder / name for name in sorted(names - {_ORIGINAL} if names == {_ORIGINAL, _WHOLE} else names)
        ]
    files = sorted(set(index.values()))
    if hf.prediction_layers and hf.family.architecture in _PREDICTING and _PREDICTIONS in names - {*files}:
        files.append(_PREDICTIONS)
    if missing := [name for name in files if name not in names]:
        raise UserError(f"{folder}: {len(missing)} file(s) of {INDEX} are missing, first: {missing[0]}")
    return [folder / name for name in files]


def _read_index(folder: Path) -> dict[str, str] | None:
    """Names of tensors -> names of files; None: the folder has no index."""
    path = folder / INDEX
    if not os.path.lexists(path):  # a link to a file that is gone is not "none"
        return None
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        places = dict(index.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: not an index of safetensors files") from None
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(
                f"{path}: {name} is in {file!r:.80}; expected the name of a *.safetensors file of this folder"
            )
    if not places:
        raise UserError(f"{path}: names no tensor")
    return places


def _take_scales(
    headers: dict[str, Stored], hf: HFConfig, stacks: Iterable[str]
) -> dict[str, tuple[Path, str]]:
    """Takes scales of quantised tensors out of `headers`: where each lies, by the name of its tensor. What mxfp4 has
    in groups gets the name and shape that it has unquantised.

    Raises UserError for a type that is no weight's, and where a tensor and its scale do not belong together.
    """
    scales: dict[str, Stored] = {}
    if hf.quantised == "fp8":
        for name in [name for name in headers if name.endswith(FP8_SCALES)]:
            scales[name.removesuffix(FP8_SCALES)] = headers.pop(name)
    packed: set[str] = set()
    if hf.quantised == "mxfp4":
        for name in stacks:
            blocks, groups = headers.pop(name + MXFP4_BLOCKS, None), headers.pop(name + MXFP4_SCALES, None)
            if blocks is None and groups is None:
                continue
            if name in headers:
                other = headers[name]
                raise UserError(f"{other} is stored twice, the second time quantised: {blocks or groups}")
            scales[name] = _check_mxfp4(name, blocks, groups)
            assert blocks is not None
            experts, rows, count, _ = blocks.shape
            headers[name] = replace(blocks, name=name, shape=(experts, count * 32, rows))
            packed.add(name)
    for name in sorted(headers.keys() - packed):
        _check_type(headers[name], scales.get(name), hf)
    if strays := scales.keys() - headers.keys():
        raise UserError(f"{scales[min(strays)]} is the scale of a tensor that is not there: {min(strays)}")
    return {name: (scale.file, scale.name) for name, scale in scales.items()}


def _check_type(stored: Stored, scale: Stored | None, hf: HFConfig) -> None:
    """Raises UserError unless it is a weight as it is, or eight bits with the scales of their blocks."""
    expected = "expected " + ", ".join(WEIGHT_TYPES)
    if hf.quantised == "fp8":
        expected += f", or {_FP8} with a scale {FP8_SCALES}"
    elif not hf.quantised:
        expected += "; config.json says nothing of quantised weights" * (stored.dtype not in WEIGHT_TYPES)
    if stored.dtype in WEIGHT_TYPES:
        if scale is not None:
            raise UserError(f"{stored} has type {stored.dtype} and a scale, {scale.name}; expected {_FP8}")
        return
    if stored.dtype != _FP8 or hf.quantised != "fp8":
        raise UserError(f"{stored} has type {stored.dtype}; {expected}")
    if len(stored.shape) != 2:
        raise UserError(f"{stored} has type {_FP8} and shape {stored.shape}; expected a matrix")
    if scale is None:
        raise UserError(
            f"{stored} has type {_FP8} and no scale; expected {stored.name}{FP8_SCALES} beside it"
        )
    blocks = tuple(-(-n // BLOCK) for n in stored.shape)
    if scale.dtype not in _FP8_SCALE_TYPES:
        raise UserError(f"{scale} has type {scale.dtype}; expected {', '.join(_FP8_SCALE_TYPES)}")
    if scale.shape != blocks:
        raise UserError(
            f"{scale} has shape {scale.shape}; expected {blocks}, a scale for each block of {BLOCK} x {BLOCK} of "
            f"{stored.name}, whose shape is {stored.shape}"
        )


def _check_mxfp4(name: str, blocks: Stored | None, scales: Stored | None) -> Stored:
    """The scales. Raises UserError unless blocks `[experts, rows, groups, 16]` and scales `[experts, rows, groups]`
    are bytes, and both are there."""
    if blocks is None or scales is None:
        there, missing = (blocks, MXFP4_SCALES) if blocks is not None else (scales, MXFP4_BLOCKS)
        raise UserError(f"{there} is there without {name}{missing}")
    if len(blocks.shape) != 4 or blocks.shape[-1] != 16:
        raise UserError(f"{blocks} has shape {blocks.shape}; expected [experts, rows, groups, 16]")
    for stored in (blocks, scales):
        if stored.dtype != _BYTE:
            raise UserError(f"{stored} has type {stored.dtype}; expected {_BYTE}")
    if scales.shape != blocks.shape[:-1]:
        raise UserError(
            f"{scales} has shape {scales.shape}; expected {blocks.shape[:-1]}, as {blocks.name} has groups"
        )
    return scales


def _places(stored: Stored, parts: tuple[str, ...], experts: int, stack: Stack | None) -> dict[str, Place]:
    """`parts`: the names of the table that the tensor holds, of one expert for those of all."""
    file, name, shape = stored.file, stored.name, stored.shape
    if "{e}" not in parts[0]:
        return {parts[0]: Place(file, name, shape)}
    if (held := shape[0] if len(shape) > 1 else 0) != experts:
        raise UserError(f"{file}: {name} holds {held} experts, config.json says {experts}")
    each = (shape[1] // len(parts), *shape[2:])
    if stack is not None:
        each = (shape[-1] // len(parts), *shape[1:-1])
    return {
        part.format(e=expert): Place(file, name, each, expert, at, len(parts), stack)
        for expert in range(experts)
        for at, part in enumerate(parts)
    }


def read_header(file: Path) -> list[Stored]:
    """The tensors of a file. Raises UserError unless the file has exactly the bytes that its header tells."""
    try:
        size = file.stat().st_size
        if not file.is_file():
            raise UserError(f"{file}: cannot be read: not a file")
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, _LARGEST_HEADER):
                raise UserError(f"{file}: not a whole safetensors file: it ends within its header")
            header = json.loads(stream.read(length), object_pairs_hook=_object)
        if not isinstance(header.pop("__metadata__", {}), dict):
            raise ValueError
        tensors = [Stored(file, name, t["dtype"], tuple(t["shape"])) for name, t in header.items()]
        extents = [tuple(t["data_offsets"]) for t in header.values()]
        if not all(isinstance(tensor.dtype, str) for tensor in tensors):
            raise ValueError
        if any(type(n) is not int for numbers in (*extents, *(t.shape for t in tensors)) for n in numbers):
            raise ValueError
        sizes_fit = all(
            math.prod(tensor.shape) * _BITS[tensor.dtype] == 8 * (end - begin)
            for tensor, (begin, end) in zip(tensors, extents, strict=True)
            if tensor.dtype in _BITS
        )
        begins, ends = [0, *sorted(end for _, end in extents)], sorted(begin for begin, _ in extents)
        if not sizes_fit or begins[:-1] != ends:
            raise ValueError
    except OSError as e:
        raise UserError(f"{file}: cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise UserError(f"{file}: not a whole safetensors file: its header is damaged") from None
    if (told := 8 + length + begins[-1]) != size:
        raise UserError(
            f"{file}: not a whole safetensors file: it has {size} bytes, its header tells of {told}"
        )
    return tensors


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a name that is there twice: JSON readers differ in which they take."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError
    return made
