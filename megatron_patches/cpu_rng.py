"""Random state on a CPU: megatron's tracker reads and writes the state of torch's CPU generator.

Symptom: IndexError, because torch.cuda.default_generators is empty.
Upstream: 0.16.1 - 0.19.2.
Why numbers stay equal: A process has one generator on a CPU, as it has one per device with CUDA.
Delete with: cpu_import.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from megatron_patches.registry import Patch, target


def _edit(module: ModuleType) -> None:
    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
        target("cpu_rng", module, name, "torch.cuda.default_generators")

    def get_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    module._get_cuda_rng_state = get_state  # type: ignore[attr-defined]
    module._set_cuda_rng_state = set_state  # type: ignore[attr-defined]


PATCH = Patch(
    "cpu_rng", "megatron.core.tensor_parallel.random", "no-cuda", "0.16.1 - 0.19.2",
    "IndexError: torch.cuda.default_generators has no device 0", _edit,
)  # fmt: skip
