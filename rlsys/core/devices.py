"""Detection of this host's GPUs without importing torch.

The launcher uses it, and hides the GPUs from the roles of a CPU run (launch/environment.py), so that torch agrees in
each role. Standard library only, because launch/bootstrap.py imports this file, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices() -> list[str] | None:
    """Return the devices that CUDA_VISIBLE_DEVICES lists; None if it is not set, so that all are visible.

    Entries from an empty one or `-1` on are ignored, because CUDA stops at the first invalid entry.
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
    # A container may have device files without nvidia-smi.
    return visible_devices() != [] and (shutil.which("nvidia-smi") is not None or bool(_device_files()))


def gpu_names() -> list[str]:
    """Return a description of each GPU of the host: model and memory, or the model, or the device file.

    The list is empty if the driver does not respond, or if CUDA_VISIBLE_DEVICES hides all GPUs.
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
