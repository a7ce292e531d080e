"""Transfer of weights between engines through the run's folder, without the trainer.

`write` and `read` run in SGLang's scheduler on each rank, as its `--custom-weight-loader`: a call to
`update_weights_from_tensor` names one of them as load format, and contains no tensors. Equal ranks of two
engines have the same shards, names and order, so a rank's parameters are copied unchanged. The result is
attested as after a push, which also detects failures: they are only logged, because an exception would end the
server.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsys.core.membership import WEIGHTS_VARIABLE

WRITE_LOADER, READ_LOADER = "rlsys.engine.hooks.peer_weights.write", "rlsys.engine.hooks.peer_weights.read"
FILE_BYTES = 2**30
"""Size in bytes from which a file gets no more parameters."""
log = logging.getLogger(__name__)


def write(model: Any, _tensors: object) -> None:
    """Write this rank's parameters to a folder, which appears atomically.

    The host's memory holds the parameters of one file at a time.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = _folder()
    part = folder.with_suffix(".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for number, tensors in enumerate(_files(model)):
            save_file(tensors, part / f"{number:05d}.safetensors")
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(part, ignore_errors=True)
        log.error("rlsys: cannot write weights to %s for another engine: %s", folder, e)


def read(model: Any, _tensors: object) -> None:
    """Load the parameters that the same rank of another engine wrote, and delete their folder."""
    import torch
    from safetensors import SafetensorError, safe_open
    from sglang.srt.model_loader.loader import post_load_weights

    folder, parameters = _folder(), dict(model.named_parameters())
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file, torch.no_grad():
                for name in file.keys():  # noqa: SIM118 - not a dict
                    parameters.pop(name).copy_(file.get_tensor(name))
        if parameters:
            raise KeyError(f"the files lack the parameter {next(iter(parameters))}")
        post_load_weights(model)  # recompute tensors that the model derives from them
    except (OSError, SafetensorError, KeyError, RuntimeError) as e:
        log.error("rlsys: cannot load weights of another engine from %s: %r", folder, e)
    shutil.rmtree(folder, ignore_errors=True)


def _folder() -> Path:
    """Return the folder of this rank's parameters."""
    import torch.distributed as dist

    return Path(os.environ[WEIGHTS_VARIABLE]) / f"rank-{dist.get_rank()}"


def _files(model: Any) -> Iterator[dict[str, Any]]:
    """Yield the model's parameters on the host. All dicts but the last one have at least FILE_BYTES bytes."""
    tensors: dict[str, Any] = {}
    size = 0
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach().to("cpu").contiguous()
        size += parameter.nbytes
        if size >= FILE_BYTES:
            yield tensors
            tensors, size = {}, 0
    yield tensors
