"""Trains a model's layer for multi-token prediction: the draft with which engines speculate (DeepSeek-V3, 2.2).

At token i it joins the model's last hidden state h_i with the embedding of token i + 1, and predicts token i + 2:

    x_i = W [norm(emb(t_{i+1})); norm(h_i)]      logits = head(norm(layer(x)_i))

Embedding and head are the model's. By default (trainer.mtp_trunk = false) no gradient leaves the layer: the policy's
gradients, their norm and its clipping are bit for bit those of a run without it, packed alike.

Megatron (0.16.1) has the layer, and computes its loss only from labels that its own shifts make: these know neither
which tokens are trained nor that a context-parallel rank's tokens are not neighbours on a CPU. Ours come from the
micro-batch.

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
from rlsys.trainer.model.share import Share
from rlsys.trainer.pack import MicroBatch

_CLIP_EPSILON = 1e-6
"""Megatron's, in the divisor of its own clipping."""


class _Layer(MultiTokenPredictionLayer):
    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: PackedSequences | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`input_ids` are those that follow already: what follows a token is not always its neighbour here."""
        embedded = embedding(input_ids=input_ids, position_ids=position_ids)
        return input_ids, position_ids, embedded, hidden_states

    def _checkpointed_forward(
        self,
        forward_func: Callable[..., Tensor],
        *,
        hidden_states: Tensor,
        decoder_input: Tensor,
        **rest: Any,
    ) -> Tensor:
        """Megatron would save all arguments for the backward pass, which only takes tensors: not packed sequences."""

        def run(hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
            return forward_func(hidden_states=hidden_states, decoder_input=decoder_input, **rest)

        found: Tensor = super()._checkpointed_forward(
            run, hidden_states=hidden_states, decoder_input=decoder_input
        )
        return found


def mtp_spec(
    transformer: TransformerConfig,
    layers: TransformerBlockSubmodules,
    stage: int | None,
    transformer_engine: bool,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Its layer is of the kind of the model's last one. None where this rank has none."""
    if not transformer.mtp_num_layers:
        return None
    spec = get_gpt_mtp_block_spec(transformer, layers, transformer_engine, vp_stage=stage)
    for layer in spec.layer_specs if spec is not None else ():
        layer.module = _Layer
    return spec


@dataclass(frozen=True)
class _Seen:
    """What the layer needs of a forward pass. hidden `[P / c or P / (c t), 1, H]`."""

    hidden: Tensor
    rotary: Tensor | None
    packed: PackedSequences


class _GiveZeros(torch.autograd.Function):
    """What it is given; its gradient is 0, whatever comes. For the last stage's copy of the embedding: where
    gradients are reduced as they come (parallel.overlap), megatron waits for one of every parameter."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


class PredictingModel(GPTModel):
    """A GPTModel whose forward pass gives its own logits alone, and keeps what its prediction layer needs."""

    _seen: _Seen | None = None

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
        """Logits `[1, P / c, V / t]` on the last stage."""
        if not self.post_process:
            return hidden_states
        if self.training and torch.is_grad_enabled():
            self._seen = _Seen(hidden_states, rotary_pos_emb, packed_seq_params)
        logits, _unused = self.output_layer(hidden_states)
        found: Tensor = logits.transpose(0, 1).contiguous()
        return found

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron needs a group to tie the copy of the embedding, and does not look for it where none is told."""
        told = ensure_metadata_has_dp_cp_group(metadata)
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, told)
        return found

    def predictions(self, share: Share, *, trunk: bool) -> Tensor:
        """Logits `[P / c, V / t]` of the second token after each of the last forward pass.

        `trunk`: gradients reach the model's layers, embedding and head.
        """
        assert self._seen is not None, "no forward pass with gradients came before"
        seen, self._seen = self._seen, None
        hidden, head, embedding = seen.hidden, self.output_layer.weight, self.embedding
        if not trunk:
            # A leaf that asks for a gradient: activation recomputation goes backward only where an input does.
            hidden, head = hidden.detach().requires_grad_(), head.detach()

            def embedding(**ids: Tensor) -> Tensor:
                embedded: Tensor = self.embedding(**ids)
                return embedded.detach() if self.pre_process else _GiveZeros.apply(embedded)

        out, *_ = self.mtp.layers[0](
            input_ids=share.following[None],
            position_ids=share.position_ids[None],
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=seen.rotary,
            packed_seq_params=seen.packed,
            embedding=embedding,
        )
        # Past the hooks of the output layer: a value head takes the model's hidden states there.
        logits, _ = self.output_layer.forward(out, weight=head)
        found: Tensor = logits[:, 0]
        return found


