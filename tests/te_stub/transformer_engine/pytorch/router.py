"""Fused routing, which megatron-core imports and calls only with moe_router_fusion."""

from torch import Tensor


def fused_topk_with_score_function(
    logits: Tensor, topk: int, use_pre_softmax: bool, num_groups: int, group_topk: int, scaling_factor: float,
    score_function: str, expert_bias: Tensor | None,
) -> None:  # fmt: skip
    raise NotImplementedError


def fused_compute_score_for_moe_aux_loss(logits: Tensor, topk: int, score_function: str) -> None:
    raise NotImplementedError


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, num_experts: int, topk: int, coeff: float
) -> None:
    raise NotImplementedError
