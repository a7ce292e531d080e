"""Environment variables that a run sets for its processes, by kind of role and of host. Pure, save for questions to
the host and its environment.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from rlsys.config import Config
from rlsys.devices import VARIABLE, have_cuda

Kind = Literal["engine", "rollout", "trainer"]

EVERYWHERE = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # a run reads only what is on this disk
    "PYTHONUNBUFFERED": "1",  # a log must hold the last line before a death
}
CPU_HOST = {
    **EVERYWHERE,
    "OMP_NUM_THREADS": "1",  # several processes share the cores
    # Else MKL's sums depend on where in memory a tensor lies, and a seed's sample on what is decoded beside it.
    "MKL_CBWR": "AUTO",
    "TORCH_COMPILE_DISABLE": "1",  # compiling costs minutes there and wins nothing
    "TORCHDYNAMO_DISABLE": "1",  # nor is the compiler imported: a second of an engine's start
    VARIABLE: "",  # torch must not find GPUs that the plan does not have
}
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Settings of torch's allocator, by the older and the newer name."""
EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)true", re.IGNORECASE)
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_JIT_CACHE_DIR": "sglang-jit",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Where compilers keep kernels from start to start -> the folder in kernel_folder()."""
CUDA_HOST = {
    **EVERYWHERE,
    # SGLang's own value, which it sets for itself: both ends of a communicator must map memory in the same way.
    "NCCL_CUMEM_ENABLE": "0",
}


def on_cuda(config: Config) -> bool:
    """Whether the run's processes compute on GPUs: planned ones, or those that are here."""
    return config.launch.gpus_per_node > 0 or have_cuda()


def kernel_folder() -> Path:
    """Of what is compiled on a user's machines."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlsys" / "kernels"


def allocator_notes(config: Config) -> list[str]:
    """One line for each setting of the allocator that some roles do not get."""
    if not on_cuda(config):
        return []
    roles = "engines and trainer" if _hands_over(config, "trainer") else "engines"
    return [
        f"{name} = {os.environ[name]}: {roles} get expandable_segments:False, because their memory is given back or "
        "handed to other processes"
        for name in _expandable()
    ]


def _expandable() -> list[str]:
    return [name for name in ALLOCATORS if EXPANDABLE.search(os.environ.get(name, ""))]


def _hands_over(config: Config, kind: Kind) -> bool:
    """Whether roles of this kind give memory to other processes by CUDA IPC, or to torch_memory_saver: neither takes
    expandable segments. Ranks of an engine do so for their all-reduce."""
    return kind == "engine" or (kind == "trainer" and config.weights.method in ("tensor", "adapter"))


def environment(config: Config, kind: Kind, *, cuda: bool, cores: int | None = None) -> dict[str, str]:
    """What every role of this kind gets. `cores` of a node, this one's when not given."""
    if not cuda:
        return dict(CPU_HOST)
    found = dict(CUDA_HOST)
    if kind != "rollout":
        found |= {name: os.environ.get(name) or str(kernel_folder() / part) for name, part in CACHES.items()}
    if _hands_over(config, kind):
        found |= {name: EXPANDABLE.sub(r"\1False", os.environ[name]) for name in _expandable()}
    if kind == "engine":
        # It compares the free memory of the ranks' GPUs, which trainer ranks that are starting fill unevenly.
        found["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    if kind == "trainer":
        ranks = config.launch.gpus_per_node or config.parallel.world_size
        # The part of Adam that is in host memory uses several cores, and ranks share those of their node.
        found["OMP_NUM_THREADS"] = str(max(1, (cores or os.cpu_count() or 1) // ranks))
        if config.parallel.tp * config.parallel.cp > 1:
            # One queue to the GPU: communication that was asked for before a GEMM begins before it.
            found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        if config.model.fp8 == "both":
            # Else Transformer Engine rounds scales up to powers of two, and SGLang's kernels on Hopper do not.
            found["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1"
    return found