def predicted(micro: MicroBatch) -> Tensor:
    """`[T]` bool: the trained tokens that have two others before them in their sequence."""
    starts = micro.cu_seqlens[:-1].long()
    lengths = micro.cu_seqlens[1:].long() - starts
    place = torch.arange(len(micro.tokens), device=starts.device) - torch.repeat_interleave(starts, lengths)
    return (place >= 2) & (micro.mask > 0)


@dataclass(frozen=True)
class Prediction:
    """The loss of the layer, `weight` times the cross entropy of each predicted token. `models`: this rank's part."""

    models: Sequence[GPTModel]
    weight: float
    trunk: bool

    def loss(self, share: Share, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Of the last forward pass: this rank's sum, and sums over context-parallel ranks for the metrics."""
        model = self.models[-1]
        assert isinstance(model, PredictingModel)
        logits = model.predictions(share, trunk=self.trunk).float()
        source = share.source.clamp(min=0)
        tokens = micro.tokens.roll(-2)[source]
        counted = predicted(micro).roll(-2)[source] & (share.source >= 0)
        right = (most_probable(logits) == tokens) & counted
        entropy = vocab_parallel_cross_entropy(logits, tokens) * counted
        total = entropy.sum()
        sums = torch.stack([total.detach().double(), right.sum().double(), counted.sum().double()])
        if share.cp_group.size() > 1:
            dist.all_reduce(sums, group=share.cp_group)
        names = ("mtp_loss", "mtp_right", "mtp_tokens")
        return total * self.weight, dict(zip(names, sums, strict=True))


def most_probable(logits: Tensor) -> Tensor:
    """`[P / c]` ids, of logits `[P / c, V / t]`; the lower of equals."""
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
    """Takes what Prediction.loss counted out of `sums`: the mean loss of a predicted token, and the share of those
    that the layer finds most probable."""
    if "mtp_tokens" not in sums:
        return {}
    loss, right, tokens = (float(sums.pop(name)) for name in ("mtp_loss", "mtp_right", "mtp_tokens"))
    return {"mtp_loss": loss / max(1.0, tokens), "mtp_accuracy": right / max(1.0, tokens)}


class OwnClipping:
    """The norm of the layer's gradient, and its clipping by itself: a part of the model's norm, it would decide how
    far the policy moves. For a layer that no gradient leaves.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Parameter], limit: float) -> None:
        """`optimizer`: megatron's chain. `parameters`: those of the layer that this rank has."""
        self._parts = getattr(optimizer, "chained_optimizers", [optimizer])
        self._parameters, self._limit = parameters, limit
        for shard in self._shards():
            shard.shared = True  # type: ignore[attr-defined]  # megatron leaves these out of its norm

    def _shards(self) -> Iterator[Tensor]:
        """What this rank updates of them."""
        mine = set(self._parameters)
        for part in self._parts:
            if part.is_stub_optimizer:
                continue
            groups = part.optimizer.param_groups
            for parameter, (group, place) in part.model_param_group_index_map.items():
                if parameter in mine:
                    yield groups[group]["params"][place]

    @torch.no_grad()
    def norm(self) -> float:
        """Of the whole layer, once the optimizer has its gradients. Collective."""
        counted = [s for s in self._shards() if param_is_not_tensor_parallel_duplicate(s)]
        gradients = [shard.grad for shard in counted if shard.grad is not None]
        return float(get_grad_norm_fp32(gradients, grad_stats_parallel_group=dist.group.WORLD))

    @torch.no_grad()
    def clip(self, norm: float, model_norm: float) -> None:
        """By the layer's own norm. Megatron then scales every gradient as the model's asks for: taken out here."""
        own, models = (min(1.0, self._limit / (n + _CLIP_EPSILON)) for n in (norm, model_norm))
        if own != models:
            for parameter in self._parameters:
                parameter.main_grad.mul_(own / models)  # type: ignore[attr-defined]
