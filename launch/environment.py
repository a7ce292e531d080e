"""Environment variables that a run sets for its processes, by kind of role and of host. Pure, save for two questions
to the host.
"""

from __future__ import annotations

import os
from typing import Literal

from rlsys.config import Config
from rlsys.core.devices import VARIABLE

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
CUDA_HOST = {
    **EVERYWHERE,
    # SGLang's own value, which it sets for itself: both ends of a communicator must map memory in the same way.
    "NCCL_CUMEM_ENABLE": "0",
}


def environment(config: Config, kind: Kind, *, cuda: bool, cores: int | None = None) -> dict[str, str]:
    """What every role of this kind gets. `cores` of a node, this one's when not given."""
    if not cuda:
        return dict(CPU_HOST)
    found = dict(CUDA_HOST)
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
