"""Muon for the matrices of the layers; AdamW updates all other parameters.

Keller Jordan 2024, "Muon: an optimizer for hidden layers in neural networks", with the scale of Liu et al. 2025,
"Muon is Scalable for LLM Training" (Moonlight). Five Newton-Schulz steps orthogonalise the moving average of the
gradient with Nesterov momentum. The scale gives the update the size of AdamW's, so that the learning rate and the
weight decay need not change.

Muon updates each matrix of the Hugging Face folder separately: query, key and value, gate and up, and the matrices of
each expert. AdamW updates embedding, head, norms, routers, biases and gates of one row.

torch's Muon supports only one process, and computes in bfloat16. Megatron's (0.16.1) does not support the distributed
optimizer, needs a package that is not installed, and treats gate and up as one matrix.

Shapes: a parameter `[r, c]` on a tensor-parallel rank. A data-parallel rank updates n consecutive ones of its r * c
elements, the shard `[n]`.
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

    After STEPS steps of Jordan's quintic iteration, the singular values are between about 0.7 and 1.2. A zero matrix
    stays zero.
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
    """Make Megatron's `optimizer` update the matrices of `chunks` with Muon. Collective."""
    local, rules = LocalWeights(chunks, hf), {}
    for entry in entries(hf):
        if is_matrix(entry):
            rules.update({local[name]: entry.rule for name in local.local_names(entry)})
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not part.is_stub_optimizer:
            _Muon(part, rules, hf, chunks.config.params_dtype)


@dataclass(frozen=True)
class _Piece:
    """Shard of a parameter that consists of matrices.

    Attributes:
        parameter: The parameter.
        shard: Float32 values that this rank updates, `[n]`.
        start: Index of the shard's first element in the flat parameter.
        rule: Rule of the parameter in the name table.
        group: The optimizer's parameter group, which has the learning rate.
    """

    parameter: Any
    shard: Tensor
    start: int
    rule: Rule
    group: dict[str, Any]

    @property
    def gradient_view(self) -> Tensor:
        """View of the shard's range in the gradient of the whole parameter."""
        flat: Tensor = self.parameter.main_grad.view(-1)
        return flat[self.start : self.start + self.shard.numel()]


class _Muon:
    """Muon step that runs before the step of one of Megatron's distributed optimizers.

    It removes the gradients of the matrices, so that AdamW does not update them. The moving average is `exp_avg` in
    the optimizer's state, so that checkpoints contain it like AdamW's.
    """

    def __init__(self, distributed: Any, rules: dict[Tensor, Rule], hf: HFConfig, dtype: torch.dtype) -> None:
        self._distributed, self._rules, self._hf, self._dtype = distributed, rules, hf, dtype
        adam = distributed.optimizer
        self._create_states(adam)
        adam.register_step_pre_hook(lambda *_: self._step())

    def _create_states(self, adam: torch.optim.Optimizer) -> None:
        """Create the states of all shards at once: Megatron expects that either all or none exist."""
        # Transformer Engine and Apex count steps by group.
        counts_by_parameter = isinstance(adam, torch.optim.AdamW)
        matrices = {id(piece.shard) for piece in self._pieces()}
        for group in adam.param_groups:
            for p in group["params"]:
                state = {"exp_avg": torch.zeros_like(p)}
                if id(p) not in matrices:
                    state["exp_avg_sq"] = torch.zeros_like(p)
                if counts_by_parameter:
                    state["step"] = torch.zeros(())
                adam.state[p] = state

    def _pieces(self) -> Iterator[_Piece]:
        """Iterate over this rank's shards of matrices; the order is the same on all tensor-parallel ranks."""
        groups = self._distributed.optimizer.param_groups
        for parameter, (group, index) in self._distributed.model_param_group_index_map.items():
            if (rule := self._rules.get(parameter)) is not None:
                start = self._distributed._get_model_param_range_map(parameter)["param"].start
                yield _Piece(parameter, groups[group]["params"][index], start, rule, groups[group])

    @torch.no_grad()
    def _step(self) -> None:
        """Update the moving averages and the shards of all matrices."""
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
        """Return the update of the parameter on this tensor-parallel rank, `[r * c]` float32."""
        parameter: Parameter = piece.parameter
        gradient = unshard(parameter.main_grad.view(parameter.shape), piece.rule)  # type: ignore[attr-defined]
        updates = [
            orthogonal(matrix, self._dtype).float() * (SCALE * max(matrix.shape) ** 0.5)
            for matrix in to_hf(piece.rule, gradient, self._hf)
        ]
        return shard(to_megatron(piece.rule, updates, self._hf), piece.rule).reshape(-1)
