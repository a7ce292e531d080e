"""`rlsys doctor`: what this machine has, what is missing, and what takes its place."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass

import psutil

PACKAGES = ("torch", "sglang", "megatron-core", "transformers", "reasoning-gym", "ray", "rlsys")


@dataclass(frozen=True)
class Finding:
    """`ok` is False for what a run cannot do without."""

    name: str
    value: str
    note: str = ""
    ok: bool = True


def examine() -> list[Finding]:
    """Looks, and imports nothing heavy."""
    gpus = _gpus()
    return [
        Finding("python", platform.python_version(), sys.executable),
        *(_package(name, optional=name == "ray") for name in PACKAGES),
        Finding("cpu", f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB memory"),
        Finding("disk", f"{shutil.disk_usage('.').free / 1e9:.0f} GB free here"),
        _shared_memory(),
        Finding("gpu", "; ".join(gpus) or "none", "" if gpus else "gloo and torch attention instead"),
        _transformer_engine(),
        _apex(),
    ]


def _package(name: str, optional: bool) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        note = "only for many machines" if optional else "run `make setup`"
        return Finding(name, "not installed", note, ok=optional)


def _gpus() -> list[str]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    done = subprocess.run(
        [smi, "--query-gpu=name,memory.total", "--format=csv,noheader"], capture_output=True, text=True
    )
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _shared_memory() -> Finding:
    """Weight buckets go through it when weights.method is tensor."""
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", "no /dev/shm", "use weights.method=disk")
    free = shutil.disk_usage("/dev/shm").free / 1e9
    return Finding("shared memory", f"{free:.1f} GB free in /dev/shm", "weight buckets pass through it")


def _transformer_engine() -> Finding:
    if importlib.util.find_spec("transformer_engine"):
        return Finding("transformer engine", "found", "fused layers, FP8")
    return Finding("transformer engine", "not found", "megatron-core's local layers instead")


def _apex() -> Finding:
    """The registry's package of that name is another one: only NVIDIA's has the compiled module amp_C."""
    if importlib.util.find_spec("amp_C"):
        return Finding("apex", "found", "fused optimizer and gradient norm")
    return Finding("apex", "not found", "torch's AdamW and gradient norm instead")
