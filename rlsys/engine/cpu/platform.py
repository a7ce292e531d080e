"""Platform plug-in that runs SGLang's server on a host without CUDA.

SGLang calls `activate`, of the entry point group `sglang.srt.platforms`, early in each of its processes. Every op
then uses its plain torch path (forward_native), so no compiled kernel package is needed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

import torch

FOLDER = "engine"
"""Folder of the environment in which launch/bootstrap.py installs packages for SGLang's processes only."""


def activate() -> str | None:
    """Return the import path of the platform class; None on a host with CUDA, where SGLang selects its own."""
    if torch.cuda.is_available():
        return None
    declare_torchvision_ops()
    return "rlsys.engine.cpu.native.CpuNativePlatform"


def declare_torchvision_ops() -> None:
    """Make torchvision importable with a CPU build of torch. SGLang imports it for models that rlsys does not serve.

    torchvision from the registry is linked against CUDA. Its compiled ops do not load, and its import fails on
    the two ops that it registers with the compiler. This function declares these ops, which are never called. If the
    compiled ops load, as in a CPU build, nothing is declared.

    launch/bootstrap.py installs torchvision in FOLDER, which only processes that import SGLang have on their path.
    Otherwise transformers would import it in all processes, and fail without the declaration.
    """
    folder = Path(sys.prefix) / FOLDER
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    for library in Path(spec.origin).parent.glob("_C*.so"):
        with contextlib.suppress(OSError):
            torch.ops.load_library(library)
            return
    for op in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # already declared
            torch.library.define(
                f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
