"""Registration of all hooks into SGLang.

On all hosts the hooks dump stacks for `rlsys doctor`, keep keys out of logs, write routed experts to files, send all
tokens before a pause, and sample by token id. With CUDA they support any head size; on a CPU they replace operators,
and fork processes. Every SGLang process calls `register`, through the entry point group `sglang.srt.plugins`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlsys.core.rendezvous import register_scheme
from rlsys.engine.cpu import lora, ngram, ops
from rlsys.engine.hooks import bucket_hooks, pause_hooks, rope_hooks, route_hooks, sampler_hooks
from rlsys.obs.role import dump_stack_on_signal

_MASK = 0xFFFFFFFF


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Compute the murmur3-32 hash of seed, position and column, equal to SGLang's Triton kernel.

    Args:
        seed: Seeds of 64 bits `[rows]`.
        positions: Positions of 32 bits `[rows]`.
        columns: Columns of 32 bits `[columns]`.

    Returns: `[rows, columns]` int64, in [0, 2**32).
    """

    def rotate(x: Tensor, r: int) -> Tensor:
        return ((x << r) | (x >> (32 - r))) & _MASK

    def mix(h: Tensor, k: Tensor) -> Tensor:
        h = rotate(h ^ ((rotate((k * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK), 13)
        return (h * 5 + 0xE6546B64) & _MASK

    seed, positions = seed.to(torch.int64)[:, None], positions.to(torch.int64)[:, None]
    h = mix(mix(torch.zeros_like(seed), seed & _MASK), (seed >> 32) & _MASK)
    h = mix(mix(h, positions & _MASK), columns.to(torch.int64)[None, :] & _MASK) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & _MASK
    return h ^ (h >> 16)


def mask_keys(arguments: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the server arguments for SGLang's log, with masked keys."""
    return arguments | {name: "***" for name in ("api_key", "admin_api_key") if arguments.get(name)}


def fork_children(result: None, *args: Any, **kwargs: Any) -> None:
    """Make SGLang fork its other processes from the first one, which saves 12 s of imports for each.

    With CUDA, whose state a fork cannot copy, SGLang spawns the processes.
    """
    multiprocessing.set_start_method("fork", force=True)


class BucketMemory:
    """Memory for broadcast buckets of weights, which all buckets reuse.

    The operating system clears new memory page by page, which takes twice as long as the broadcast. Reuse is safe,
    because an engine loads a bucket before it receives the next one.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reuse(self, bucket: Any, *args: Any, **kwargs: Any) -> None:
        """Replace the memory of a new bucket. SGLang's FlattenedTensorBucket.empty has not written to it yet."""
        size = len(bucket.flattened_tensor)
        if len(self._memory) < size:
            self._memory = bucket.flattened_tensor
        bucket.flattened_tensor = self._memory[:size]


def _reset_child() -> None:
    """Set the signal handler and the file of stacks of a forked child, instead of those of its parent."""
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    dump_stack_on_signal(f"process{os.getpid()}")


complete = False
"""Whether `register` has completed in this process. SGLang only logs an exception of `register`, and continues."""


def register() -> None:
    """Register the hooks of this host, and set `complete`."""
    global complete
    _register_hooks()
    complete = True


def _register_hooks() -> None:
    """Register the hooks for all hosts, then the hooks for hosts with CUDA or for hosts without CUDA."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    dump_stack_on_signal(f"process{os.getpid()}")
    register_scheme()
    HookRegistry.register("sglang.srt.entrypoints.engine._server_args_for_logging", mask_keys, HookType.AFTER)
    HookRegistry.register(route_hooks.TARGET, route_hooks.write_routes, HookType.AFTER)
    for target, around in bucket_hooks.AROUND.items():
        HookRegistry.register(target, around, HookType.AROUND)
    HookRegistry.register(pause_hooks.TARGET, pause_hooks.flush_streams, HookType.AFTER)
    HookRegistry.register(sampler_hooks.TARGET, sampler_hooks.draw_by_token_id, HookType.AROUND)
    if torch.cuda.is_available():
        HookRegistry.register(rope_hooks.TARGET, rope_hooks.check_fused_head_size, HookType.AFTER)
    else:
        _register_cpu_hooks()


def _register_cpu_hooks() -> None:
    """Register the hooks of a host without CUDA, which replace functions that need CUDA or Triton."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", fork_children, HookType.AFTER)
    empty = "sglang.srt.weight_sync.tensor_bucket.FlattenedTensorBucket.empty"
    HookRegistry.register(empty, BucketMemory().reuse, HookType.AFTER)
    os.register_at_fork(after_in_child=_reset_child)
    _allow_torch_native()

    def no_op(*args: Any, **kwargs: Any) -> None: ...

    replaced: dict[str, Callable[..., Any]] = {
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register": no_op,
        # The Triton GEMMs that deterministic inference enables must stay disabled; ops.DETERMINISTIC replaces them.
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode": no_op,
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32": murmur_hash32,
    }
    hooks: list[tuple[dict[str, Callable[..., Any]], Any]] = [
        (replaced, HookType.REPLACE),
        (ops.REPLACED, HookType.REPLACE),
    ]
    if "--speculative-algorithm" in sys.argv:
        hooks += [(ngram.REPLACED, HookType.REPLACE), (ngram.AROUND, HookType.AROUND)]
    if "--enable-lora" in sys.argv:
        lora.disable_pinned_memory()
        hooks.append((lora.REPLACED, HookType.REPLACE))
    if "--enable-deterministic-inference" in sys.argv:
        hooks.append((ops.DETERMINISTIC, HookType.AROUND))
    hooks.append((ops.AROUND, HookType.AROUND))
    for functions, kind in hooks:
        for target, function in functions.items():
            HookRegistry.register(target, function, kind)


def _allow_torch_native() -> None:
    """Make SGLang accept the attention backend torch_native."""
    from sglang.srt.arg_groups import choices, model_hook

    # Deterministic inference: torch_native computes attention for each sequence separately.
    for names in (
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if "torch_native" not in names:
            names.append("torch_native")
    # SGLang refuses torch_native for gpt-oss, because it lacks attention sinks, but cpu/ops.py adds them. This
    # renames the backend only for SGLang's check of a model's attention backends.
    backends_of = model_hook.attention_backends_of
    model_hook.attention_backends_of = lambda view: tuple(
        "intel_amx" if name == "torch_native" else name for name in backends_of(view)
    )
