"""The output layer, which computes token scores from hidden states without the logits of all tokens at once.

The logits of a micro-batch are its largest tensors: 16,384 tokens with a vocabulary of 151,936 take 10 GB in float32,
and their gradient the same. The layer computes scores for some rows at a time, and the backward pass computes the
logits of these rows again. A micro-batch whose logits fit into LOGIT_BYTES is computed at once, without this second
computation. verl and slime compute log-probs in chunks for the same reason.

Shapes: P tokens of a padded micro-batch, c context-parallel ranks, t tensor-parallel ranks, H hidden size, V
vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from rlsys.config.precision import logit_rows
from rlsys.trainer.model.entropy import MASKED_LOGIT

ScoreRows = Callable[[Tensor, slice], Mapping[str, Tensor]]
"""(logits `[N, V / t]`, their rows) -> named scores of each row, `[N]` or `[N, K]`. May overwrite the logits."""


class TrunkModel(GPTModel):
    """A GPTModel whose forward pass returns the last hidden states, `[P / c or P / (c t), 1, H]`, on every stage."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class OutputLayer:
    """Computation of token scores with the weights of a model's output layer, some rows at a time."""

    def __init__(self, model: GPTModel, vocab_size: int) -> None:
        """Initialise.

        Args:
            model: The chunk with Megatron's output layer. This object takes over that layer's communication.
            vocab_size: Number of ids of the model. The layer pads it; padding ids are never sampled.
        """
        self._model, self._layer = model, model.output_layer
        self._sequence_parallel = bool(model.config.sequence_parallel)
        columns = self._layer.output_size_per_partition
        self._first_padding = max(0, vocab_size - parallel_state.get_tensor_model_parallel_rank() * columns)
        self._rows = logit_rows(columns)
        self._layer.sequence_parallel = self._layer.allreduce_dgrad = False
        self._layer.disable_grad_reduce = True

    def scores(self, hidden: Tensor, score_rows: ScoreRows, *, frozen: bool = False) -> dict[str, Tensor]:
        """Compute scores of all tokens of this context-parallel rank.

        Args:
            hidden: `[P / c or P / (c t), 1, H]`.
            score_rows: Computes the scores of consecutive rows. The backward pass calls it again for the same rows.
            frozen: Whether the layer's weight gets no gradient from these scores.

        Returns:
            Scores by name, `[P / c]` or `[P / c, K]`.
        """
        weight = self._weight()
        if frozen:
            weight = weight.detach()
        states = self._gather(hidden)
        count = len(states)
        if count <= self._rows:
            return dict(score_rows(self.logits(states, weight), slice(0, count)))
        rows = [slice(start, min(count, start + self._rows)) for start in range(0, count, self._rows)]
        if torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad):
            names: list[str] = []
            scores = _RowsOfScores.apply(states, weight, self.logits, score_rows, rows, names)
            return dict(zip(names, scores, strict=True))
        parts = [score_rows(self.logits(states[part], weight), part) for part in rows]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def logits(self, states: Tensor, weight: Tensor) -> Tensor:
        """Compute logits `[N, V / t]` of states `[N, H]`; those of padding ids are MASKED_LOGIT."""
        output, _ = self._layer(states[:, None], weight=weight)
        logits: Tensor = output[:, 0]
        if self._first_padding < logits.shape[-1]:
            logits[:, self._first_padding :].fill_(MASKED_LOGIT)
        return logits

    def _weight(self) -> Tensor:
        if self._model.share_embeddings_and_output_weights:
            shared: Tensor = self._model.shared_embedding_or_output_weight()
            return shared
        weight: Tensor = self._layer.weight
        return weight

    def _gather(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all tokens of this context-parallel rank, `[P / c, H]`.

        The backward pass sums their gradient over tensor-parallel ranks, because each rank computes the logits of
        other ids.
        """
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return hidden[:, 0]


class _RowsOfScores(torch.autograd.Function):
    """Scores of some rows at a time. The backward pass computes the logits of the rows again.

    `forward` writes the names of the scores into its argument `names`, because autograd functions return only
    tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        logits: Callable[[Tensor, Tensor], Tensor],
        score_rows: ScoreRows,
        rows: Sequence[slice],
        names: list[str],
    ) -> tuple[Tensor, ...]:
        parts: list[list[Tensor]] = []
        constant: set[str] = set()
        for part in rows:
            with torch.enable_grad():  # to find out which scores have a gradient
                scores = score_rows(logits(states[part].detach().requires_grad_(), weight), part)
            names[:] = scores
            constant |= {name for name, score in scores.items() if not score.requires_grad}
            parts.append([score.detach() for score in scores.values()])
            del scores  # frees the logits of these rows before the next ones are computed
        ctx.save_for_backward(states)
        ctx.weight = weight
        ctx.logits = logits
        ctx.score_rows = score_rows
        ctx.rows = rows
        scores_of_rows = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        ctx.mark_non_differentiable(
            *(s for name, s in zip(names, scores_of_rows, strict=True) if name in constant)
        )
        return scores_of_rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (states,) = ctx.saved_tensors
        weight = ctx.weight
        states_gradient = torch.empty_like(states)
        weight_gradient: Tensor | None = None
        for part in ctx.rows:
            with torch.enable_grad():
                leaf = states[part].detach().requires_grad_()
                scores = ctx.score_rows(ctx.logits(leaf, weight), part)
            pairs = zip(scores.values(), gradients, strict=True)
            outputs, upstream = zip(
                *((score, gradient[part]) for score, gradient in pairs if score.requires_grad), strict=True
            )
            inputs = [leaf, weight] if weight.requires_grad else [leaf]
            leaf_gradient, *rows_gradient = torch.autograd.grad(outputs, inputs, upstream, allow_unused=True)
            states_gradient[part] = leaf_gradient
            if rows_gradient:
                weight_gradient = _add_rows(weight_gradient, rows_gradient[0], weight)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        return states_gradient, weight_gradient, None, None, None, None


def _add_rows(total: Tensor | None, part: Tensor | None, weight: Tensor) -> Tensor | None:
    """Add the weight's gradient of some rows to `total` in float32, and return the sum.

    With fused accumulation, Megatron has already added the gradient to `main_grad` and returns an arbitrary tensor,
    which this function passes on.
    """
    if part is None or getattr(weight, "grad_added_to_main_grad", False):
        return part
    return part.float() if total is None else total.add_(part)
