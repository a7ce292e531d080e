"""Locations of a model's tensors in a folder, from the index and the headers of the files. No torch.

Trainer and engine must read the same bits. SGLang loads every tensor of every file that the index lists, in the order
of the files' names, and therefore uses the last copy of a tensor; without an index it loads all files. rlsys reads
each tensor from the file that the index names, and rejects folders in which SGLang would use another copy.
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
"""Suffixes of the names of scales of fp8 tensors, and of the two parts of mxfp4 tensors."""
WEIGHT_TYPES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Bytes of an element of each type of weights that are not quantised, by safetensors' name."""
_FP8, _FP8_SCALE_TYPES, _BYTE = "F8_E4M3", (*WEIGHT_TYPES, "F8_E8M0"), "U8"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip
"""Bits of an element of each type, by safetensors' name."""
_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Suffixes of tensors in old folders that are not weights; SGLang and transformers skip them, too."""
_SHARED_GATE = "shared_expert_gate.weight"
"""Suffix of the gate of shared experts, which transformers writes even if their size is 0; SGLang then skips it."""
_ORIGINAL, _MERGED = "consolidated.safetensors", "model.safetensors"
"""Files of Mistral's folders, of which the first contains the same weights in Mistral's own format."""
_MTP_FILE, _MTP_FILE_ARCHITECTURES = "mtp.safetensors", ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
"""File that SGLang reads for these architectures even if the index does not list it."""
_MAX_HEADER_BYTES = 100_000_000  # maximum of the safetensors format

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """Description of a tensor in a file's header. `dtype`: safetensors' name of the type."""

    file: Path
    name: str
    dtype: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor of the name table: a whole stored tensor, or a part of one that contains all experts.

    Attributes:
        file: File of the stored tensor.
        name: Name of the stored tensor.
        shape: Shape of the tensor of the name table.
        expert: Index of the expert in the stored tensor; None: the stored tensor is the tensor of the name table.
        part: Index of the part of this expert.
        parts: Number of parts of an expert.
        stack: The family's stack to which the stored tensor belongs; None: it belongs to none.
        scales: File and name of the scales of a quantised tensor; None: it is not quantised.
        bytes: Size of the tensor after dequantisation.
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
    """Return the location of every tensor of the folder, by its name in the name table.

    Parts of tensors that contain all experts have the names of single experts' tensors.

    Raises:
        UserError: A file is missing or incomplete, or the tensors are not those of the model: a tensor is missing,
            unknown or stored twice, has an unsupported type, lacks its scale, or has another shape than config.json
            defines.
    """
    if (folder / ".metadata").is_file():
        raise UserError(
            f"{folder}: contains both a Megatron checkpoint (.metadata), which trainers load, and *.safetensors, "
            "which engines load; expected one of them"
        )
    headers = _read_headers(folder, hf)
    alternative_names = _alternative_names(hf)
    stacks = stacked_names(hf)
    scales = _take_scales(headers, hf, stacks)
    locations: dict[str, TensorLocation] = {}
    for name, tensor in headers.items():
        stack = stacks.get(name)
        parts = stack.parts if stack is not None else alternative_names.get(name, (name,))
        size = WEIGHT_TYPES.get(tensor.dtype, 2)  # quantised tensors become bfloat16
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
    _check_shapes(locations, hf, folder)
    return locations


def _alternative_names(hf: HFConfig) -> dict[str, tuple[str, ...]]:
    """Return the family's `other_names` for every layer."""
    return {
        hf.in_folder(name).format(l=layer): tuple(hf.in_folder(p).replace("{l}", str(layer)) for p in parts)
        for name, parts in hf.family.other_names.items()
        for layer in range(hf.layers + hf.mtp * hf.prediction_layers)
    }


def _check_shapes(locations: dict[str, TensorLocation], hf: HFConfig, folder: Path) -> None:
    """Raise UserError for a tensor with another shape than config.json defines."""
    for entry in entries(hf):
        for name, expected in entry.hf.items():
            if (shape := locations[name].shape) != expected:
                raise UserError(
                    f"{folder}: {name} has shape {shape}; expected {expected} according to config.json"
                )


