"""Weights from one engine to another by way of the run's folder, while the trainer does something else.

`give` and `take` run inside SGLang's scheduler, on every rank, as its own `--custom-weight-loader`: a call to
`update_weights_from_tensor` names one of them as its load format, and brings no tensors. Ranks of one number hold the
same parts, under the same names and in the same order, so what a rank gives is copied as it is. What arrived is
attested like a push. An error is logged and not raised: it would end the server, and attestation sees it anyway.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsys.core.membership import WEIGHTS_VARIABLE

GIVE, TAKE = "rlsys.engine.hooks.peer_weights.give", "rlsys.engine.hooks.peer_weights.take"
FILE_BYTES = 2**30
log = logging.getLogger(__name__)


def give(model: Any, _tensors: object) -> None:
    """Write this rank's parameters. The folder appears whole or not at all; one file of it is held at a time."""
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
        log.error("rlsys: cannot give weights to another engine: %s", e)


def take(model: Any, _tensors: object) -> None:
    """Copy what a rank of this number gave, and delete it."""
    import torch
    from safetensors import SafetensorError, safe_open
    from sglang.srt.model_loader.loader import post_load_weights

    folder, mine = _folder(), dict(model.named_parameters())
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file, torch.no_grad():
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    mine.pop(name).copy_(file.get_tensor(name))
        if mine:
            raise KeyError(next(iter(mine)))
        post_load_weights(model)  # what it computes from them once they are there
    except (OSError, SafetensorError, KeyError, RuntimeError) as e:
        log.error("rlsys: cannot take weights of another engine: %r", e)
    shutil.rmtree(folder, ignore_errors=True)


def _folder() -> Path:
    import torch.distributed as dist

    return Path(os.environ[WEIGHTS_VARIABLE]) / f"rank-{dist.get_rank()}"


def _files(model: Any) -> Iterator[dict[str, Any]]:
    """Its parameters on the host, in portions of one file."""
    held: dict[str, Any] = {}
    size = 0
    for name, parameter in model.named_parameters():
        held[name] = parameter.detach().to("cpu").contiguous()
        size += parameter.nbytes
        if size >= FILE_BYTES:
            yield held
            held, size = {}, 0
    yield held
