"""Stand-ins of a rehearsal for functions of megatron-core, torch and the trainer. All other code is production code.

Each stand-in checks that its target has the expected source, as megatron_patches do, and raises PatchError otherwise.
Stand-ins with the condition `always` also apply when a real step is measured, so that both use the same routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_patches.registry import target
from rlsys.convert.config import HFConfig
from rlsys.convert.table import Entry
from rlsys.ops import grouped_gemm
from rlsys.rehearse import kernels
from rlsys.rehearse.meter import Meter
from rlsys.rehearse.routes import routing_map
from rlsys.trainer import passes
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.model import attention, weights
from rlsys.trainer.model.routing import LayerReplay
from rlsys.trainer.model.weights import LocalWeights
from rlsys.trainer.pack import MicroBatch

When = Literal["always", "fake", "gpu"]
"""Condition of a stand-in.

    always    every step
    fake      tensors have no values
    gpu       tensors have no values, and the layout is for GPUs
"""


@dataclass(frozen=True)
class Setting:
    """Settings of the stand-ins.

    Attributes:
        meter: The meter.
        skew: See routing_map.
        batch: Returns the micro-batches of the running pass.
        dtype: Type of the weights.
    """

    meter: Meter
    skew: float
    batch: Callable[[], list[MicroBatch]]
    dtype: torch.dtype


@dataclass(frozen=True)
class StandIn:
    """Replacement of `owner.attribute` by `make(upstream, setting)`, where `upstream` is the replaced function.

    Attributes:
        name: Name in errors.
        when: Condition of the replacement.
        upstream: Package and versions that contain the replaced function.
        reason: Why a rehearsal replaces it.
        fragments: Texts that the source of the replaced function must contain.
    """

    name: str
    when: When
    upstream: str
    reason: str
    owner: Any
    attribute: str
    fragments: tuple[str, ...]
    make: Callable[[Any, Setting], Any]


@contextmanager
def installed(conditions: set[When], setting: Setting) -> Iterator[None]:
    """Replace the targets of the stand-ins until the context ends.

    Raises:
        PatchError: A target has changed.
    """
    with ExitStack() as stack:
        for stand_in in STAND_INS:
            if stand_in.when in conditions:
                package = "rlsys.rehearse.stand_ins"
                upstream = target(
                    stand_in.name, stand_in.owner, stand_in.attribute, *stand_in.fragments, package=package
                )
                replacement = stand_in.make(upstream, setting)
                stack.enter_context(mock.patch.object(stand_in.owner, stand_in.attribute, replacement))
        yield


def _routes(upstream: Any, setting: Setting) -> Any:
    def forward(self: Any, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs, routes = upstream(self, input, padding_mask)
        return probs, routing_map(routes.shape[0], routes.shape[1], self.topk, setting.skew)

    return forward


def _no_counts(upstream: Any, setting: Setting) -> Any:
    def count(self: LayerReplay, router_ids: Tensor, expert_ids: Tensor, target: Tensor | None) -> None:
        """Skip the count, because `routes` determines the experts."""

    return count


def _locate(upstream: Any, setting: Setting) -> Any:
    def locate(self: Any, entry: Any) -> tuple[int, str, torch.dtype]:
        """Return this stage for entries of this rank, and the next stage for all others."""
        stage, stages = self.pp_group.rank(), self.pp_group.size()
        for name in self.candidates(entry):
            if name in self:
                return stage, name, self[name].dtype
        return (stage + 1) % stages, entry.megatron, setting.dtype

    return locate


def representatives(experts: Sequence[int]) -> dict[int, int]:
    """Select experts that represent others with the same memory and cost.

    Of experts with consecutive indices, two neighbours are selected, because the memory of one expert's tensor is
    released only after the next expert's is allocated.

    Args:
        experts: Ascending indices of experts.

    Returns:
        For each selected expert, the number of experts that it represents.
    """
    for expert, successor in pairwise(experts):
        if successor == expert + 1:
            return {expert: len(experts) - 1, successor: 1}
    return dict.fromkeys(experts, 1)


def _entries(upstream: Any, setting: Setting) -> Any:
    def entries(hf: HFConfig) -> Iterator[Entry]:
        rank = parallel_state.get_expert_model_parallel_rank()
        per_rank = hf.experts // parallel_state.get_expert_model_parallel_world_size()
        local = range(rank * per_rank, (rank + 1) * per_rank)
        remote = [expert for expert in range(hf.experts) if expert not in local]
        counts = representatives(local) | representatives(remote)
        for entry in upstream(hf):
            if entry.expert is None or setting.meter.phase != "gather":
                yield entry
            elif count := counts.get(entry.expert):
                with setting.meter.counting_as(count):
                    yield entry

    return entries


class _Reordered(torch.autograd.Function):
    """Function that returns an uninitialised tensor of its input's shape in both passes, and saves nothing."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(grads[0])