def _read_headers(folder: Path, hf: HFConfig) -> dict[str, StoredTensor]:
    """Read the descriptions of all tensors of the folder, by their names in its files.

    Raises:
        UserError: Two files contain the same tensor, and the index does not name the copy that SGLang uses.
    """
    index = _read_index(folder)
    copies: dict[str, list[StoredTensor]] = defaultdict(list)
    skipped = _BUFFERS if hf.shared_ffn_size else (*_BUFFERS, _SHARED_GATE)
    for file in _files(folder, index, hf):
        for tensor in read_header(file):
            if 0 not in tensor.shape and not tensor.name.endswith(skipped):
                copies[tensor.name].append(tensor)
    for name, tensors in copies.items():
        if len(tensors) > 1:
            _check_copies(folder, name, [tensor.file.name for tensor in tensors], index)
    return {name: tensors[-1] for name, tensors in copies.items()}


def _check_copies(folder: Path, name: str, files: list[str], index: dict[str, str] | None) -> None:
    """Raise UserError unless the index names the last of the files with the tensor `name`, which SGLang uses."""
    problem = f"{folder}: {name} is stored twice: in {' and in '.join(files)}"
    if index is None:
        raise UserError(f"{problem}; expected one copy, or an {INDEX} that selects one")
    if index.get(name) != files[-1]:
        raise UserError(
            f"{problem}; {INDEX} has {index.get(name, 'no entry for it')}; expected {files[-1]}, which SGLang uses"
        )


def _files(folder: Path, index: dict[str, str] | None, hf: HFConfig) -> list[Path]:
    """Return the files that SGLang reads, in its order.

    Raises:
        UserError: The folder has no weights, or a file of the index is missing.
    """
    names = {file.name for file in folder.glob("*.safetensors")}
    if not names:
        raise UserError(f"{folder}: contains no *.safetensors; expected the model's weights")
    if index is None:
        if names == {_ORIGINAL, _MERGED}:
            names.remove(_ORIGINAL)
        return [folder / name for name in sorted(names)]
    files = sorted(set(index.values()))
    reads_mtp_file = hf.prediction_layers and hf.family.architecture in _MTP_FILE_ARCHITECTURES
    if reads_mtp_file and _MTP_FILE in names - {*files}:
        files.append(_MTP_FILE)
    if missing := [name for name in files if name not in names]:
        raise UserError(f"{folder}: {len(missing)} of the files in {INDEX} are missing, first: {missing[0]}")
    return [folder / name for name in files]


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor according to the index; None: the folder has no index.

    Raises:
        UserError: The index is damaged or empty.
    """
    path = folder / INDEX
    if not os.path.lexists(path):  # a broken link is an index that cannot be read
        return None
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        weight_map = dict(index.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(
            f"{path}: not readable ({type(e).__name__}); expected a JSON object with weight_map, the files of tensors"
        ) from None
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(
                f"{path}: {name} is in {file!r:.80}; expected the name of a *.safetensors file of this folder"
            )
    if not weight_map:
        raise UserError(f"{path}: weight_map is empty; expected all tensors of the model")
    return weight_map


def _take_scales(
    headers: dict[str, StoredTensor], hf: HFConfig, stacks: Iterable[str]
) -> dict[str, tuple[Path, str]]:
    """Remove the scales of quantised tensors from `headers`.

    The blocks of an mxfp4 tensor get the name and the shape of the dequantised tensor.

    Args:
        headers: Descriptions of all tensors, by name; changed in place.
        hf: The model's configuration.
        stacks: Names of tensors that contain all experts, which alone may have the format mxfp4.

    Returns:
        File and name of the scales, by the name of the quantised tensor.

    Raises:
        UserError: A tensor has an unsupported type, or its scales are missing or do not match it.
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
                raise UserError(
                    f"{headers[name]} is stored twice: also quantised, as {blocks or groups}; expected one of them"
                )
            scales[name] = _check_mxfp4(name, blocks, groups)
            assert blocks is not None
            experts, rows, count, _ = blocks.shape
            headers[name] = replace(blocks, name=name, shape=(experts, count * 32, rows))
            packed.add(name)
    for name in sorted(headers.keys() - packed):
        _check_type(headers[name], scales.get(name), hf)
    if without_tensor := scales.keys() - headers.keys():
        name = min(without_tensor)
        raise UserError(f"{scales[name]} is the scale of {name}, which is missing")
    return {name: (scale.file, scale.name) for name, scale in scales.items()}


