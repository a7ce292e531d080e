"""Checks of `rlsys doctor`: the hardware and software of this machine, missing parts, and their replacements."""

from __future__ import annotations

import importlib.util
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlsys.core.devices import VARIABLE, gpu_names, have_cuda, visible_devices
from rlsys.obs import filesystem
from rlsys.obs.lock_probe import examine_locks
from rlsys.obs.packages import installed_version, mismatches, sglang_pin_mismatch

PACKAGES = ("torch", "sglang", "megatron-core", "transformers", "reasoning-gym", "ray", "rlsys")
PROBE_MIB = 32
PORTS_TRIED = 20


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: the checked part.
        value: its version, size or state.
        note: advice or explanation; empty: none.
        ok: False if a run on this machine would fail.
    """

    name: str
    value: str
    note: str = ""
    ok: bool = True


def examine() -> list[Finding]:
    """Run all checks, without importing torch."""
    gpus = gpu_names()
    return [
        Finding("python", platform.python_version(), sys.executable),
        *_packages(bool(gpus)),
        Finding("cpu", f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB memory"),
        Finding("disk", f"{shutil.disk_usage('.').free / 1e9:.0f} GB free here"),
        _folder(Path.cwd()),
        _shared_memory(),
        _gpu(gpus),
        *(_compilers() if gpus else []),
        _communication(bool(gpus)),
        _address(),
        _ports(),
        _slurm(),
        _transformer_engine(),
        _apex(),
    ]


def _packages(gpus: bool) -> list[Finding]:
    """Check the main packages, and all packages whose version rlsys does not support.

    Args:
        gpus: whether the machine has GPUs. Without them, torch may differ from the version that SGLang pins.
    """
    unmet = mismatches()
    pinned = sglang_pin_mismatch("torch")
    findings = []
    for name in (*PACKAGES, *(n for n in unmet if n not in PACKAGES)):
        version = installed_version(name)
        if name == "torch" and pinned is not None and (gpus or name in unmet):
            prefix = f"expected {unmet[name].expected}: run `make setup`; " if name in unmet else ""
            sglang = installed_version("sglang")
            note = f"{prefix}SGLang {sglang}, whose compiled parts need it, pins {pinned.expected}"
            findings.append(Finding(name, version or "not installed", note, ok=False))
        elif name in unmet:
            note = f"expected {unmet[name].expected}: run `make setup`"
            findings.append(Finding(name, version or "not installed", note, ok=False))
        elif version is None:
            optional = name == "ray"
            note = "only for many machines" if optional else "run `make setup`"
            findings.append(Finding(name, "not installed", note, ok=optional))
        else:
            findings.append(Finding(name, version))
    return findings


def _gpu(names: list[str]) -> Finding:
    if names:
        return Finding("gpu", "; ".join(names))
    if visible_devices() == []:
        return Finding("gpu", "none", f"{VARIABLE} = {os.environ[VARIABLE]!r} hides all")
    if have_cuda():
        return Finding("gpu", "none", "nvidia-smi is installed, but the driver does not respond", ok=False)
    return Finding("gpu", "none", "gloo and torch attention instead")


def _compilers() -> list[Finding]:
    """Check nvcc and ninja, with which engines compile kernels at their first use."""
    ninja = shutil.which("ninja")
    return [
        _nvcc(),
        Finding(
            "ninja",
            ninja or "not on PATH",
            "" if ninja else "engines compile kernels with it",
            ok=bool(ninja),
        ),
    ]


def _nvcc() -> Finding:
    """Check nvcc in the folder that SGLang and torch use as CUDA toolkit.

    This is CUDA_HOME, or else CUDA_PATH, or else the folder of the nvcc on PATH, or else /usr/local/cuda.
    """
    variable = next((name for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)), None)
    on_path = shutil.which("nvcc")
    if variable is not None:
        home = Path(os.environ[variable])
    else:
        home = Path(on_path).parents[1] if on_path else Path("/usr/local/cuda")
    nvcc = home / "bin" / "nvcc"
    if not nvcc.exists():
        searched = f"{variable} = {home}" if variable else "PATH, /usr/local/cuda"
        note = f"no bin/nvcc ({searched}): engines compile kernels; set CUDA_HOME to the folder of the CUDA toolkit"
        return Finding("nvcc", "not found", note, ok=False)
    toolkit = nvcc.resolve().parents[1]
    if toolkit != home.resolve():  # only nvcc is linked; headers and libraries are in the toolkit's folder
        note = f"a link into {toolkit}, whose headers are not found from {home}: set CUDA_HOME={toolkit}"
        return Finding("nvcc", str(nvcc), note, ok=False)
    return Finding("nvcc", str(nvcc), "engines compile kernels with it")


def _shared_memory() -> Finding:
    """Check /dev/shm, through which engines on this machine get weights."""
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", "no /dev/shm", "use weights.method=broadcast")
    free = shutil.disk_usage("/dev/shm").free / 1e9
    return Finding("shared memory", f"{free:.1f} GB free in /dev/shm", "used for weight buckets")


def _folder(folder: Path) -> Finding:
    """Check the type of a folder's file system, its write rate, and its locks, as for a run folder."""
    kind = filesystem.kind_of(folder)
    note = (
        "not visible to other machines; sufficient for one machine"
        if kind in filesystem.LOCAL
        else "may be visible to other machines: the ledger is locked for one process, without WAL"
    )
    data = os.urandom(2**20) * PROBE_MIB
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.monotonic()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            rate = PROBE_MIB / (time.monotonic() - start)
        locks, work = examine_locks(folder)
    except OSError as e:
        return Finding("this folder", f"{kind}: {e.strerror}", "runs write and lock files", ok=False)
    return Finding("this folder", f"{kind}, writes {rate:,.0f} MiB/s; {locks}", note, ok=work)


