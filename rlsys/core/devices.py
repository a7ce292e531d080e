"""Detection of this host's GPUs without importing torch: one answer for the launcher and all of its processes.

The launcher decides, and hides the GPUs from the roles of a CPU run (launch/environment.py), so that torch
gives the same answer in each of them. launch/bootstrap.py imports this file, too: standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices() -> list[str] | None:
    """Return the devices that CUDA_VISIBLE_DEVICES lists; None, for all devices, if it is not set.

    CUDA stops at the first index that it does not know, so entries after `-1` are ignored.
    """
    variable = os.environ.get(VARIABLE)
    if variable is None:
        return None
    devices: list[str] = []
    for device in variable.split(","):
        if device.strip() in ("", "-1"):
            break
        devices.append(device.strip())
    return devices


def have_cuda() -> bool:
    """Return whether the host has an NVIDIA driver and CUDA_VISIBLE_DEVICES does not hide all of its GPUs."""
    # A container may have the devices without the tool.
    return visible_devices() != [] and (shutil.which("nvidia-smi") is not None or bool(_device_files()))


def gpu_names() -> list[str]:
    """Return model and memory of each GPU of the host, as the driver reports them.

    The list is empty if no driver answers, or if CUDA_VISIBLE_DEVICES hides all GPUs.
    """
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