def _sort_chunks(upstream: Any, setting: Setting) -> Any:
    def sort_chunks(
        input: Tensor,
        split_sizes: Tensor,
        sorted_idxs: Tensor,
        probs: Tensor | None = None,
        fused: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if int(split_sizes.sum()) != len(input):
            raise ValueError(f"split_sizes add up to {int(split_sizes.sum())}; expected {len(input)} tokens")
        return _Reordered.apply(input), None if probs is None else _Reordered.apply(probs)

    return sort_chunks


def _last_stage(upstream: Any, setting: Setting) -> Any:
    def from_last_stage(value: Any) -> Any:
        if isinstance(value, dict):
            return value or {"loss_sum": torch.zeros(())}
        return value or [Scores(torch.zeros(len(micro.tokens))) for micro in setting.batch()]

    return from_last_stage


def _norm_of_gradients(upstream: Any, setting: Setting) -> Any:
    def l2_norm(*args: Any) -> tuple[Tensor, None]:
        return torch.ones((1,)), None

    return l2_norm


def _apply(upstream: Any, setting: Setting) -> Any:
    def apply(self: torch.nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        for parameter in self._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    parameter.data = fn(parameter).detach()
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    return apply


STAND_INS: tuple[StandIn, ...] = (
    StandIn(
        "routes", "always", "megatron-core 0.16.1 - 0.19.2",
        "logits without values select no experts; a balanced or skewed map gives realistic counts and splits",
        TopKRouter, "forward", ("probs, routing_map = self.routing(",), _routes,
    ),
    StandIn(
        "no_counts", "always", "ours", "the selection of the router is not used, so that it is not counted",
        LayerReplay, "_count", ("load.scatter_add_(0, expert_ids.flatten(),",), _no_counts,
    ),
    StandIn(
        "one_by_one", "always", "ours",
        "fake tensors have no addresses; for GPUs, `grouped_gemm` below represents the experts",
        grouped_gemm, "supported", ("_grouped_mm",), lambda *_: lambda *_: False,
    ),
    StandIn(
        "place", "fake", "ours", "the ranks of other stages, which would report their parameters, do not exist",
        LocalWeights, "locate", ("self._stages",), _locate,
    ),
    StandIn(
        "entries", "fake", "ours", "two experts of this rank and two of other ranks represent all, to save time",
        weights, "entries", ("for expert in range(config.experts)",), _entries,
    ),
    StandIn(
        "sort_chunks", "fake", "megatron-core 0.16.1 - 0.19.2",
        "rows without values have no order, and hundreds of views of them take most of the time",
        token_dispatcher, "sort_chunks_by_idxs",
        ("torch.split(input, split_sizes.tolist(), dim=0)", "torch.cat([input[i] for i in sorted_idxs.tolist()]"),
        _sort_chunks,
    ),
    StandIn(
        "last_stage", "fake", "ours", "the ranks of the last stage, which would send scores and sums, do not exist",
        passes, "from_last_stage", ("broadcast_object_list",), _last_stage,
    ),
    StandIn(
        "norm_of_gradients", "fake", "megatron-core 0.16.1 - 0.19.2",
        "without Apex, the norm is computed from numbers, which fake tensors do not have",
        clip_grads, "l2_norm_impl", (), _norm_of_gradients,
    ),
    StandIn(
        "apply", "fake", "torch 2.13 - 2.14",
        "Module.to replaces a fake parameter by a new object, and fails if there are other references to it",
        torch.nn.Module, "_apply", ("compute_should_use_set_data", "isinstance(param, FakeTensor)"), _apply,
    ),
    StandIn(
        "flash_attention", "gpu", "ours", "on a CPU, torch's attention kernel saves the scores",
        attention.PackedAttention, "forward", ("packed_seq_params.padding",),
        lambda upstream, s: kernels.attention(upstream, s.meter.add_flops),
    ),
    StandIn(
        "padded_attention", "gpu", "ours", "as flash_attention, for sequences that share tokens",
        attention, "without_sinks", ("scaled_dot_product_attention(",),
        lambda _, s: kernels.padded_attention(s.meter.add_flops),
    ),
    StandIn(
        "grouped_gemm", "gpu", "megatron-core 0.16.1 - 0.19.2",
        "on a GPU, one product computes all experts; Megatron's local layers compute them one by one",
        SequentialMLP, "forward", ("for expert, tokens, probs in zip(",),
        lambda _, s: kernels.experts(s.meter.add_flops),
    ),
    StandIn(
        "fused_norm", "gpu", "torch 2.13 - 2.14", "a fused norm saves only its input",
        torch.nn.RMSNorm, "forward", ("F.rms_norm",), lambda _, s: kernels.norm,
    ),
)  # fmt: skip
