"""Environment variables of a run's processes, by kind of role and host.

Pure, except for queries of the host and its environment.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from rlsys.config import Config
from rlsys.core.cache import cache_folder
from rlsys.core.devices import VARIABLE
from rlsys.planner.layout import on_cuda

Kind = Literal["engine", "rollout", "trainer"]

EVERYWHERE = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # a run reads only local files
    "PYTHONUNBUFFERED": "1",  # a log must contain the last line before a crash
}
CPU_HOST = {
    **EVERYWHERE,
    "OMP_NUM_THREADS": "1",  # several processes share the cores
    # Otherwise MKL's sums depend on memory alignment, and a seed's sample on the other requests in a batch.
    "MKL_CBWR": "AUTO",
    "TORCH_COMPILE_DISABLE": "1",  # compiling takes minutes on a CPU and gains nothing
    "TORCHDYNAMO_DISABLE": "1",  # skips the compiler's import, a second of an engine's start
    VARIABLE: "",  # torch must not see GPUs that the plan does not use
}
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of torch's allocator: the old and the new name."""
EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)true", re.IGNORECASE)
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_JIT_CACHE_DIR": "sglang-jit",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Environment variable with the path of a compiler's kernel cache -> name of the cache in kernel_folder()."""
CUDA_HOST = {
    **EVERYWHERE,
    # The value that SGLang sets for itself: both ends of a communicator must map memory in the same way.
    "NCCL_CUMEM_ENABLE": "0",
}


def kernel_folder() -> Path:
    """Return the cache folder of compiled kernels."""
    return cache_folder("kernels")


def _cache_variables() -> dict[str, str]:
    """Return the variables of CACHES: the values of this process, or folders in kernel_folder()."""
    return {name: os.environ.get(name) or str(kernel_folder() / part) for name, part in CACHES.items()}


def allocator_notes(config: Config) -> list[str]:
    """Return a message for each of the user's allocator settings that some roles do not get."""
    if not on_cuda(config):
        return []
    roles = "engines and trainer" if _shares_memory(config, "trainer") else "engines"
    return [
        f"{name} = {os.environ[name]}: {roles} get expandable_segments:False, because they release their memory or "
        "share it with other processes"
        for name in _expandable()
    ]


def _expandable() -> list[str]:
    """Return the variables of torch's allocator that request expandable segments."""
    return [name for name in ALLOCATORS if EXPANDABLE.search(os.environ.get(name, ""))]


def _shares_memory(config: Config, kind: Kind) -> bool:
    """Return whether roles of this kind share memory by CUDA IPC, or release it through torch_memory_saver.

    Neither works with expandable segments. Engines always do, because their ranks share memory for their all-reduce.
    """
    method = config.weights.method
    by_memory = config.launch.placement == "colocated" and method in ("auto", "broadcast")
    return kind == "engine" or (kind == "trainer" and (by_memory or method == "adapter"))


def environment(config: Config, kind: Kind, *, cuda: bool, cores: int | None = None) -> dict[str, str]:
    """Return the environment variables of all roles of this kind.

    Args:
        config: config of the run.
        kind: kind of the roles.
        cuda: whether the run uses GPUs.
        cores: number of cores of a node; None: the number of cores of this machine.
    """
    if not cuda:
        if os.access(Path.home(), os.W_OK | os.X_OK):
            return dict(CPU_HOST)
        # SGLang and torch create their caches below the home folder while they are imported.
        return {**CPU_HOST, **_cache_variables(), "XDG_CACHE_HOME": str(cache_folder("home"))}
    variables = dict(CUDA_HOST)
    if kind != "rollout":
        variables |= _cache_variables()
    if _shares_memory(config, kind):
        variables |= {name: EXPANDABLE.sub(r"\1False", os.environ[name]) for name in _expandable()}
    if kind == "engine":
        # This check compares the free memory of the ranks' GPUs, which starting trainer ranks fill unevenly.
        variables["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    if kind == "trainer":
        ranks = config.launch.gpus_per_node or config.parallel.world_size
        # Adam's states in host memory are updated by several cores, which the ranks of a node share.
        variables["OMP_NUM_THREADS"] = str(max(1, (cores or os.cpu_count() or 1) // ranks))
        if config.parallel.tp * config.parallel.cp > 1:
            # With one queue to the GPU, communication that is launched before a GEMM starts before the GEMM.
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        if config.model.fp8_trainer:
            # By default Transformer Engine rounds scales up to powers of two; SGLang's kernels on Hopper do not.
            variables["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1"
    return variables
