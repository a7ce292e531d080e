"""Platform plug-in that lets the stock SGLang server run on a host without CUDA.

SGLang finds `activate` through its entry point group `sglang.srt.platforms` and calls it early in each of its
processes. Every op then takes its plain torch path (forward_native), so no compiled kernel package is needed.
"""

from __future__ import annotations

import contextlib

import torch


def activate() -> str | None:
    """The platform's import path where there is no CUDA device; None, so that SGLang chooses itself, elsewhere."""
    if torch.cuda.is_available():
        return None
    declare_torchvision_ops()
    return "rlsys.engine.cpu_native.CpuNativePlatform"


def declare_torchvision_ops() -> None:
    """The registry's torchvision is linked against CUDA: its compiled ops do not load beside a CPU torch, and then
    its own import fails on the two ops that it describes to the compiler. A declaration is all that is missing;
    nobody calls them here.
    """
    for op in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # declared before, or by a torchvision that did load
            torch.library.define(
                f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
