"""Carried tensors: tensors of a folder that rlsys copies without training them.

They are vision towers and untrained layers for multi-token prediction (MTP). Trained MTP layers are not carried,
except for their copies of the model's embedding and head, which exports replace by the trained ones. A Hugging Face
folder stores carried tensors among its other tensors, and a converted Megatron checkpoint in separate files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.hf import MAX_FILE_BYTES, HFTensors
from rlsys.convert.table import carried_names, shared_names

_FILES = "carried-*.tensors"


def save_carried(checkpoint: Path, tensors: HFTensors, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write the carried tensors of a folder into a checkpoint.

    Args:
        checkpoint: The checkpoint.
        tensors: Tensors of the folder.
        max_file_bytes: Size from which a file is complete. The tensors of one file are in memory at once.
    """
    buffer: dict[str, Tensor] = {}
    files = size = 0
    names = sorted(tensors.carried)
    for i, name in enumerate(names):
        buffer[name] = tensors.read(name)
        size += buffer[name].nbytes
        if size >= max_file_bytes or i == len(names) - 1:
            save_file(buffer, checkpoint / _FILES.replace("*", f"{files:05d}"))
            buffer, files, size = {}, files + 1, 0


class CheckpointCarried:
    """Carried tensors of a converted checkpoint, which are read on demand."""

    def __init__(self, checkpoint: Path) -> None:
        self._files: dict[str, Path] = {}
        for file in sorted(checkpoint.glob(_FILES)):
            with safe_open(str(file), framework="pt") as f:
                self._files |= dict.fromkeys(f.keys(), file)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def read(self, name: str) -> Tensor:
        """Read the tensor `name`."""
        with safe_open(str(self._files[name]), framework="pt") as f:
            tensor: Tensor = f.get_tensor(name)
        return tensor


def with_carried(
    tensors: Iterable[tuple[str, Tensor]], source: Path, hf: HFConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the model's tensors, then of the carried ones, in a fixed order.

    Args:
        tensors: (name, tensor) of the model.
        source: Folder or converted checkpoint of the initial model, which contains the carried tensors.
        hf: The model's configuration.
    """
    carried: HFTensors | CheckpointCarried
    if any(source.glob("*.safetensors")):
        carried = HFTensors(source, hf)
        names = carried.carried
    else:
        carried = CheckpointCarried(source)
        names = carried_names(hf, carried.names)
    copies = {original: copy for copy, original in shared_names(hf).items() if hf.mtp and copy in names}
    for name, tensor in tensors:
        yield name, tensor
        if name in copies:
            yield copies[name], tensor
    for name in sorted(names - set(copies.values())):
        yield name, carried.read(name)
