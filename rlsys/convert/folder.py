"""Location of a model's tensors in a folder, from the index and the files' headers: no tensors, no torch.

Trainer and engine must read the same bits. SGLang loads every tensor of every file that the index lists, in the
order of the files' names, so it uses the last copy of a tensor; without an index it loads all files. rlsys follows
the index, and rejects a folder that engines would read differently.
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
"""Suffixes of the names of quantised tensors and of their scales."""
WEIGHT_TYPES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Stored types without scales, and their bytes."""
_FP8, _FP8_SCALE_TYPES, _BYTE = "F8_E4M3", (*WEIGHT_TYPES, "F8_E8M0"), "U8"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip
_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Suffixes of tensors of old folders that are no weights; SGLang and transformers skip them, too."""
_SHARED_GATE = "shared_expert_gate.weight"
"""Suffix of the gate that transformers keeps for shared experts of size 0; SGLang skips it."""
_ORIGINAL, _MERGED = "consolidated.safetensors", "model.safetensors"
"""Mistral's folders hold the weights a second time, in Mistral's own format."""
_PREDICTIONS, _PREDICTING = "mtp.safetensors", ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
"""File that SGLang reads for these architectures if the index lacks it."""
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """Tensor as a file's header describes it. `dtype`: safetensors' name of the type."""

    file: Path
    name: str
    dtype: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor: a whole one, or part `part` of `parts` of expert `expert` of a fused one.

    Attributes:
        stack: the family's stack that the fused tensor is, if any.
        scales: file and name of the scales of a quantised tensor.
        bytes: size of the tensor as it is read.
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


def find_tensors(folder: Path, hf: HFConfig) -> dict[str, TensorLocation]:
    """Locate every tensor of the folder by its name in the table; the parts of fused experts have per-expert names.

    Raises:
        UserError: a file is missing or incomplete; a tensor is stored twice, has a type that is no weight's, or an
            unrelated scale; a tensor is missing, unknown, or of another shape than config.json says. The message
            names the first one.
    """
    if (folder / ".metadata").is_file():
        raise UserError(
            f"{folder}: both a Megatron checkpoint (.metadata), which trainers load, and *.safetensors, which "
            "engines load; expected one of them"
        )
    headers = _read_headers(folder, hf)
    alternative_names = {
        hf.in_folder(name).format(l=layer): tuple(hf.in_folder(p).replace("{l}", str(layer)) for p in parts)
        for name, parts in hf.family.other_names.items()
        for layer in range(hf.layers + hf.mtp * hf.prediction_layers)
    }
    stacks = stacked_names(hf)
    scales = _take_scales(headers, hf, stacks)
    locations: dict[str, TensorLocation] = {}
    for name, tensor in headers.items():
        stack = stacks.get(name)
        parts = stack.parts if stack is not None else alternative_names.get(name, (name,))
        size = WEIGHT_TYPES.get(tensor.dtype, 2)  # what is quantised becomes bfloat16
        for part, location in _locations(tensor, parts, hf.experts, stack).items():
            if (earlier := locations.get(part)) is not None:
                raise UserError(
                    f"{folder}: {part} is stored twice: as {earlier.name} in {earlier.file.name} and as {name} in "
                    f"{tensor.file.name}"
                )
            locations[part] = replace(
                location, scales=scales.get(name), bytes=math.prod(location.shape) * size
            )
    check_names(hf, frozenset(locations), str(folder))
    for entry in entries(hf):
        for name, expected in entry.hf.items():
            if (shape := locations[name].shape) != expected:
                raise UserError(f"{folder}: {name} has shape {shape}; config.json says {expected}")
    return locations


def _read_headers(folder: Path, hf: HFConfig) -> dict[str, StoredTensor]:
    """Read the tensors of the folder by their names in its files.

    Raises:
        UserError: two files hold the same tensor, and the index does not select the copy that engines read.
    """
    index = _read_index(folder)
    copies: dict[str, list[StoredTensor]] = defaultdict(list)
    skipped = _BUFFERS if hf.shared_ffn_size else (*_BUFFERS, _SHARED_GATE)
    for file in _files(folder, index, hf):
        for tensor in read_header(file):
            if 0 not in tensor.shape and not tensor.name.endswith(skipped):
                copies[tensor.name].append(tensor)
    for name, stored_ones in copies.items():
        if len(stored_ones) == 1:
            continue
        twice = f"{folder}: {name} is stored twice: in {' and in '.join(s.file.name for s in stored_ones)}"
        if index is None:
            raise UserError(f"{twice}; expected one copy, or an {INDEX} that selects one")
        last = stored_ones[-1].file.name
        if index.get(name) != last:
            raise UserError(
                f"{twice}; {INDEX} has {index.get(name, 'no entry for it')}, but SGLang, which reads these files in "
                f"the order of their names, uses {last}"
            )
    return {name: stored_ones[-1] for name, stored_ones in copies.items()}


def _files(folder: Path, index: dict[str, str] | None, hf: HFConfig) -> list[Path]:
    """Return the files that SGLang reads, in its order."""
    names = {file.name for file in folder.glob("*.safetensors")}
    if not names:
        raise UserError(f"{folder}: contains no *.safetensors; expected the model's weights")
    if index is None:
        return [
            folder / name for name in sorted(names - {_ORIGINAL} if names == {_ORIGINAL, _MERGED} else names)
        ]
    files = sorted(set(index.values()))
    if hf.prediction_layers and hf.family.architecture in _PREDICTING and _PREDICTIONS in names - {*files}:
        files.append(_PREDICTIONS)
    if missing := [name for name in files if name not in names]:
        raise UserError(f"{folder}: {len(missing)} file(s) of {INDEX} are missing, first: {missing[0]}")
    return [folder / name for name in files]


def _read_index(folder: Path) -> dict[str, str] | None:
    """Read names of tensors -> names of files; None: the folder has no index."""
    path = folder / INDEX
    if not os.path.lexists(path):  # a link to a file that is gone is not "none"
        return None
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        weight_map = dict(index.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: not an index of safetensors files") from None
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(
                f"{path}: {name} is in {file!r:.80}; expected the name of a *.safetensors file of this folder"
            )
    if not weight_map:
        raise UserError(f"{path}: names no tensor")
    return weight_map


def _take_scales(
    headers: dict[str, StoredTensor], hf: HFConfig, stacks: Iterable[str]
) -> dict[str, tuple[Path, str]]:
    """Remove the scales of quantised tensors from `headers`, and return their locations by the names of the tensors.

    The groups of an mxfp4 tensor get the name and shape of the unquantised tensor.

    Raises:
        UserError: a type is no weight's, or a tensor and its scale do not belong together.
    """
    scales: dict[str, StoredTensor] = {}
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
                plain = headers[name]
                raise UserError(f"{plain} is stored twice, the second time quantised: {blocks or groups}")
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


def _check_type(tensor: StoredTensor, scale: StoredTensor | None, hf: HFConfig) -> None:
    """Check that the tensor is a plain weight, or an FP8 one with the scales of its blocks.

    Raises:
        UserError: it is not.
    """
    expected = "expected " + ", ".join(WEIGHT_TYPES)
    if hf.quantised == "fp8":
        expected += f", or {_FP8} with a scale {FP8_SCALES}"
    elif not hf.quantised:
        expected += "; config.json says nothing of quantised weights" * (tensor.dtype not in WEIGHT_TYPES)
    if tensor.dtype in WEIGHT_TYPES:
        if scale is not None:
            raise UserError(f"{tensor} has type {tensor.dtype} and a scale, {scale.name}; expected {_FP8}")
        return
    if tensor.dtype != _FP8 or hf.quantised != "fp8":
        raise UserError(f"{tensor} has type {tensor.dtype}; {expected}")
    if len(tensor.shape) != 2:
        raise UserError(f"{tensor} has type {_FP8} and shape {tensor.shape}; expected a matrix")
    if scale is None:
        raise UserError(
            f"{tensor} has type {_FP8} and no scale; expected {tensor.name}{FP8_SCALES} beside it"
        )
    blocks = tuple(-(-n // BLOCK) for n in tensor.shape)
    if scale.dtype not in _FP8_SCALE_TYPES:
        raise UserError(f"{scale} has type {scale.dtype}; expected {', '.join(_FP8_SCALE_TYPES)}")
    if scale.shape != blocks:
        raise UserError(
            f"{scale} has shape {scale.shape}; expected {blocks}, one scale for each block of {BLOCK} x {BLOCK} of "
            f"{tensor.name}, whose shape is {tensor.shape}"
        )


def _check_mxfp4(name: str, blocks: StoredTensor | None, scales: StoredTensor | None) -> StoredTensor:
    """Return the scales of an mxfp4 tensor.

    Raises:
        UserError: blocks `[experts, rows, groups, 16]` or scales `[experts, rows, groups]` are missing or no bytes.
    """
    if blocks is None or scales is None:
        present, missing = (blocks, MXFP4_SCALES) if blocks is not None else (scales, MXFP4_BLOCKS)
        raise UserError(f"{present} is present, but {name}{missing} is missing")
    if len(blocks.shape) != 4 or blocks.shape[-1] != 16:
        raise UserError(f"{blocks} has shape {blocks.shape}; expected [experts, rows, groups, 16]")
    for tensor in (blocks, scales):
        if tensor.dtype != _BYTE:
            raise UserError(f"{tensor} has type {tensor.dtype}; expected {_BYTE}")
    if scales.shape != blocks.shape[:-1]:
        raise UserError(
            f"{scales} has shape {scales.shape}; expected {blocks.shape[:-1]}, one scale for each group of "
            f"{blocks.name}"
        )
    return scales


def _locations(
    tensor: StoredTensor, parts: tuple[str, ...], experts: int, stack: Stack | None
) -> dict[str, TensorLocation]:
    """Return the locations of the tensors of the table that a stored tensor holds.

    Args:
        parts: their names in the table; names of one expert, with {e}, for a tensor of all experts.
    """
    file, name, shape = tensor.file, tensor.name, tensor.shape
    if "{e}" not in parts[0]:
        return {parts[0]: TensorLocation(file, name, shape)}
    if (stored_experts := shape[0] if len(shape) > 1 else 0) != experts:
        raise UserError(f"{file}: {name} holds {stored_experts} experts, config.json says {experts}")
    part_shape = (shape[1] // len(parts), *shape[2:])
    if stack is not None:
        part_shape = (shape[-1] // len(parts), *shape[1:-1])
    return {
        part.format(e=expert): TensorLocation(file, name, part_shape, expert, at, len(parts), stack)
        for expert in range(experts)
        for at, part in enumerate(parts)
    }


def read_header(file: Path) -> list[StoredTensor]:
    """Return the tensors of a file, from its header.

    Raises:
        UserError: the header is damaged, or the file's size does not match it.
    """
    try:
        size = file.stat().st_size
        if not file.is_file():
            raise UserError(f"{file}: cannot be read: not a file")
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise UserError(f"{file}: not a whole safetensors file: it ends within its header")
            header = json.loads(stream.read(length), object_pairs_hook=_object)
        if not isinstance(header.pop("__metadata__", {}), dict):
            raise ValueError
        tensors = [StoredTensor(file, name, t["dtype"], tuple(t["shape"])) for name, t in header.items()]
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
    if (expected_size := 8 + length + begins[-1]) != size:
        raise UserError(
            f"{file}: not a whole safetensors file: it has {size} bytes, its header requires {expected_size}"
        )
    return tensors


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a duplicate name, for which JSON readers use different values."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError
    return fields
