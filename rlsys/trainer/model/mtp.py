"""Training of a model's layer for multi-token prediction (MTP; DeepSeek-V3, section 2.2), engines' draft model.

At token i, the layer combines the model's last hidden state h_i with the embedding of token i + 1, and predicts token
i + 2:

    x_i = W [norm(emb(t_{i+1})); norm(h_i)]      logits = head(norm(layer(x)_i))

The layer uses the model's embedding and head. By default (trainer.mtp_trunk = false), no gradient flows from the
layer into the model: the policy's gradients, their norm and their clipping are bit-equal to those of a run without
MTP and with the same packing.

Megatron (0.16.1) has the layer, but computes its loss from labels that Megatron shifts itself. That ignores which
tokens are trained, and is wrong for context-parallel ranks on a CPU, whose consecutive tokens are not neighbours. In
this module, the targets come from the micro-batch.

Shapes: T tokens of a micro-batch, P tokens after padding, c context-parallel ranks, t tensor-parallel ranks, H hidden
size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.tensor_parallel import (
    param_is_not_tensor_parallel_duplicate,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor
from torch.nn import Parameter

from rlsys.trainer.model.attention import PackedSequences
from rlsys.trainer.model.context_parallel import Share
from rlsys.trainer.model.output_layer import OutputLayer, TrunkModel
from rlsys.trainer.pack import MicroBatch

_CLIP_EPSILON = 1e-6
"""Constant that Megatron adds to the gradient norm before it divides by it."""


class _Layer(MultiTokenPredictionLayer):
    """Megatron's layer for inputs that are already shifted."""

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: PackedSequences | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (ids, positions, embeddings, hidden states). `input_ids` contains the following tokens."""
        embedded = embedding(input_ids=input_ids, position_ids=position_ids)
        return input_ids, position_ids, embedded, hidden_states

    def _checkpointed_forward(
        self,
        forward_func: Callable[..., Tensor],
        *,
        hidden_states: Tensor,
        decoder_input: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        """Recompute activations, but save only the tensor arguments.

        Megatron would save all arguments, including packed sequences, which are no tensors.
        """

        def run(hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
            return forward_func(hidden_states=hidden_states, decoder_input=decoder_input, **kwargs)

        output: Tensor = super()._checkpointed_forward(
            run, hidden_states=hidden_states, decoder_input=decoder_input
        )
        return output


def mtp_spec(
    transformer: TransformerConfig,
    layers: TransformerBlockSubmodules,
    stage: int | None,
    transformer_engine: bool,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the spec of the MTP layer, which is of the same kind as the model's last layer.

    Args:
        transformer: Megatron's config.
        layers: Spec of the model's layers.
        stage: Virtual pipeline stage; None: there is one.
        transformer_engine: Whether layers are Transformer Engine's.

    Returns:
        The spec; None if the stage has no MTP layer.
    """
    if not transformer.mtp_num_layers:
        return None
    spec = get_gpt_mtp_block_spec(transformer, layers, transformer_engine, vp_stage=stage)
    for layer in spec.layer_specs if spec is not None else ():
        layer.module = _Layer
    return spec


@dataclass(frozen=True)
class _ForwardState:
    """Inputs of the MTP layer from a forward pass. `hidden`: `[P / c or P / (c t), 1, H]`."""

    hidden: Tensor
    rotary: Tensor | None
    packed: PackedSequences


class _ZeroGradient(torch.autograd.Function):
    """Identity function with the gradient 0, for the last stage's copy of the embedding.

    With overlapped gradient reduction (parallel.overlap), Megatron waits until every parameter has a gradient.
    """

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