def _check_type(tensor: StoredTensor, scale: StoredTensor | None, hf: HFConfig) -> None:
    """Check the type of a tensor, and the scales of an FP8 tensor.

    Raises:
        UserError: The tensor is neither unquantised, nor an FP8 matrix with one scale for each block.
    """
    expected = "expected " + ", ".join(WEIGHT_TYPES)
    if hf.quantised == "fp8":
        expected += f", or {_FP8} with a scale {FP8_SCALES}"
    elif not hf.quantised:
        expected += ", because config.json has no quantization_config"
    if tensor.dtype in WEIGHT_TYPES:
        if scale is not None:
            raise UserError(f"{tensor} has type {tensor.dtype} and a scale, {scale.name}; expected {_FP8}")
        return
    if tensor.dtype != _FP8 or hf.quantised != "fp8":
        raise UserError(f"{tensor} has type {tensor.dtype}; {expected}")
    if len(tensor.shape) != 2:
        raise UserError(f"{tensor} has type {_FP8} and shape {tensor.shape}; expected a matrix")
    if scale is None:
        raise UserError(f"{tensor} has type {_FP8} and no scale; expected a tensor {tensor.name}{FP8_SCALES}")
    blocks = tuple(-(-n // BLOCK) for n in tensor.shape)
    if scale.dtype not in _FP8_SCALE_TYPES:
        raise UserError(f"{scale} has type {scale.dtype}; expected {', '.join(_FP8_SCALE_TYPES)}")
    if scale.shape != blocks:
        raise UserError(
            f"{scale} has shape {scale.shape}; expected {blocks}, one scale for each block of {BLOCK} x {BLOCK} of "
            f"{tensor.name}, whose shape is {tensor.shape}"
        )


def _check_mxfp4(name: str, blocks: StoredTensor | None, scales: StoredTensor | None) -> StoredTensor:
    """Check the two parts of an mxfp4 tensor, and return the scales.

    Args:
        name: Name of the tensor.
        blocks: `[experts, rows, groups, 16]` bytes.
        scales: `[experts, rows, groups]` bytes.

    Raises:
        UserError: A part is missing, or has another type or shape.
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
    """Return the locations of the tensors of the name table that a stored tensor contains, by name.

    Args:
        tensor: The stored tensor.
        parts: Names in the name table. For a tensor that contains all experts, those of one expert, with {e}.
        experts: Number of experts of the model.
        stack: The family's stack to which the tensor belongs; None: it belongs to none.

    Raises:
        UserError: The tensor contains another number of experts.
    """
    file, name, shape = tensor.file, tensor.name, tensor.shape
    if "{e}" not in parts[0]:
        return {parts[0]: TensorLocation(file, name, shape)}
    if (stored_experts := shape[0] if len(shape) > 1 else 0) != experts:
        raise UserError(
            f"{file}: {name} contains {stored_experts} experts; expected {experts} according to config.json"
        )
    part_shape = (shape[1] // len(parts), *shape[2:])
    if stack is not None:
        part_shape = (shape[-1] // len(parts), *shape[1:-1])
    return {
        part.format(e=expert): TensorLocation(file, name, part_shape, expert, i, len(parts), stack)
        for expert in range(experts)
        for i, part in enumerate(parts)
    }


def read_header(file: Path) -> list[StoredTensor]:
    """Return the descriptions of the tensors in a file.

    Raises:
        UserError: The file cannot be read, its header is damaged, or its size does not match the header.
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
        tensors, data_bytes = _parse_header(file, header)
    except OSError as e:
        raise UserError(f"{file}: cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise UserError(f"{file}: not a whole safetensors file: its header is damaged") from None
    if (expected_size := 8 + length + data_bytes) != size:
        raise UserError(
            f"{file}: not a whole safetensors file: it has {size} bytes; expected {expected_size} according to its "
            "header"
        )
    return tensors


def _parse_header(file: Path, header: dict[str, Any]) -> tuple[list[StoredTensor], int]:
    """Return the tensors of a header, and the number of bytes of their data.

    Raises an arbitrary error for a damaged header, ValueError if the data of its tensors has gaps or overlaps.
    """
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
    # Without gaps and overlaps, each tensor begins where another one ends.
    ends = [0, *sorted(end for _, end in extents)]
    if not sizes_fit or ends[:-1] != sorted(begin for begin, _ in extents):
        raise ValueError
    return tensors, ends[-1]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a duplicate name, of which JSON readers use different values."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError
    return fields
