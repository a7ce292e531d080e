"""Warnings about valid settings that are unusual for the size of the model, or that do not suit this machine."""

from __future__ import annotations

import re
from pathlib import Path

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.planner.memory import GB, budget, model_size

PRETRAINED_PARAMETERS = 100_000_000
"""Smallest number of parameters of a model that counts as published and pretrained."""
LARGEST_FULL_LR = 1e-5
"""Largest usual learning rate of full training. At 3e-5, SmolLM2-135M lost what it had learned (docs/performance.md);
examples of verl and slime use 1e-6."""
SHORT_RESPONSE = 256
"""Response length in tokens that most responses of a published model exceed."""


_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags in /proc/cpuinfo of CPUs with instructions that multiply bfloat16; `bf16` is the flag on Arm."""


def cpu_multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this machine's CPU has instructions that multiply bfloat16; True if unknown."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return flags is None or not _BFLOAT16_FLAGS.isdisjoint(flags[1].split())


def slow_bfloat16(config: Config) -> list[str]:
    """Return a line if the model's dtype is bfloat16 and this machine's CPU has no instructions for it."""
    if config.model.dtype != "bfloat16" or cpu_multiplies_bfloat16():
        return []
    return [
        "model.dtype = bfloat16: this CPU has no instructions for it (AVX-512 BF16, AMX), so a step takes longer "
        "than in float32"
    ]


def unusual_settings(config: Config, hf: HFConfig) -> list[str]:
    """Return a line for each setting that is unusual for a published model; none for smaller models."""
    if model_size(hf).total < PRETRAINED_PARAMETERS:
        return []
    lines, t = [], config.trainer
    if t.lora is None and t.lr > LARGEST_FULL_LR:
        lines.append(
            f"trainer.lr = {t.lr:g}: full training of a model of this size usually takes 1e-6 to 1e-5; above "
            "that, it may lose what it has learned"
        )
    if config.model.dtype == "float32" and config.launch.gpus_per_node:
        lines.append("model.dtype = float32: bfloat16 halves the memory of weights and the time of a step")
    if not config.fine_tunes and config.rollout.max_response_tokens <= SHORT_RESPONSE:
        lines.append(
            f"rollout.max_response_tokens = {config.rollout.max_response_tokens}: most responses of a model of "
            "this size are longer, and are truncated"
        )
    return lines


def host_memory_problems(config: Config, hf: HFConfig, host_gb: float) -> list[str]:
    """Return a line if the roles of a run without GPUs need more memory than machines of `host_gb` GB have."""
    b = budget(config, model_size(hf))
    trainer = config.parallel.world_size * (b.trainer + b.host)
    engines = 0.0 if config.fine_tunes else sum(config.engine.tps) * b.engine
    need = (trainer + engines) / config.launch.nodes / GB
    if need <= host_gb:
        return []
    return [
        f"trainer and engines need {need:.3g} GB of memory on each machine; this one has {host_gb:.3g} GB"
    ]
