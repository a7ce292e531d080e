"""Patches of megatron-core: for CPUs, for hosts without Transformer Engine or Apex, and for upstream defects.

Call `apply()` before the first import of megatron.core. Each patch checks that its target has the expected source,
and raises PatchError otherwise. `python -m megatron_patches` prints all patches with their reasons.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Collection, Sequence
from types import ModuleType

import torch

from megatron_patches import (
    checkpoint_queue,
    checkpoint_without_output,
    cpu_import,
    cpu_rng,
    dispatcher_memory,
    distributed_optimizer_step,
    expert_bias_padding,
    frozen_weight_products,
    gloo_device,
    gloo_uneven,
    gradient_norm,
    mla_te_names,
    moe_expert_bias,
    moe_gemm,
    moe_splits,
    norm_sequence_parallel,
    offload_resume,
    optimizer_local_shards,
    param_sync_once,
    weight_gradients,
)
from megatron_patches.registry import Patch, PatchError

PATCHES: tuple[Patch, ...] = (
    moe_expert_bias.PATCH,
    moe_gemm.PATCH,
    moe_splits.PATCH,
    expert_bias_padding.PATCH,
    norm_sequence_parallel.PATCH,
    distributed_optimizer_step.PATCH,
    checkpoint_queue.PATCH,
    checkpoint_without_output.PATCH,
    gloo_uneven.PATCH,
    gradient_norm.PATCH,
    weight_gradients.PATCH,
    gloo_device.PATCH,
    mla_te_names.PATCH,
    cpu_rng.PATCH,
    param_sync_once.PATCH,
    dispatcher_memory.PATCH,
    offload_resume.PATCH,
    optimizer_local_shards.PATCH,
    frozen_weight_products.PATCH,
)


def have_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed and CUDA, which it requires, is available."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def active() -> list[Patch]:
    """Return the patches that this host needs."""
    conditions = {
        "no-cuda": not torch.cuda.is_available(),
        "no-te": not have_transformer_engine(),
        "always": True,
    }
    return [p for p in PATCHES if conditions[p.when]]


class _Loader(importlib.abc.Loader):
    """Loader that runs a module's original loader, then the module's patches."""

    def __init__(self, inner: importlib.abc.Loader, patches: list[Patch]) -> None:
        self._inner, self._patches = inner, patches

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        for patch in self._patches:
            patch.edit(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of megatron's modules that wraps their loaders to apply patches, and the CPU rewrite without CUDA."""

    def __init__(self, patches: list[Patch]) -> None:
        self._patches = patches
        self._on_cpu = not torch.cuda.is_available()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "megatron":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return spec
        if self._on_cpu and cpu_import.needs_rewrite(spec.loader.path):
            spec.loader = cpu_import.CpuLoader(spec.loader.name, spec.loader.path)
        if module_patches := [p for p in self._patches if p.module == name]:
            spec.loader = _Loader(spec.loader, module_patches)
        return spec


def apply(without: Collection[str] = ()) -> None:
    """Make imports of megatron.core apply the patches. Further calls have no effect.

    Args:
        without: Names of patches to omit.

    Raises:
        PatchError: megatron.core is already imported.
    """
    if any(isinstance(f, _Finder) for f in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise PatchError("megatron.core is already imported; expected megatron_patches.apply() before it")
    # Megatron warns ten times per process; `rlsys doctor` reports the missing packages once.
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|transformer_engine).*not installed")
    sys.meta_path.insert(0, _Finder([p for p in active() if p.name not in without]))
