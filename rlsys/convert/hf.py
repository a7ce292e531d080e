"""The tensors of a Hugging Face model folder, read and written one at a time."""

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


class HFTensors:
    """Tensors of a folder by their names in the table, read on demand."""

    def __init__(self, folder: Path, config: HFConfig) -> None:
        """Locate the tensors of `folder`. Raises UserError if they are not exactly the model's (find_tensors)."""
        self._locations = find_tensors(folder, config)
        self.carried = carried_names(config, self.names)
        """Names of the tensors that are not trained."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._locations)

    @property
    def bytes(self) -> int:
        """Size of all tensors in bytes as they are read; a quantised tensor counts as bfloat16."""
        return sum(location.bytes for location in self._locations.values())

    def read(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            UserError: the file is damaged.
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
    """Write a model folder: `tensors` with the config and tokenizer of `source`.

    Holds at most one file's tensors in memory. Atomic: the complete `folder` appears, or none.

    Args:
        changes: changed fields of config.json.
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
        # A copy: the tensor may be a view of a parameter, and the next optimizer step must not reach it.
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
    """Rename files to the names that loaders expect, once their number is known; write an index for several."""
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
    """Copy the files that accompany the weights, so that `folder` is a complete model.

    The copy of config.json has no quantisation.

    Args:
        changes: changed fields of config.json.
    """
    for name in side_files(source):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    config = {**json.loads((source / "config.json").read_text(encoding="utf-8")), **changes}
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def publish(partial: Path, folder: Path) -> None:
    """Give `partial` its final name, after its content is synced to disk."""
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