def _communication(gpus: bool) -> Finding:
    torch = importlib.util.find_spec("torch")
    library = Path(torch.origin).parent / "lib" / "libtorch_cuda.so" if torch and torch.origin else None
    cuda = library is not None and library.exists()
    backends = "nccl and gloo" if cuda else "gloo"
    is_missing = gpus and not cuda
    return Finding(
        "ranks talk by",
        backends,
        "torch has no CUDA, but there are GPUs" if is_missing else "",
        ok=not is_missing,
    )


def _address() -> Finding:
    """Check whether this machine's host name resolves to an address that other machines can reach."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.socket() as s:
            s.bind((address, 0))
    except OSError as e:
        return Finding("address", f"{name}: {e.strerror}", "runs over several machines need it")
    local = address.startswith("127.")
    return Finding(
        "address", f"{name} = {address}", "loopback: set it in DNS for several machines" if local else ""
    )


def _ports() -> Finding:
    """Check how many of PORTS_TRIED random ports are free, in the range in which roles listen (launch/ports.py)."""
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    below = int(range_file.read_text().split()[0]) if range_file.exists() else 32768
    busy_ports = 0
    for port in random.sample(range(1024, below), PORTS_TRIED):
        with socket.socket() as s:
            busy_ports += s.connect_ex(("127.0.0.1", port)) == 0
    return Finding("ports", f"{PORTS_TRIED - busy_ports} of {PORTS_TRIED} tried below {below} are free")


def _slurm() -> Finding:
    if shutil.which("sbatch") is None:
        return Finding("slurm", "not installed", "only for launch.backend=slurm")
    result = subprocess.run(["sbatch", "--version"], capture_output=True, text=True)
    if result.returncode:
        return Finding("slurm", "installed, but not connected to a cluster", "only for launch.backend=slurm")
    job = os.environ.get("SLURM_JOB_ID")
    return Finding("slurm", result.stdout.strip(), f"inside job {job}" if job else "not inside a job")


def _transformer_engine() -> Finding:
    if importlib.util.find_spec("transformer_engine"):
        return Finding("transformer engine", "found", "fused layers, FP8")
    return Finding("transformer engine", "not found", "megatron-core's local layers instead")


def _apex() -> Finding:
    """Check NVIDIA's Apex by its compiled module amp_C, because `apex` on PyPI is another package."""
    if importlib.util.find_spec("amp_C"):
        return Finding("apex", "found", "fused optimizer and gradient norm")
    return Finding("apex", "not found", "torch's AdamW and gradient norm instead")
