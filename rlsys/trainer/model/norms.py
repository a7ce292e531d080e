"""RMSNorm of queries or keys over all heads together (OLMoE, MiniMax-M2), which megatron-core lacks.

Shapes: n heads of the model, d head size, r tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class HeadsNorm(torch.nn.Module):
    """RMSNorm in which each rank normalises its `n / r` heads by the mean square over all n heads."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float, heads: int) -> None:
        """Initialise.

        Args:
            hidden_size: d; Megatron passes the size of one head.
            config: Megatron's config, which is not used.
            eps: Added to the mean square.
            heads: n.
        """
        super().__init__()
        self.eps, self.size = eps, heads * hidden_size
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.weight = torch.nn.Parameter(torch.ones(self.size // ranks))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., n / r, d]` in float32."""
        y = x.float()
        squares = y.pow(2).sum((-2, -1), keepdim=True)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            squares = reduce_from_tensor_model_parallel_region(copy_to_tensor_model_parallel_region(squares))
        y = y * torch.rsqrt(squares / self.size + self.eps)
        return y.to(x.dtype) * self.weight.view(x.shape[-2:])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the weight for a checkpoint, which stores the ranks' parts in rank order."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets
        )
        return sharded


def set_heads_norms(layer: TransformerLayerSubmodules, transformer: TransformerConfig) -> None:
    """Use HeadsNorm for queries and keys in a layer's spec."""
    parts = layer.self_attention.submodules
    parts.q_layernorm = ModuleSpec(HeadsNorm, {"heads": transformer.num_attention_heads})
    parts.k_layernorm = ModuleSpec(HeadsNorm, {"heads": transformer.num_query_groups})
