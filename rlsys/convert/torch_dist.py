"""A folder in torch.distributed.checkpoint's format, read and written a piece at a time, by one process.

Megatron writes and loads the same format with all ranks and their whole state in memory. Here nothing but the piece
at hand is: a model larger than memory passes through. A tensor is stored in pieces (a box of the tensor: where it
begins, its sizes), each as torch.save writes it, one after the other in files `__<rank>_0.distcp`; `.metadata` says
what lies where, and megatron's own `metadata.json` and `common.pt` make the folder one of its checkpoints.
"""

from __future__ import annotations

import enum
import io
import json
import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rlsys.core.errors import UserError

_METADATA = ".metadata"
_WEIGHT_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Box:
    """Where a piece lies in its tensor: first element and size along each axis."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.size, strict=True))

    def common(self, other: Box) -> Box | None:
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        size = tuple(min(a, b) - s for a, b, s in zip(self.end, other.end, start, strict=True))
        return Box(start, size) if min(size, default=1) > 0 else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The slices that cut this box out of the values of `outer`."""
        return tuple(
            slice(a - o, a - o + n) for a, n, o in zip(self.start, self.size, outer.start, strict=True)
        )


class DistWriter:
    """`put` every piece once, then `finish`. Holds the files of all ranks open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> DistWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def put(self, rank: int, key: str, shape: tuple[int, ...], box: Box, piece: Tensor) -> None:
        """Write `piece` `[box.size]` of tensor `key` `[shape]` to the file of `rank`."""
        stored = self._tensors.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=piece.dtype), torch.Size(shape), [])
        )
        stored.chunks.append(ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)))
        name, data = f"__{rank}_0.distcp", io.BytesIO()
        # A copy: a view would be saved with all that it is a view of.
        torch.save(piece.reshape(box.size).clone(memory_format=torch.contiguous_format), data)
        if name not in self._files:
            self._files[name] = (self._folder / name).open("wb")
        file = self._files[name]
        self._places[MetadataIndex(key, box.start)] = _StorageInfo(name, file.tell(), data.tell())
        file.write(data.getbuffer())

    def finish(self, common: dict[str, Any]) -> None:
        """What makes the folder a checkpoint. `common`: what is no tensor."""
        metadata = Metadata({**self._tensors}, planner_data={}, storage_data=self._places)
        (self._folder / _METADATA).write_bytes(pickle.dumps(metadata))
        torch.save(common, self._folder / "common.pt")
        (self._folder / "metadata.json").write_text(json.dumps(_FORMAT), encoding="utf-8")


_FORMAT_MODULES = {f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem")}
_OTHER_PARTS = {
    ("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Reads `.metadata`, which is a pickle: it may name any function of any module, and call it. Allowed are types
    that only hold values: dataclasses and enumerations of the format, and torch's numbers types and sizes."""

    def find_class(self, module: str, name: str) -> Any:
        if "." not in name:
            part = super().find_class(module, name) if module in (*_FORMAT_MODULES, "torch") else None
            holds_values = isinstance(part, type) and (is_dataclass(part) or issubclass(part, enum.Enum))
            if isinstance(part, torch.dtype) or (module in _FORMAT_MODULES and holds_values):
                return part
            if (module, name) in _OTHER_PARTS:
                return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


class DistReader:
    """Raises UserError when `folder` is no such checkpoint. `shapes`: of all tensors in it, by key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        file = folder / _METADATA
        try:
            metadata: Metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
        except FileNotFoundError:
            raise UserError(
                f"{folder}: not a checkpoint in torch_dist format: no {_METADATA} in it"
            ) from None
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as e:
            raise UserError(f"{file}: not readable: {type(e).__name__}: {e}") from None
        self._tensors = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._places: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {
            (index.fqn, tuple(index.offset or ())): place for index, place in metadata.storage_data.items()
        }
        self.shapes = {key: tuple(stored.size) for key, stored in self._tensors.items()}

    def check_types(self, keys: Iterable[str]) -> None:
        """Raises UserError for a tensor of `keys` whose stored type is no weight's."""
        for key in keys:
            if (dtype := self._tensors[key].properties.dtype) not in _WEIGHT_TYPES:
                names = [str(t).removeprefix("torch.") for t in (dtype, *_WEIGHT_TYPES)]
                raise UserError(
                    f"{self._folder}: {key} has type {names[0]}; expected {', '.join(names[1:-1])} or {names[-1]}"
                )

    def bytes_of(self, key: str) -> int:
        """Of the tensor's values."""
        stored = self._tensors[key]
        return math.prod(stored.size) * stored.properties.dtype.itemsize

    def read(self, key: str, box: Box) -> Tensor:
        """The values of `box`, `[box.size]`. Raises UserError when some are missing or a file is damaged."""
        stored = self._tensors[key]
        out = torch.empty(box.size, dtype=stored.properties.dtype)
        filled = 0
        for chunk in stored.chunks:
            held = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if (common := box.common(held)) is None:
                continue
            piece = self._piece(key, held)
            out[common.within(box)] = piece[common.within(held)]
            filled += math.prod(common.size)
        if filled != out.numel():
            raise UserError(
                f"{self._folder}: {key} holds {filled} of the {out.numel()} values at {box.start}"
            )
        return out

    def _piece(self, key: str, held: Box) -> Tensor:
        place = self._places[key, held.start]
        file = self._folder / place.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(place.offset)
                piece: Tensor = torch.load(io.BytesIO(stream.read(place.length)), weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as e:
            raise UserError(f"{file}: {key} is not readable: {' '.join(str(e).split())[:200]}") from None
        return piece.reshape(held.size)
