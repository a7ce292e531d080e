"""Muon for the matrices of the layers; AdamW updates all other parameters.

Keller Jordan 2024, "Muon: an optimizer for hidden layers in neural networks", with the scale of Liu et al. 2025,
"Muon is Scalable for LLM Training" (Moonlight). The average of the gradient, with Nesterov's look ahead, is made
orthogonal by five Newton-Schulz steps. The scale makes it as large as AdamW's update, so that learning rate and
weight decay need not change. A matrix is one of the Hugging Face folder: query, key and value are three, gate and up
two, each expert has its own. Embedding, head, norms, routers, biases and gates of one row are AdamW's.

torch's Muon knows one process and computes in bfloat16 only. Megatron's (0.16.1) refuses the distributed optimizer,
needs a package that is not installed, and takes gate and up for one matrix.

Shapes: a parameter `[r, c]` on a tensor-parallel rank; of its r * c elements a data-parallel rank updates a run, the
shard `[n]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from torch import Tensor
from torch.nn import Parameter

from rlsys.convert.config import HFConfig
from rlsys.convert.layout import to_hf, to_megatron
from rlsys.convert.rules import Rule
from rlsys.convert.table import entries, is_matrix
from rlsys.trainer.model.chunks import Chunks
from rlsys.trainer.model.weights import LocalWeights, shard, unshard

MOMENTUM = 0.95
STEPS = 5
SCALE = 0.2
"""Root mean square of AdamW's updates, as measured for Moonlight."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an approximation of U V^T for `matrix = U S V^T`, `[r, c]`, computed in `dtype`.

    After five steps of Jordan's quintic iteration the singular values are between about 0.7 and 1.2. Zeros stay
    zeros.
    """
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide.to(dtype)
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.T


def add_muon(optimizer: Any, chunks: Chunks, hf: HFConfig) -> None:
    """Make megatron's `optimizer` update the matrices of these chunks with Muon. Collective."""
    local, rules = LocalWeights(chunks, hf), {}
    for entry in entries(hf):
        if is_matrix(entry):
            rules.update({local[name]: entry.rule for name in local.local_names(entry)})
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not part.is_stub_optimizer:
            _Muon(part, rules, hf, chunks.config.params_dtype)


@dataclass(frozen=True)
class _Piece:
    """Shard of a matrix, from element `start` of `parameter` on. `group`: settings of the optimizer."""

    parameter: Any
    shard: Tensor
    start: int
    rule: Rule
    group: dict[str, Any]

    @property
    def gradient_view(self) -> Tensor:
        """Return a view of the shard's range in the gradient of the whole parameter."""
        flat: Tensor = self.parameter.main_grad.view(-1)
        return flat[self.start : self.start + self.shard.numel()]


class _Muon:
    """Muon step that runs before one of Megatron's distributed optimizers and hides the matrices from its AdamW.

    The average is stored as `exp_avg` in the optimizer's own state, so that checkpoints contain it like AdamW's.
    """

    def __init__(self, distributed: Any, rules: dict[Tensor, Rule], hf: HFConfig, dtype: torch.dtype) -> None:
        self._distributed, self._rules, self._hf, self._dtype = distributed, rules, hf, dtype
        adam = distributed.optimizer
        self._create_states(adam)
        adam.register_step_pre_hook(lambda *_: self._step())

    def _create_states(self, adam: torch.optim.Optimizer) -> None:
        """Create all states at once: Megatron assumes that either all or none exist."""
        counts = isinstance(adam, torch.optim.AdamW)  # Transformer Engine and Apex count steps by group
        matrices = {id(piece.shard) for piece in self._pieces()}
        for group in adam.param_groups:
            for p in group["params"]:
                state = {"exp_avg": torch.zeros_like(p)}
                if id(p) not in matrices:
                    state["exp_avg_sq"] = torch.zeros_like(p)
                if counts:
                    state["step"] = torch.zeros(())
                adam.state[p] = state

    def _pieces(self) -> Iterator[_Piece]:
        """Iterate in an order that tensor-parallel ranks have in common, because they hold the same shards."""
        groups = self._distributed.optimizer.param_groups
        for parameter, (group, index) in self._distributed.model_param_group_index_map.items():
            if (rule := self._rules.get(parameter)) is not None:
                start = self._distributed._get_model_param_range_map(parameter)["param"].start
                yield _Piece(parameter, groups[group]["params"][index], start, rule, groups[group])

    @torch.no_grad()
    def _step(self) -> None:
        states = self._distributed.optimizer.state
        pieces = list(self._pieces())
        for piece in pieces:
            gradient, state = piece.shard.grad, states[piece.shard]
            assert gradient is not None
            average = state["exp_avg"].lerp_(gradient, 1 - MOMENTUM)
            piece.gradient_view.copy_(gradient.lerp(average, MOMENTUM))
            piece.shard.grad = None
            if "step" in state:
                state["step"] += 1
        self._gather()
        for piece in pieces:
            update = self._update(piece)[piece.start : piece.start + piece.shard.numel()]
            lr = piece.group["lr"]
            piece.shard.mul_(1 - lr * piece.group["weight_decay"]).sub_(update, alpha=lr)

    def _gather(self) -> None:
        """Gather the shards of all data-parallel ranks into the gradient buffers of buckets with matrices."""
        ranks = self._distributed.data_parallel_group
        if ranks.size() == 1:
            return
        for buffer in self._distributed.buffers:
            for bucket in buffer.buckets:
                if not self._rules.keys().isdisjoint(bucket.params):
                    local_shard = shard_buffer(bucket.grad_data, ranks.size())[ranks.rank()]
                    dist.all_gather_into_tensor(bucket.grad_data, local_shard, group=ranks)

    def _update(self, piece: _Piece) -> Tensor:
        """Compute the update of this rank's part, `[r * c]` in float32, identically on all tensor-parallel ranks."""
        parameter: Parameter = piece.parameter
        gradient = unshard(parameter.main_grad.view(parameter.shape), piece.rule)  # type: ignore[attr-defined]
        updates = [
            orthogonal(matrix, self._dtype).float() * (SCALE * max(matrix.shape) ** 0.5)
            for matrix in to_hf(piece.rule, gradient, self._hf)
        ]
        return shard(to_megatron(piece.rule, updates, self._hf), piece.rule).reshape(-1)
