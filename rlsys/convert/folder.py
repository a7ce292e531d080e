"""What the safetensors files of a model folder hold, read from their headers: no tensors, no torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rlsys.convert.config import HFConfig
from rlsys.convert.rules import Stack
from rlsys.convert.table import check_names, entries, stacked_names
from rlsys.errors import UserError

INDEX = "model.safetensors.index.json"
FP8_SCALES, MXFP4_BLOCKS, MXFP4_SCALES = "_scale_inv", "_blocks", "_scales"
"""How names of quantised tensors and of their scales end."""
_LARGEST_HEADER = 100_000_000  # the format's own bound

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: a whole one, or part `part` of `parts` of expert `expert` of a fused one.

    `stack`: what the fused one is, if it is one of the family's. `scales`: of a quantised one, their file and name.
    """

    file: Path
    name: str
    shape: Shape
    expert: int | None = None
    part: int = 0
    parts: int = 1
    stack: Stack | None = None
    scales: tuple[Path, str] | None = None


def find_tensors(folder: Path, hf: HFConfig) -> dict[str, Place]:
    """Every tensor of the folder by its name in the table; the parts of fused experts have per-expert names.

    Raises UserError that names the first file that is missing or not whole, the first tensor that is missing, has no
    place in the model, or another shape than config.json says.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no *.safetensors in it")
    _check_index(folder)
    others = {
        hf.in_folder(name).format(l=layer): tuple(hf.in_folder(p).replace("{l}", str(layer)) for p in parts)
        for name, parts in hf.family.other_names.items()
        for layer in range(hf.layers + hf.mtp * hf.prediction_layers)
    }
    stacks = stacked_names(hf)
    headers = {name: (file, shape) for file in files for name, shape in read_header(file).items()}
    scales = _take_scales(headers, hf, stacks)
    found: dict[str, Place] = {}
    for name, (file, shape) in headers.items():
        stack = stacks.get(name)
        parts = stack.parts if stack is not None else others.get(name, (name,))
        places = _places(file, name, shape, parts, hf.experts, stack)
        found |= {part: replace(place, scales=scales.get(name)) for part, place in places.items()}
    check_names(hf, frozenset(found), str(folder))
    for entry in entries(hf):
        for name, expected in entry.hf.items():
            if (shape := found[name].shape) != expected:
                raise UserError(f"{folder}: {name} has shape {shape}; config.json says {expected}")
    return found


def _take_scales(
    headers: dict[str, tuple[Path, Shape]], hf: HFConfig, stacks: Iterable[str]
) -> dict[str, tuple[Path, str]]:
    """Takes scales of quantised tensors out of `headers`: where each lies, by the name of its tensor. What mxfp4 has
    in groups gets the name and shape that it has unquantised.
    """
    found = {}
    if hf.quantised == "fp8":
        for name in [name for name in headers if name.endswith(FP8_SCALES)]:
            found[name.removesuffix(FP8_SCALES)] = headers.pop(name)[0], name
    if hf.quantised == "mxfp4":
        for name in stacks:
            blocks, scales = name + MXFP4_BLOCKS, name + MXFP4_SCALES
            if blocks in headers and scales in headers:
                file, (experts, rows, groups, _) = headers.pop(blocks)
                found[name] = headers.pop(scales)[0], scales
                headers[name] = file, (experts, groups * 32, rows)
    return found


def _places(
    file: Path, name: str, shape: Shape, parts: tuple[str, ...], experts: int, stack: Stack | None
) -> dict[str, Place]:
    """`parts`: the names of the table that the tensor holds, of one expert for those of all."""
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


def _check_index(folder: Path) -> None:
    if not (folder / INDEX).is_file():
        return
    try:
        named = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / INDEX}: not an index of safetensors files") from None
    if missing := sorted(name for name in named if not (folder / name).is_file()):
        raise UserError(f"{folder}: {len(missing)} file(s) of {INDEX} are missing, first: {missing[0]}")


def read_header(file: Path) -> dict[str, Shape]:
    """Tensors and their shapes. Raises UserError unless the file has exactly the bytes that its header tells."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, _LARGEST_HEADER):
                raise UserError(f"{file}: not a whole safetensors file: it ends within its header")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        shapes = {name: tuple(tensor["shape"]) for name, tensor in header.items()}
    except OSError as e:
        raise UserError(f"{file}: cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise UserError(f"{file}: not a whole safetensors file: its header is damaged") from None
    if (told := 8 + length + end) != size:
        raise UserError(
            f"{file}: not a whole safetensors file: it has {size} bytes, its header tells of {told}"
        )
    return shapes
