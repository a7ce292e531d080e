"""Uneven all-gather and reduce-scatter, which gloo lacks (sharded experts with all-to-all).

Symptom: RuntimeError: gloo all_gather needs tensors of one shape.
Upstream: 0.16.1 - 0.19.2.
Why numbers stay equal: The gather pads all parts to the longest one and removes the padding. The scatter sums the
whole tensor on every rank and selects the rank's part. There is more traffic, but the values are the same.
Delete when: gloo supports uneven splits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_patches.registry import Patch, target


def _gather_with(upstream: Any) -> Any:
    """Return a gather along the first axis for any sizes. `upstream`: gather for equal sizes."""

    def gather(x: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return upstream(x, group, output_split_sizes, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: x.shape[0]] = x
        parts = x.new_empty((max(sizes) * len(sizes), *x.shape[1:]))
        torch.distributed.all_gather_into_tensor(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts.chunk(len(sizes)), sizes, strict=True)])

    return gather


def _scatter_with(upstream: Any) -> Any:
    """Return a reduce-scatter along the first axis for any sizes. `upstream`: reduce-scatter for equal sizes."""

    def scatter(x: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return upstream(x, group, input_split_sizes, use_global_buffer)
        total = x.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return torch.split(total, [int(n) for n in input_split_sizes])[group.rank()].contiguous()

    return scatter


def _edit(module: ModuleType) -> None:
    gather = target(
        "gloo_uneven",
        module,
        "_gather_along_first_dim",
        "(input_, group, output_split_sizes=None, use_global_buffer",
    )
    scatter = target(
        "gloo_uneven",
        module,
        "_reduce_scatter_along_first_dim",
        "(input_, group, input_split_sizes=None, use_global",
    )
    module._gather_along_first_dim = _gather_with(gather)  # type: ignore[attr-defined]
    module._reduce_scatter_along_first_dim = _scatter_with(scatter)  # type: ignore[attr-defined]


PATCH = Patch(
    "gloo_uneven", "megatron.core.tensor_parallel.mappings", "no-cuda", "0.16.1 - 0.19.2",
    "RuntimeError: gloo all_gather needs tensors of one shape", _edit,
)  # fmt: skip
