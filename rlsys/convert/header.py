"""The header of a safetensors file, without torch: what it holds, and whether all of it is there."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from rlsys.errors import UserError

INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000  # the format's own bound


def check_weights(folder: Path) -> None:
    """Raises UserError that names the first safetensors file of a model folder that is missing or not whole."""
    for file in sorted(folder.glob("*.safetensors")):
        check_whole(file)
    if not (folder / INDEX).is_file():
        return
    try:
        named = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / INDEX}: not an index of safetensors files") from None
    if missing := sorted(name for name in named if not (folder / name).is_file()):
        raise UserError(f"{folder}: {len(missing)} file(s) of {INDEX} are missing, first: {missing[0]}")


def check_whole(file: Path) -> None:
    """Raises UserError unless the file has exactly the bytes that its header tells."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, _LARGEST_HEADER):
                raise UserError(f"{file}: not a whole safetensors file: it ends within its header")
            header = json.loads(stream.read(length))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    except OSError as e:
        raise UserError(f"{file}: cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise UserError(f"{file}: not a whole safetensors file: its header is damaged") from None
    told = 8 + length + max(ends, default=0)
    if told != size:
        raise UserError(
            f"{file}: not a whole safetensors file: it has {size} bytes, its header tells of {told}"
        )
