"""Gated delta net layers (Yang et al. 2024) in place of attention, as in Qwen3-Next.

The layers process packed sequences, and tensor-parallel ranks divide their heads; megatron-core 0.16.1 supports
neither. Queries, keys and values pass through a causal convolution, channel by channel. rlsys/ops/delta_rule.py
implements the recurrence.

Shapes: T packed tokens, R sequences padded to L tokens, H value heads of this rank, p size of a key, w size of a
value. Each key head has the same number of value heads.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import conv1d, pad, silu, softplus

from rlsys.convert.config import DeltaSizes
from rlsys.ops.delta_rule import delta_rule, normalize
from rlsys.trainer.model.attention import PackedSequences

_SHARD_AXES = {"A_log": 0, "dt_bias": 0, "conv": 0}


class DeltaNet(MegatronModule):
    """Layer in place of Megatron's SelfAttention.

    Its parameters are ordered by key head; each key head's part includes its value heads. The part of a rank is
    therefore a contiguous range.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, sizes: DeltaSizes, **_: Any) -> None:
        super().__init__(config)
        self.layer_number, self.sizes = layer_number, sizes
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.key_heads, self.value_heads = sizes.key_heads // ranks, sizes.value_heads // ranks
        parallel: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        wide: dict[str, Any] = {**parallel, "gather_output": False}
        self.in_proj = ColumnParallelLinear(config.hidden_size, sizes.projected, **wide)
        self.gate_proj = ColumnParallelLinear(config.hidden_size, 2 * sizes.value_heads, **wide)
        self.out_proj = RowParallelLinear(
            sizes.value_heads * sizes.value_size,
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            **parallel,
        )
        self.A_log = Parameter(torch.zeros(self.value_heads))
        self.dt_bias = Parameter(torch.zeros(self.value_heads))
        self.conv = Parameter(torch.zeros(sizes.convolved // ranks, 1, sizes.width))
        self.norm = Parameter(torch.ones(sizes.value_size))
        # All ranks have this weight, and each applies it to its own heads: Megatron sums the ranks' gradients.
        self.norm.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Map `[T, 1, hidden]` to the layer's output of this shape, and no bias.

        Under sequence parallelism, T is the number of this rank's tokens.
        """
        mixed, _bias = self.in_proj(hidden_states)
        gates, _bias = self.gate_proj(hidden_states)
        out = self._attend(mixed[:, 0], gates[:, 0], packed_seq_params)
        projected, _bias = self.out_proj(out[:, None])
        return projected, None

    def _attend(self, mixed: Tensor, gates: Tensor, packed: PackedSequences) -> Tensor:
        """Map mixed `[T, projected of this rank]` and gates `[T, 2 H]` to `[T, H w]`."""
        p, w, group_size = (
            self.sizes.key_size,
            self.sizes.value_size,
            self.sizes.value_heads // self.sizes.key_heads,
        )
        *qkv, z = mixed.unflatten(1, (self.key_heads, -1)).split(
            [p, p, group_size * w, group_size * w], dim=-1
        )
        beta, a = (x.flatten(1) for x in gates.unflatten(1, (self.key_heads, -1)).chunk(2, dim=-1))
        g = -self.A_log.float().exp() * softplus(a.float() + self.dt_bias.float())
        padding = packed.padding
        tokens = [rows * longest for rows, longest, _ in padding.rectangles]
        parts = [
            x.index_select(0, padding.to_padded).split(tokens)
            for x in (torch.cat(qkv, dim=-1).flatten(1), g, beta.sigmoid())
        ]
        outputs = []
        for (rows, longest, _), *rectangle_parts in zip(padding.rectangles, *parts, strict=True):
            x, decay, write = (part.unflatten(0, (rows, longest)) for part in rectangle_parts)
            heads = convolve(x, self.conv).unflatten(2, (self.key_heads, -1))
            q, k, v = heads.split([p, p, group_size * w], dim=-1)
            q, k = (normalize(x.float()).repeat_interleave(group_size, dim=2) for x in (q, k))
            v = v.unflatten(3, (group_size, w)).flatten(2, 3)
            read, _ = delta_rule(q * p**-0.5, k, v.float(), decay, write.float())
            outputs.append(read.flatten(0, 1))
        out = torch.cat(outputs).index_select(0, padding.to_packed).to(mixed.dtype)
        y = out.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.config.layernorm_epsilon)
        gated = self.norm * y.to(out.dtype) * silu(z.reshape(out.shape).float())
        return gated.to(mixed.dtype).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None, **_: Any
    ) -> dict[str, Any]:
        """Describe the parameters for a checkpoint, which stores the ranks' heads in rank order."""
        state: dict[str, Any] = {}
        self._save_to_state_dict(state, "", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, _SHARD_AXES, sharded_offsets
        )
        for name, module in self.named_children():
            sharded |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        return sharded


class ZeroCentredNorm(torch.nn.Module):
    """RMSNorm, computed in float32, that scales by 1 + weight, `[hidden]`."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Parameter(torch.zeros(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1 + self.weight.float())).to(x.dtype)


def set_delta_net(layer: TransformerLayerSubmodules, sizes: DeltaSizes) -> None:
    """Replace the attention in a layer's spec by a gated delta net."""
    layer.self_attention = ModuleSpec(DeltaNet, params={"sizes": sizes})


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Apply a causal convolution and SiLU to x `[R, L, channels]`. `weight`: `[channels, 1, width]`."""
    padded = pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return silu(conv1d(padded, weight, groups=len(weight))).transpose(1, 2)
