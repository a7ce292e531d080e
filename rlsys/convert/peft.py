"""Writer of adapters as a PEFT folder, which vLLM and SGLang can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlsys.config.trainer import LoraConfig
from rlsys.convert.adapters import matrices
from rlsys.convert.config import HFConfig
from rlsys.convert.hf import publish
from rlsys.convert.output import partial_of


def adapter_config(base: Path, lora: LoraConfig, hf: HFConfig) -> dict[str, Any]:
    """Return the content of PEFT's adapter_config.json. `base`: folder of the base model."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(lora.targets or matrices(hf)),
        "inference_mode": True,
    }


def write_adapter(
    folder: Path, base: Path, lora: LoraConfig, hf: HFConfig, factors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a PEFT folder atomically. All factors are in memory at once.

    Args:
        folder: The new folder.
        base: Folder of the base model.
        lora: Rank, alpha and adapted layers.
        hf: Configuration of the base model.
        factors: (PEFT name, tensor) of all factors.
    """
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # Copied: the tensors may be views of parameters, which the next optimizer step changes.
    tensors = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in factors
    }
    save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.dumps(adapter_config(base, lora, hf), indent=2)
    (partial / "adapter_config.json").write_text(config + "\n", encoding="utf-8")
    publish(partial, folder)
