"""Whether this host computes on GPUs: one answer for the launcher and all that it starts, without importing torch.

The launcher decides, and hides the GPUs from the roles of a run on the CPU (launch/environment.py), so that torch
answers alike in each of them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"


def have_cuda() -> bool:
    """True if the host has an NVIDIA driver and CUDA_VISIBLE_DEVICES does not hide all of its GPUs.

    CUDA stops at the first index that it does not know, so `-1` and an empty list hide all.
    """
    if os.environ.get(VARIABLE, "0").split(",")[0].strip() in ("", "-1"):
        return False
    # A container may have the devices without the tool.
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*"))
