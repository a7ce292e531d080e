"""Reader and writer of the tensors of a Hugging Face model folder, one tensor at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlsys.config.precision import BLOCK
from rlsys.convert.config import HFConfig
from rlsys.convert.folder import INDEX, MXFP4_BLOCKS, TensorLocation, find_tensors
from rlsys.convert.output import partial_of
from rlsys.convert.quantised import from_fp8, from_mxfp4
from rlsys.convert.stack import part_of
from rlsys.convert.table import carried_names
from rlsys.core.errors import UserError
from rlsys.core.model_folder import side_files

MAX_FILE_BYTES = 4 << 30
"""Default maximum size of a file of weights."""


class HFTensors:
    """Tensors of a folder by their names in the name table, read on demand."""

    def __init__(self, folder: Path, config: HFConfig) -> None:
        """Locate the tensors.

        Raises:
            UserError: The folder does not contain exactly the model's tensors; see find_tensors.
        """
        self._locations = find_tensors(folder, config)
        self.carried = carried_names(config, self.names)
        """Names of the tensors that are copied instead of trained (rlsys.convert.carried)."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._locations)

    @property
    def bytes(self) -> int:
        """Size of all tensors in bytes; quantised tensors count as bfloat16."""
        return sum(location.bytes for location in self._locations.values())

    def read(self, name: str) -> Tensor:
        """Read the tensor with this name in the name table; quantised tensors become bfloat16.

        Raises:
            UserError: The file is damaged.
        """
        location = self._locations[name]
        try:
            if location.scales is not None:
                return _read_dequantised(location, location.scales)
            with safe_open(str(location.file), framework="pt") as f:
                if location.expert is None:
                    tensor: Tensor = f.get_tensor(location.name)
                    return tensor
                fused: Tensor = f.get_slice(location.name)[location.expert]
                if location.stack is not None:
                    return part_of(fused, location.part, location.stack)
                return fused.chunk(location.parts, dim=0)[location.part]
        except (SafetensorError, OSError) as e:
            raise UserError(f"{location.file}: not a whole safetensors file: {e}") from None


def _read_dequantised(location: TensorLocation, scales: tuple[Path, str]) -> Tensor:
    """Read a quantised tensor as bfloat16."""
    with safe_open(str(location.file), framework="pt") as f, safe_open(str(scales[0]), framework="pt") as g:
        if location.expert is None:
            return from_fp8(f.get_tensor(location.name), g.get_tensor(scales[1]), BLOCK)
        rows = slice(location.part, None, location.parts)
        blocks: Tensor = f.get_slice(location.name + MXFP4_BLOCKS)[location.expert]
        exponents: Tensor = g.get_slice(scales[1])[location.expert]
        return from_mxfp4(blocks[rows], exponents[rows])


def write_hf(
    folder: Path,
    source: Path,
    tensors: Iterable[tuple[str, Tensor]],
    max_file_bytes: int = MAX_FILE_BYTES,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write a model folder atomically. The tensors of one file are in memory at once.

    Args:
        folder: The new folder.
        source: Folder whose config.json, tokenizer and other files are copied.
        tensors: (name, tensor) of the model.
        max_file_bytes: Maximum size of a file of weights.
        changes: Changed fields of config.json, by name.
    """
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files: list[list[str]] = []
    dtypes: set[torch.dtype] = set()
    total = buffer_bytes = 0
    buffer: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(buffer, partial / f"{len(files)}.part", metadata={"format": "pt"})
        files.append(list(buffer))
        buffer.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if buffer and buffer_bytes + size > max_file_bytes:
            flush()
            buffer_bytes = 0
        # Copied: the tensor may be a view of a parameter, which the next optimizer step changes.
        buffer[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        dtypes.add(tensor.dtype)
        buffer_bytes, total = buffer_bytes + size, total + size
    flush()
    _name_files(partial, files, total)
    changes = dict(changes)
    if len(dtypes) == 1:
        raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
        changes["torch_dtype" if "torch_dtype" in raw else "dtype"] = str(dtypes.pop()).removeprefix("torch.")
    copy_side_files(source, partial, changes)
    publish(partial, folder)


def _name_files(folder: Path, files: list[list[str]], total_bytes: int) -> None:
    """Rename the files 0.part, 1.part, ... to the names that loaders expect, and write an index if there are several.

    Args:
        folder: Folder of the files.
        files: Names of the tensors in each file.
        total_bytes: Size of all tensors.
    """
    if len(files) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{i}.part").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_side_files(source: Path, folder: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Copy all files of a model folder except the weights.

    The copy of config.json does not contain quantization_config.

    Args:
        source: The model folder.
        folder: The folder to copy to.
        changes: Changed fields of config.json, by name.
    """
    for name in side_files(source):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    config = {**json.loads((source / "config.json").read_text(encoding="utf-8")), **changes}
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def publish(partial: Path, folder: Path) -> None:
    """Sync the content of `partial` to disk and rename it to `folder`, which is replaced if it exists."""
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
