"""Platform plug-in that lets the stock SGLang server run on a host without CUDA.

SGLang finds `activate` through its entry point group `sglang.srt.platforms` and calls it early in each of its
processes. Every op then takes its plain torch path (forward_native), so no compiled kernel package is needed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

import torch

FOLDER = "engine"
"""Of the environment; launch/bootstrap.py installs there what only SGLang's processes import."""


def activate() -> str | None:
    """The platform's import path where there is no CUDA device; None, so that SGLang chooses itself, elsewhere."""
    if torch.cuda.is_available():
        return None
    declare_torchvision_ops()
    return "rlsys.engine.cpu.native.CpuNativePlatform"


def declare_torchvision_ops() -> None:
    """Make torchvision importable beside a CPU torch; SGLang imports it at start, for models we do not serve.

    The registry's torchvision is linked against CUDA: its compiled ops do not load here, and then its own import
    fails on the two ops that it describes to the compiler. A declaration is all that is missing; nobody calls
    them. Where its ops do load (a CPU build), nothing is declared.

    Set-up installs it in a folder of its own, which only processes that import SGLang look into: transformers imports
    whatever torchvision it finds, and would fail without the declaration.
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
        with contextlib.suppress(RuntimeError):  # declared before
            torch.library.define(
                f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
