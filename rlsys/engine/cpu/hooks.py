"""Hooks into SGLang: stacks for `rlsys doctor`, no keys in logs, routes into files, all tokens before a pause,
draws by token id; with CUDA, heads of any size; on a CPU, seeded sampling, routes and forks.

`register` runs in every SGLang process, which finds it through the entry point group `sglang.srt.plugins`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor

from rlsys.core.rendezvous import register_scheme
from rlsys.engine.cpu import lora, ngram, ops
from rlsys.engine.hooks import bucket_hooks, pause_hooks, rope_hooks, route_hooks, sampler_hooks
from rlsys.obs.role import dump_stack_on_signal

_MASK = 0xFFFFFFFF


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """murmur3-32 of (seed 64 bit, position, column), `[rows, columns]` int64; equal to SGLang's Triton kernel.

    seed and positions `[rows]`, columns `[columns]`.
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


def without_keys(arguments: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The server's arguments as it logs them: SGLang writes its keys there."""
    return arguments | {name: "***" for name in ("api_key", "admin_api_key") if arguments.get(name)}


def fork_children(result: None, *args: Any, **kwargs: Any) -> None:
    """The server's other processes begin as copies of the first: they need not import everything again (12 s each).

    Only where there is no CUDA, whose state no fork can copy: SGLang starts them anew.
    """
    multiprocessing.set_start_method("fork", force=True)


class ReceivedBuckets:
    """Where a broadcast bucket of weights arrives: memory that stays from bucket to bucket. The kernel clears fresh
    memory page by page, which takes twice as long as the broadcast. Nothing looks at a bucket once it is loaded."""

    def __init__(self) -> None:
        self._area = torch.empty(0, dtype=torch.uint8)

    def keep(self, bucket: Any, *args: Any, **kwargs: Any) -> None:
        """After SGLang's FlattenedTensorBucket.empty, which has not touched the memory yet."""
        size = len(bucket.flattened_tensor)
        if len(self._area) < size:
            self._area = bucket.flattened_tensor
        bucket.flattened_tensor = self._area[:size]


def _be_a_child() -> None:
    """What a copy must not keep of the first process: its handler of a child's failure, its file of stacks."""
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    dump_stack_on_signal(f"process{os.getpid()}")


complete = False
"""Whether `register` has come to its end in this process: SGLang only logs what it raises."""


def register() -> None:
    """See _register_hooks."""
    global complete
    _register_hooks()
    complete = True


def _register_hooks() -> None:
    """Register the hooks of this host. Without CUDA they replace what needs its runtime or a Triton kernel."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    dump_stack_on_signal(f"process{os.getpid()}")
    register_scheme()
    HookRegistry.register(
        "sglang.srt.entrypoints.engine._server_args_for_logging", without_keys, HookType.AFTER
    )
    HookRegistry.register(route_hooks.TARGET, route_hooks.write_routes, HookType.AFTER)
    for target, around in bucket_hooks.AROUND.items():
        HookRegistry.register(target, around, HookType.AROUND)
    HookRegistry.register(pause_hooks.TARGET, pause_hooks.send_what_is_made, HookType.AFTER)
    HookRegistry.register(sampler_hooks.TARGET, sampler_hooks.draw_by_token_id, HookType.AROUND)
    if torch.cuda.is_available():
        HookRegistry.register(
            rope_hooks.TARGET, rope_hooks.fused_where_the_kernel_has_the_size, HookType.AFTER
        )
        return
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", fork_children, HookType.AFTER)
    empty = "sglang.srt.weight_sync.tensor_bucket.FlattenedTensorBucket.empty"
    HookRegistry.register(empty, ReceivedBuckets().keep, HookType.AFTER)
    os.register_at_fork(after_in_child=_be_a_child)
    from sglang.srt.arg_groups import choices, model_hook

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    # torch_native attends to each sequence by itself. The Triton GEMMs that deterministic inference would switch on
    # have to stay off; ops.DETERMINISTIC stands in for them.
    for names in (
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if "torch_native" not in names:
            names.append("torch_native")
    for target, replacement in (
        ("sglang.srt.mem_cache.pool_host.common._cuda_host_register", nothing),
        ("sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode", nothing),
        ("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", murmur_hash32),
    ):
        HookRegistry.register(target, replacement, HookType.REPLACE)
    for target, replacement in ops.REPLACED.items():
        HookRegistry.register(target, replacement, HookType.REPLACE)
    if "--speculative-algorithm" in sys.argv:
        for target, replacement in ngram.REPLACED.items():
            HookRegistry.register(target, replacement, HookType.REPLACE)
        for target, around in ngram.AROUND.items():
            HookRegistry.register(target, around, HookType.AROUND)
    if "--enable-lora" in sys.argv:
        lora.without_pinned_memory()
        for target, replacement in lora.REPLACED.items():
            HookRegistry.register(target, replacement, HookType.REPLACE)
    if "--enable-deterministic-inference" in sys.argv:
        for target, around in ops.DETERMINISTIC.items():
            HookRegistry.register(target, around, HookType.AROUND)
    for target, around in ops.AROUND.items():
        HookRegistry.register(target, around, HookType.AROUND)
    # Only where models are checked against a list of backends: gpt-oss would refuse torch_native, which cpu_ops has
    # taught what it lacked.
    backends_of = model_hook.attention_backends_of
    model_hook.attention_backends_of = lambda view: tuple(
        "intel_amx" if name == "torch_native" else name for name in backends_of(view)
    )
