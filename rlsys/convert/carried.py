"""Tensors that nobody here trains or serves, and that go along with the model all the same, unchanged: layers for
multi-token prediction, and vision towers.

A folder has them among its others, a Megatron checkpoint that was converted from one in files of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.hf import MAX_FILE_BYTES, HFTensors

_FILES = "carried-*.tensors"


def save_carried(checkpoint: Path, tensors: HFTensors, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Those of a folder into a checkpoint. Holds at most one file's."""
    held: dict[str, Tensor] = {}
    files = size = 0
    names = sorted(tensors.carried)
    for i, name in enumerate(names):
        held[name] = tensors.read(name)
        size += held[name].nbytes
        if size >= max_file_bytes or i == len(names) - 1:
            save_file(held, checkpoint / _FILES.replace("*", f"{files:05d}"))
            held, files, size = {}, files + 1, 0


def carried(source: Path, hf: HFConfig) -> Iterator[tuple[str, Tensor]]:
    """Those of a folder or of a checkpoint, in an order that never changes."""
    if any(source.glob("*.safetensors")):
        tensors = HFTensors(source, hf)
        for name in sorted(tensors.carried):
            yield name, tensors.read(name)
    for file in sorted(source.glob(_FILES)):
        with safe_open(str(file), framework="pt") as f:
            for name in sorted(f.keys()):
                yield name, f.get_tensor(name)
