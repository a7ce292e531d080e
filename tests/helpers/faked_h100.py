"""Resolve an engine's command line with SGLang's own parser, on a host with eight fake H100 GPUs.

As a script: `faked_h100.py CONFIG...` prints one line of JSON per config: the settings that SGLang resolves, or its
error. Kernel packages whose import needs CUDA are mocks; no kernel runs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

GIB = 2**30
KERNELS = (
    "sgl_kernel", "pynvml", "flashinfer", "deep_gemm", "cutlass", "quack", "flash_attn", "tilelang", "humming",
    "deep_ep", "flash_mla",
)  # fmt: skip
REPORTED_FIELDS = (
    "dtype", "attention_backend", "sampling_backend", "load_format", "quantization", "max_total_tokens", "tp_size",
    "enable_memory_saver", "enable_deterministic_inference", "disable_radix_cache", "moe_runner_backend",
)  # fmt: skip


class _KernelImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_kernel = name.split(".")[0] in KERNELS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_kernel else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__name__, module.__spec__, module.__version__ = [], spec.name, spec, "99.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def fake_gpus() -> None:
    import torch

    properties = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * GIB, multi_processor_count=132,
        is_integrated=False, uuid="GPU-0", gcnArchName="", warp_size=32, L2_cache_size=50 * 2**20,
        max_threads_per_multi_processor=2048, shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 8, "get_device_capability": (9, 0), "current_device": 0,
        "get_device_properties": properties, "get_device_name": properties.name,
        "mem_get_info": (79 * GIB, 80 * GIB), "synchronize": None, "empty_cache": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    torch.version.cuda = "13.0"
    sys.meta_path.insert(0, _KernelImporter())


def resolve_settings(path: Path) -> dict[str, Any]:
    from rlsys.config import load_config
    from rlsys.engine import launch_args

    launch_args.have_cuda = lambda: True
    argv, environment = launch_args.engine_command(load_config(path), 0, 30000)
    os.environ.update({k: v for k, v in environment.items() if k != "CUDA_VISIBLE_DEVICES"})
    from sglang.srt.server_args import prepare_server_args

    try:
        arguments = prepare_server_args(argv[argv.index("-m") + 2 :])
        arguments.resolve_once()
        settings = arguments.resolved_dict()
    except (Exception, SystemExit) as e:  # noqa: BLE001 - the error is the result
        return {"config": path.stem, "error": f"{type(e).__name__}: {e}"}
    return {"config": path.stem, **{name: settings.get(name) for name in REPORTED_FIELDS}}


if __name__ == "__main__":
    from rlsys.engine.cpu.platform import declare_torchvision_ops

    declare_torchvision_ops()
    fake_gpus()
    for name in sys.argv[1:]:
        print(json.dumps(resolve_settings(Path(name)), default=str), flush=True)