class MTPModel(TrunkModel):
    """A model whose forward pass stores the inputs of its MTP layer."""

    _forward_state: _ForwardState | None = None

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: None,
        rotary_pos_emb: Tensor | None,
        *_: Any,
        packed_seq_params: PackedSequences,
        **__: Any,
    ) -> Tensor:
        """Return the hidden states. In a train step, the last stage also stores them for the MTP layer."""
        if self.post_process and self.training and torch.is_grad_enabled():
            self._forward_state = _ForwardState(hidden_states, rotary_pos_emb, packed_seq_params)
        return hidden_states

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the model for a checkpoint, with the group whose ranks have copies of the embedding."""
        group_metadata = ensure_metadata_has_dp_cp_group(metadata)
        sharded: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, group_metadata)
        return sharded

    def prediction_states(self, share: Share, *, trunk: bool) -> Tensor:
        """Run the MTP layer on the inputs of the last forward pass.

        Args:
            share: Tokens of that forward pass.
            trunk: Whether gradients flow into the model's layers and embedding.

        Returns:
            The layer's hidden states, `[P / c or P / (c t), 1, H]`.
        """
        assert self._forward_state is not None, "expected a forward pass with gradients before this call"
        state, self._forward_state = self._forward_state, None
        hidden, embedding = state.hidden, self.embedding
        if not trunk:
            # It still requires a gradient, because activation recomputation needs an input that does.
            hidden = hidden.detach().requires_grad_()

            def embedding(**ids: Tensor) -> Tensor:
                embedded: Tensor = self.embedding(**ids)
                return embedded.detach() if self.pre_process else _ZeroGradient.apply(embedded)

        states: Tensor
        states, *_ = self.mtp.layers[0](
            input_ids=share.following[None],
            position_ids=share.position_ids[None],
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=state.rotary,
            packed_seq_params=state.packed,
            embedding=embedding,
        )
        return states


def predicted_tokens(micro: MicroBatch) -> Tensor:
    """Return which tokens are trained and have at least two predecessors in their sequence, `[T]` bool."""
    starts = micro.cu_seqlens[:-1].long()
    lengths = micro.cu_seqlens[1:].long() - starts
    token = torch.arange(len(micro.tokens), device=starts.device)
    position = token - torch.repeat_interleave(starts, lengths)
    return (position >= 2) & (micro.mask > 0)


@dataclass(frozen=True)
class Prediction:
    """Loss of the MTP layer: `weight` times the cross entropy of each predicted token.

    Attributes:
        model: This rank's last model chunk.
        output: The chunk's output layer; None if this rank does not have the last pipeline stage.
        weight: Factor of the loss.
        trunk: Whether gradients flow into the model's layers, embedding and output layer.
    """

    model: GPTModel
    output: OutputLayer | None
    weight: float
    trunk: bool

    def loss(self, share: Share, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of the last forward pass.

        Returns:
            The sum of the loss over this rank's tokens, and sums over context-parallel ranks for `take_metrics`.
        """
        model, output = self.model, self.output
        assert isinstance(model, MTPModel) and output is not None
        source = share.source.clamp(min=0)
        tokens = micro.tokens.roll(-2)[source]
        is_predicted = predicted_tokens(micro).roll(-2)[source] & (share.source >= 0)

        def score_rows(logits: Tensor, rows: slice) -> dict[str, Tensor]:
            logits = logits.float()
            is_correct = most_probable(logits) == tokens[rows]
            return {"correct": is_correct, "entropy": vocab_parallel_cross_entropy(logits, tokens[rows])}

        scores = output.scores(
            model.prediction_states(share, trunk=self.trunk), score_rows, frozen=not self.trunk
        )
        is_correct = scores["correct"] & is_predicted
        entropy = scores["entropy"] * is_predicted
        total = entropy.sum()
        sums = torch.stack([total.detach().double(), is_correct.sum().double(), is_predicted.sum().double()])
        if share.cp_group.size() > 1:
            dist.all_reduce(sums, group=share.cp_group)
        names = ("mtp_loss", "mtp_right", "mtp_tokens")
        return total * self.weight, dict(zip(names, sums, strict=True))


def most_probable(logits: Tensor) -> Tensor:
    """Return the most probable id of each row of logits `[N, V / t]`, `[N]`; of equal logits, the lowest id.

    Collective over tensor-parallel ranks.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    best, ids = logits.detach().max(-1)
    if group.size() == 1:
        return ids
    ids = ids + group.rank() * logits.shape[-1]
    bests, all_ids = ([torch.empty_like(x) for _ in range(group.size())] for x in (best, ids))
    dist.all_gather(bests, best, group=group)
    dist.all_gather(all_ids, ids, group=group)
    return torch.stack(all_ids).gather(0, torch.stack(bests).argmax(0)[None])[0]


def take_metrics(sums: dict[str, Tensor]) -> dict[str, float]:
    """Remove the sums of Prediction.loss from `sums` and return their metrics.

    Returns:
        `mtp_loss`, the mean loss per predicted token, and `mtp_accuracy`, the share of predicted tokens that are the
        layer's most probable ones; empty without MTP.
    """
    if "mtp_tokens" not in sums:
        return {}
    loss, right, tokens = (float(sums.pop(name)) for name in ("mtp_loss", "mtp_right", "mtp_tokens"))
    return {"mtp_loss": loss / max(1.0, tokens), "mtp_accuracy": right / max(1.0, tokens)}


class SeparateClipping:
    """Separate gradient norm and clipping of the MTP layer, if its gradients do not flow into the model.

    In a common norm, the layer would influence the size of the policy's update.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Parameter], limit: float) -> None:
        """Exclude the layer from Megatron's gradient norm.

        Args:
            optimizer: Megatron's chain of optimizers.
            parameters: The layer's parameters on this rank.
            limit: Maximum norm of the clipped gradient.
        """
        self._parts = getattr(optimizer, "chained_optimizers", [optimizer])
        self._parameters, self._limit = parameters, limit
        for shard in self._shards():
            shard.shared = True  # type: ignore[attr-defined]  # megatron leaves these out of its norm

    def _shards(self) -> Iterator[Tensor]:
        """Iterate over the optimizer shards of the layer's parameters on this rank."""
        local = set(self._parameters)
        for part in self._parts:
            if part.is_stub_optimizer:
                continue
            groups = part.optimizer.param_groups
            for parameter, (group, index) in part.model_param_group_index_map.items():
                if parameter in local:
                    yield groups[group]["params"][index]

    @torch.no_grad()
    def norm(self) -> float:
        """Return the gradient norm of the whole layer. Collective; call it after the optimizer's prepare_grads."""
        unique_shards = [s for s in self._shards() if param_is_not_tensor_parallel_duplicate(s)]
        gradients = [shard.grad for shard in unique_shards if shard.grad is not None]
        return float(get_grad_norm_fp32(gradients, grad_stats_parallel_group=dist.group.WORLD))

    @torch.no_grad()
    def clip(self, norm: float, model_norm: float) -> None:
        """Scale the layer's gradient so that it is clipped by the layer's norm after Megatron's own clipping.

        Args:
            norm: Gradient norm of the layer.
            model_norm: Gradient norm of the model, by which Megatron later clips every gradient.
        """
        mtp_scale, model_scale = (min(1.0, self._limit / (n + _CLIP_EPSILON)) for n in (norm, model_norm))
        if mtp_scale != model_scale:
            for parameter in self._parameters:
                parameter.main_grad.mul_(mtp_scale / model_scale)  # type: ignore[attr-defined]
