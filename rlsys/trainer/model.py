"""Builds megatron-core's GPTModel from a Hugging Face config, and loads its weights into this rank's shards."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig

from rlsys.config import Config
from rlsys.convert.hf import HFConfig, HFTensors
from rlsys.convert.layout import check_names, names, to_megatron
from rlsys.convert.shards import shard, shard_axis
from rlsys.errors import UserError
from rlsys.trainer.attention import PackedAttention

HAVE_TE = importlib.util.find_spec("transformer_engine") is not None


def check_layout(config: Config, hf: HFConfig) -> None:
    """Raises UserError, with both numbers, for a layout that does not divide this model."""
    p = config.parallel
    for name, size, what, total in (
        ("tp", p.tp, "key-value heads", hf.kv_heads),
        ("tp", p.tp, "attention heads", hf.heads),
        ("tp", p.tp, "vocab_size", hf.vocab_size),
        ("pp", p.pp, "layers", hf.layers),
        ("ep", p.ep, "experts", hf.experts),
        ("etp", p.expert_tp, "the experts' feed-forward size", hf.expert_ffn_size),
    ):
        if total % size:
            raise UserError(
                f"parallel.{name} = {size} does not divide {what} = {total} of {config.model.path}"
            )
    if p.ep > 1 and not hf.experts:
        raise UserError(f"parallel.ep = {p.ep}, but {config.model.path} has no experts")
    if p.cp > 1:
        raise UserError(f"parallel.cp = {p.cp}: context parallelism is not supported yet; use 1")
    if p.pp > 1:
        raise UserError(f"parallel.pp = {p.pp}: pipeline parallelism is not supported yet; use 1")


def transformer_config(config: Config, hf: HFConfig) -> TransformerConfig:
    """Every field that changes numbers comes from config.json; fusions need TE or Apex and stay off without."""
    p = config.parallel
    dtype = getattr(torch, config.model.dtype)
    moe: dict[str, Any] = {}
    if hf.experts:
        moe = {
            "num_moe_experts": hf.experts,
            "moe_router_topk": hf.experts_per_token,
            "moe_ffn_hidden_size": hf.expert_ffn_size,
            # softmax over the chosen experts = softmax over all, renormalised (norm_topk_prob)
            "moe_router_pre_softmax": not hf.norm_topk,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_dtype": "fp32",
        }
    return TransformerConfig(
        num_layers=hf.layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.heads,
        num_query_groups=hf.kv_heads,
        kv_channels=hf.head_dim,
        ffn_hidden_size=hf.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.norm_eps,
        qk_layernorm=hf.family.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.family.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=p.expert_tp,
        sequence_parallel=p.tp > 1,
        variable_seq_lengths=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        calculate_per_token_loss=True,  # before DDP is built, or gradients are divided by dp
        deterministic_mode=not torch.cuda.is_available(),
        **moe,
    )


def build_model(config: Config, hf: HFConfig) -> GPTModel:
    """This rank's part of the model, weights loaded from `config.model.path`."""
    check_layout(config, hf)
    transformer = transformer_config(config, hf)
    if HAVE_TE and torch.cuda.is_available():
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=transformer.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=hf.family.qk_norm
        )
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=transformer.num_moe_experts,
            moe_grouped_gemm=False,
            qk_layernorm=hf.family.qk_norm,
            normalization="RMSNorm",
        )
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
    model = GPTModel(
        transformer,
        spec,
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.context_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=hf.tied,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=hf.rope_theta,
    )
    load_hf(model, config.model.path, hf)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # One optimizer shape for any ep; must precede DDP.
            parameter.allreduce = False
    return model


def load_hf(model: GPTModel, folder: Path, hf: HFConfig) -> None:
    """Fill this rank's parameters from `folder`, tensor by tensor. Raises UserError naming a tensor that misfits."""
    tensors = HFTensors(folder)
    check_names(hf, tensors.names, str(folder))
    mine = dict(model.named_parameters())
    filled: set[str] = set()
    per_rank = hf.experts // parallel_state.get_expert_model_parallel_world_size() if hf.experts else 0
    first = per_rank * parallel_state.get_expert_model_parallel_rank() if hf.experts else 0
    for rule, name, sources in names(hf):
        local = local_name(name, first, per_rank)
        if local is None or local not in mine:
            continue
        full = to_megatron(rule, [tensors[s] for s in sources], hf)
        part = shard(full, shard_axis(rule, name), rule.layout)
        target = mine[local]
        if part.shape != target.shape:
            raise UserError(
                f"{folder}: {sources[0]} gives {tuple(part.shape)} for {name} {tuple(target.shape)}"
            )
        with torch.no_grad():
            target.copy_(part)
        filled.add(local)
    if rest := sorted(set(mine) - filled):
        raise UserError(f"{folder}: no tensor for the model's {rest[0]} (and {len(rest) - 1} more)")


def local_name(name: str, first_expert: int, experts: int) -> str | None:
    """A model-wide parameter name as this expert-parallel rank numbers it; None for another rank's expert."""
    marker = "local_experts."
    head, found, tail = name.partition(marker)
    if not found:
        return name
    number, rest = tail.split(".", 1)
    local = int(number) - first_expert
    return f"{head}{marker}{local}.{rest}" if 0 <= local < experts else None
