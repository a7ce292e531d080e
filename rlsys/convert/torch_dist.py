"""Reader and writer of torch.distributed.checkpoint's format for one process, chunk by chunk.

Megatron writes and loads this format with all ranks and their whole state in memory. This module has only one chunk
in memory, so that a model may be larger than the memory.

A tensor is stored in chunks, which are boxes with an offset and sizes. Each chunk is in torch.save's format, and the
chunks of a rank follow each other in the file `__<rank>_0.distcp`. `.metadata` contains the locations of all chunks.
Megatron also requires the files `metadata.json` and `common.pt`.
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
    """Region of a tensor: index of its first element, and its size along each axis."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """Index after the last element along each axis."""
        return tuple(a + n for a, n in zip(self.start, self.size, strict=True))

    def common(self, box: Box) -> Box | None:
        """Return the intersection with `box`; None if it is empty."""
        start = tuple(max(a, b) for a, b in zip(self.start, box.start, strict=True))
        size = tuple(min(a, b) - s for a, b, s in zip(self.end, box.end, start, strict=True))
        return Box(start, size) if min(size, default=1) > 0 else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select this box in a tensor with the values of `outer`."""
        return tuple(
            slice(a - o, a - o + n) for a, n, o in zip(self.start, self.size, outer.start, strict=True)
        )


class DistWriter:
    """Writer of a checkpoint. Call `write` once for every chunk, then `finish`. The files of all ranks stay open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._locations: dict[MetadataIndex, _StorageInfo] = {}
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> DistWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def write(self, rank: int, key: str, shape: tuple[int, ...], box: Box, piece: Tensor) -> None:
        """Write a chunk of a tensor to the file of a rank.

        Args:
            rank: The rank.
            key: Name of the tensor.
            shape: Shape of the tensor.
            box: Region of the chunk.
            piece: Values of the chunk, with as many elements as `box`.
        """
        metadata = self._tensors.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=piece.dtype), torch.Size(shape), [])
        )
        metadata.chunks.append(ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)))
        name = f"__{rank}_0.distcp"
        data = io.BytesIO()
        # Copied, because torch.save would save a view with its whole base tensor.
        torch.save(piece.reshape(box.size).clone(memory_format=torch.contiguous_format), data)
        if name not in self._files:
            self._files[name] = (self._folder / name).open("wb")
        file = self._files[name]
        self._locations[MetadataIndex(key, box.start)] = _StorageInfo(name, file.tell(), data.tell())
        file.write(data.getbuffer())

    def finish(self, common: dict[str, Any]) -> None:
        """Write the metadata. `common`: content of the checkpoint besides tensors."""
        metadata = Metadata({**self._tensors}, planner_data={}, storage_data=self._locations)
        (self._folder / _METADATA).write_bytes(pickle.dumps(metadata))
        torch.save(common, self._folder / "common.pt")
        (self._folder / "metadata.json").write_text(json.dumps(_FORMAT), encoding="utf-8")


_FORMAT_MODULES = {f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem")}
"""Modules whose dataclasses and enumerations `.metadata` may contain."""
_OTHER_PARTS = {
    ("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}  # fmt: skip
"""Other names that `.metadata` may contain."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler of `.metadata` that allows only plain data types.

    These are the format's dataclasses and enumerations, and torch's dtypes and sizes. An unrestricted unpickler could
    call any function.
    """

    def find_class(self, module: str, name: str) -> Any:
        if "." not in name:
            part = super().find_class(module, name) if module in (*_FORMAT_MODULES, "torch") else None
            holds_values = isinstance(part, type) and (is_dataclass(part) or issubclass(part, enum.Enum))
            if isinstance(part, torch.dtype) or (module in _FORMAT_MODULES and holds_values):
                return part
            if (module, name) in _OTHER_PARTS:
                return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains {module}.{name}; expected only types of the format")


class DistReader:
    """Reader of a checkpoint.

    Attributes:
        shapes: Shape of every tensor, by key.
        objects: Keys of other objects, which torch would unpickle without restrictions.

    Raises:
        UserError: The folder is not a checkpoint, or its metadata is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        file = folder / _METADATA
        try:
            metadata: Metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
        except FileNotFoundError:
            raise UserError(
                f"{folder}: not a checkpoint in torch_dist format: {_METADATA} is missing"
            ) from None
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as e:
            raise UserError(f"{file}: not readable: {type(e).__name__}: {e}") from None
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._locations: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {
            (index.fqn, tuple(index.offset or ())): location
            for index, location in metadata.storage_data.items()
        }
        self.shapes = {key: tuple(entry.size) for key, entry in self._tensors.items()}
        self.objects = metadata.state_dict_metadata.keys() - self.shapes.keys()

    def check_types(self, keys: Iterable[str]) -> None:
        """Check that tensors have types that are allowed for weights.

        Raises:
            UserError: A tensor of `keys` has another type.
        """
        for key in keys:
            if (dtype := self._tensors[key].properties.dtype) not in _WEIGHT_TYPES:
                names = [str(t).removeprefix("torch.") for t in (dtype, *_WEIGHT_TYPES)]
                raise UserError(
                    f"{self._folder}: {key} has type {names[0]}; expected {', '.join(names[1:-1])} or {names[-1]}"
                )

    def bytes_of(self, key: str) -> int:
        """Return the size of a tensor in bytes."""
        metadata = self._tensors[key]
        return math.prod(metadata.size) * metadata.properties.dtype.itemsize

    def read(self, key: str, box: Box) -> Tensor:
        """Read a region of a tensor, `[box.size]`.

        Raises:
            UserError: Values are missing, or a file is damaged.
        """
        metadata = self._tensors[key]
        values = torch.empty(box.size, dtype=metadata.properties.dtype)
        copied = 0
        for chunk in metadata.chunks:
            extent = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if (common := box.common(extent)) is None:
                continue
            piece = self._piece(key, extent)
            values[common.within(box)] = piece[common.within(extent)]
            copied += math.prod(common.size)
        if copied != values.numel():
            raise UserError(
                f"{self._folder}: {key} contains {copied} values of the region {box.size} at {box.start}; expected "
                f"{values.numel()}"
            )
        return values

    def _piece(self, key: str, extent: Box) -> Tensor:
        """Read the chunk of a tensor with this region."""
        location = self._locations[key, extent.start]
        file = self._folder / location.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(location.offset)
                piece: Tensor = torch.load(io.BytesIO(stream.read(location.length)), weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as e:
            raise UserError(f"{file}: {key} is not readable: {' '.join(str(e).split())[:200]}") from None
        return piece.reshape(extent.size)
