"""Functions that the parts of the drill share (gpu.py): the device, timing, and the config of the measured model."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_figures import MODELS, NoDevice
from measure import write_random_moe

import rlsys.trainer  # noqa: F401 - patches megatron-core before anything below imports it
from rlsys.config import Config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CUDA = DEVICE == "cuda"

LAYER_SHAPE: dict[str, int] = {
    "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "max_position_embeddings": 4096,
}  # fmt: skip
"""Sizes of Qwen3-30B-A3B's layers (config.json of Qwen/Qwen3-30B-A3B), with a smaller vocabulary."""
SMALL_SHAPE: dict[str, int] = {"vocab_size": 512, "head_dim": 64, "max_position_embeddings": 4096}
"""Sizes without a GPU, where the drill only checks that parts run."""


def need_cuda() -> None:
    """Raise NoDevice on a host without a GPU."""
    if not CUDA:
        raise NoDevice


def synchronize() -> None:
    """Wait until the GPU has finished its work; without a GPU do nothing."""
    if CUDA:
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object]) -> float:
    """Call `work`. Return the wall-clock seconds until the device has finished it."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def layer_config(run: Path, layers: int, **sections: dict[str, Any]) -> Config:
    """Return the config of a random bfloat16 model with layers of Qwen3-30B-A3B's shape, or small ones without a GPU.

    Writes the model, unless an earlier part of the drill has written it.

    Args:
        run: run.dir.
        layers: number of layers.
        sections: fields to set, by section of the config.
    """
    folder = Path(os.environ[MODELS]) / f"layers{layers}"
    if not (folder / "model.safetensors").exists():
        shutil.rmtree(folder, ignore_errors=True)  # a part that was killed may have left an incomplete folder
        shape = LAYER_SHAPE if CUDA else SMALL_SHAPE
        write_random_moe(folder, dtype=torch.bfloat16, device=DEVICE, num_hidden_layers=layers, **shape)
    values: dict[str, dict[str, Any]] = {
        "model": {"path": folder, "dtype": "bfloat16"},
        "run": {"dir": run},
        "launch": {"gpus_per_node": int(CUDA)},
        "trainer": {"token_budget": 16384 if CUDA else 512},
        "rollout": {
            "groups_per_step": 16 if CUDA else 2,
            "group_size": 4,
            "max_response_tokens": 512 if CUDA else 64,
        },
        "engine": {
            "extra_args": ["--skip-tokenizer-init"],
            "max_total_tokens": 131072 if CUDA else 4096,
            "max_running_requests": 256 if CUDA else 8,
        },
    }
    for name, fields in sections.items():
        values[name] = values.get(name, {}) | fields
    return Config.model_validate(values)


def gap(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """Return the mean and the largest absolute difference of two tensors of the same shape."""
    return {"mean": float((a - b).abs().mean()), "max": float((a - b).abs().max())}
