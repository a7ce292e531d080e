"""Whether this host computes on GPUs, and on which: one answer for the launcher and all that it starts, without
importing torch.

The launcher decides, and hides the GPUs from the roles of a run on the CPU (launch/environment.py), so that torch
answers alike in each of them. The set-up (launch/bootstrap.py) asks here, too: standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices() -> list[str] | None:
    """The devices that CUDA_VISIBLE_DEVICES lists; None if it is not set, which means all of the host's.

    CUDA stops at the first index that it does not know, so that nothing after `-1` counts.
    """
    listed = os.environ.get(VARIABLE)
    if listed is None:
        return None
    devices: list[str] = []
    for device in listed.split(","):
        if device.strip() in ("", "-1"):
            break
        devices.append(device.strip())
    return devices


def have_cuda() -> bool:
    """True if the host has an NVIDIA driver and CUDA_VISIBLE_DEVICES does not hide all of its GPUs."""
    # A container may have the devices without the tool.
    return visible_devices() != [] and (shutil.which("nvidia-smi") is not None or bool(_device_files()))


def gpu_names() -> list[str]:
    """Model and memory of each of the host's GPUs, as far as the driver says; empty without one that answers, and
    where CUDA_VISIBLE_DEVICES hides all."""
    if not have_cuda():
        return []
    if (tool := shutil.which("nvidia-smi")) is not None:
        query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True)
        return answer.stdout.strip().splitlines() if answer.returncode == 0 else []
    models = [_model(file) for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    return models or [str(file) for file in sorted(_device_files())]


def _device_files() -> list[Path]:
    return list(Path("/dev").glob("nvidia[0-9]*"))


def _model(information: Path) -> str:
    fields = (line.partition(":") for line in information.read_text().splitlines())
    return next((value.strip() for name, _, value in fields if name == "Model"), information.parent.name)
