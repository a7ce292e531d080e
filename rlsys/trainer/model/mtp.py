"""Training of a model's layer for multi-token prediction (MTP), the draft model of engines (DeepSeek-V3, 2.2).

At token i it joins the model's last hidden state h_i with the embedding of token i + 1, and predicts token i + 2:

    x_i = W [norm(emb(t_{i+1})); norm(h_i)]      logits = head(norm(layer(x)_i))

Embedding and head are the model's. By default (trainer.mtp_trunk = false) no gradient leaves the layer: the policy's
gradients, their norm and its clipping are bit-equal to those of a run without it, with the same packing.

Megatron (0.16.1) has the layer, but computes its loss only from labels that it shifts itself. It does not know which
tokens are trained, nor that the tokens of a context-parallel rank are not neighbours on a CPU. Here the targets come
from the micro-batch.

Shapes: T tokens of a micro-batch, P of it padded, c context-parallel ranks, t tensor-parallel ranks, H hidden, V
vocabulary.
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
"""Megatron's constant in the divisor of its clipping."""


class _Layer(MultiTokenPredictionLayer):
    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: PackedSequences | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the embeddings. `input_ids` are already the following tokens, which need not be neighbours here."""
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
        """Pass only tensors to activation recomputation.

        Megatron would save all arguments, including packed sequences.
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
    """Return the spec of the MTP layer, which has the type of the model's last layer.

    None if this rank has no MTP layer.
    """
    if not transformer.mtp_num_layers:
        return None
    spec = get_gpt_mtp_block_spec(transformer, layers, transformer_engine, vp_stage=stage)
    for layer in spec.layer_specs if spec is not None else ():
        layer.module = _Layer
    return spec


@dataclass(frozen=True)
class _ForwardState:
    """Inputs of the MTP layer from a forward pass. hidden `[P / c or P / (c t), 1, H]`."""

    hidden: Tensor
    rotary: Tensor | None
    packed: PackedSequences


class _ZeroGradient(torch.autograd.Function):
    """Identity function whose gradient is 0, for the last stage's copy of the embedding.

    With overlapped gradient reduction (parallel.overlap) Megatron waits for a gradient of every parameter.
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
        """Return the hidden states, and store them for the MTP layer on the last stage."""
        if self.post_process and self.training and torch.is_grad_enabled():
            self._forward_state = _ForwardState(hidden_states, rotary_pos_emb, packed_seq_params)
        return hidden_states

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the model for a checkpoint, with the group that ties the copy of the embedding."""
        group_metadata = ensure_metadata_has_dp_cp_group(metadata)
        sharded: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, group_metadata)
        return sharded

    def prediction_states(self, share: Share, *, trunk: bool) -> Tensor:
        """Return the MTP layer's hidden states `[P / c or P / (c t), 1, H]` of the last forward pass.

        `trunk`: gradients reach the model's layers and embedding.
        """
        assert self._forward_state is not None, "expected a forward pass with gradients before this call"
        state, self._forward_state = self._forward_state, None
        hidden, embedding = state.hidden, self.embedding
        if not trunk:
            # A leaf that requires a gradient: activation recomputation needs an input with a gradient.
            hidden = hidden.detach().requires_grad_()

            def embedding(**ids: Tensor) -> Tensor:
                embedded: Tensor = self.embedding(**ids)
                return embedded.detach() if self.pre_process else _ZeroGradient.apply(embedded)

        out, *_ = self.mtp.layers[0](
            input_ids=share.following[None],
            position_ids=share.position_ids[None],
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=state.rotary,
            packed_seq_params=state.packed,
            embedding=embedding,
        )
        states: Tensor = out
        return states


def predicted_tokens(micro: MicroBatch) -> Tensor:
    """Return the trained tokens with at least two predecessors in their sequence, `[T]` bool."""
    starts = micro.cu_seqlens[:-1].long()
    lengths = micro.cu_seqlens[1:].long() - starts
    position = torch.arange(len(micro.tokens), device=starts.device) - torch.repeat_interleave(
        starts, lengths
    )
    return (position >= 2) & (micro.mask > 0)


@dataclass(frozen=True)
class Prediction:
    """Loss of the MTP layer: `weight` times the cross entropy of each predicted token.

    `model`: this rank's last chunk. `output`: its output layer, None on other stages. `trunk`: gradients reach the
    model's layers, embedding and output layer.
    """

    model: GPTModel
    output: OutputLayer | None
    weight: float
    trunk: bool

    def loss(self, share: Share, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's loss sum of the last forward pass, and metric sums over context-parallel ranks."""
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
    """Return the most probable ids `[P / c]` of logits `[P / c, V / t]`; the lowest id of equal logits."""
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

    They are the mean loss of a predicted token, and the share of predicted tokens that the layer finds most probable.
    """
    if "mtp_tokens" not in sums:
        return {}
    loss, right, tokens = (float(sums.pop(name)) for name in ("mtp_loss", "mtp_right", "mtp_tokens"))
    return {"mtp_loss": loss / max(1.0, tokens), "mtp_accuracy": right / max(1.0, tokens)}


class SeparateClipping:
    """Gradient norm of the MTP layer and its separate clipping, for a layer that no gradient leaves.

    As a part of the model's norm, the layer would influence the size of the policy's update.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Parameter], limit: float) -> None:
        """Initialise. `optimizer`: Megatron's chain. `parameters`: the layer's parameters on this rank."""
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
        """Return the gradient norm of the whole layer, after the optimizer has its gradients. Collective."""
        unique_shards = [s for s in self._shards() if param_is_not_tensor_parallel_duplicate(s)]
        gradients = [shard.grad for shard in unique_shards if shard.grad is not None]
        return float(get_grad_norm_fp32(gradients, grad_stats_parallel_group=dist.group.WORLD))

    @torch.no_grad()
    def clip(self, norm: float, model_norm: float) -> None:
        """Clip by the layer's own norm and compensate the scale that Megatron later applies to every gradient."""
        mtp_scale, model_scale = (min(1.0, self._limit / (n + _CLIP_EPSILON)) for n in (norm, model_norm))
        if mtp_scale != model_scale:
            for parameter in self._parameters:
                parameter.main_grad.mul_(mtp_scale / model_scale)  # type: ignore[attr-defined]
