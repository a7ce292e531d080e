"""Builds megatron-core's GPTModel, this rank's part of it, from a Hugging Face config."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig

from megatron_patches import have_transformer_engine
from rlsys.config import Config
from rlsys.convert.hf import HFConfig
from rlsys.errors import UserError
from rlsys.trainer.attention import PackedAttention
from rlsys.trainer.chunks import Chunks
from rlsys.trainer.weights import load_hf


def check_layout(config: Config, hf: HFConfig) -> None:
    """Raises UserError, with both numbers, for a layout that does not divide this model."""
    p, path = config.parallel, config.model.path
    if p.ep > 1 and not hf.experts:
        raise UserError(f"parallel.ep = {p.ep}, but {path} has no experts")
    for name, size, what, total in (
        ("pp * vpp", p.pp * p.vpp, "layers", hf.layers),
        ("tp", p.tp, "key-value heads", hf.kv_heads),
        ("tp", p.tp, "attention heads", hf.heads),
        ("tp", p.tp, "vocab_size", hf.vocab_size),
        ("tp", p.tp, "the feed-forward size", 0 if hf.experts else hf.ffn_size),
        ("ep", p.ep, "experts", hf.experts),
        ("etp", p.expert_tp, "the experts' feed-forward size", hf.expert_ffn_size),
    ):
        if total % size:
            raise UserError(f"parallel.{name} = {size} does not divide {what} = {total} of {path}")


def transformer_config(config: Config, hf: HFConfig) -> TransformerConfig:
    """Every field that changes numbers comes from config.json; fusions need kernels we cannot count on."""
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
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        # With two stages the default exchange confuses the two directions of interleaved chunks, silently.
        overlap_p2p_comm=p.vpp > 1,
        batch_p2p_comm=p.vpp == 1,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=p.expert_tp,
        sequence_parallel=p.tp > 1,
        variable_seq_lengths=not config.trainer.equal_lengths,
        moe_token_dispatcher_type=p.dispatcher,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        calculate_per_token_loss=True,  # before DDP is built, or gradients are divided by dp
        deterministic_mode=not torch.cuda.is_available(),
        **moe,
    )


def layer_spec(transformer: TransformerConfig) -> ModuleSpec:
    """Transformer Engine's layers where they can run, else megatron's own with our packed attention."""
    experts, qk_norm = transformer.num_moe_experts, transformer.qk_layernorm
    if have_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(num_experts=experts, qk_layernorm=qk_norm)
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def build_model(config: Config, hf: HFConfig, device: torch.device) -> Chunks:
    """This rank's part of the model on `device`, weights loaded from `config.model.path`."""
    check_layout(config, hf)
    transformer = transformer_config(config, hf)
    vpp = config.parallel.vpp
    stages = range(vpp) if vpp > 1 else [None]
    chunks = Chunks([_chunk(transformer, hf, stage).to(device) for stage in stages])
    load_hf(chunks, config.model.path, hf)
    for name, parameter in chunks.named_parameters():
        if ".experts." in name:
            # One optimizer shape for any ep; must precede DDP.
            parameter.allreduce = False  # type: ignore[attr-defined]
    return chunks


def _chunk(transformer: TransformerConfig, hf: HFConfig, stage: int | None) -> GPTModel:
    """The layers of one virtual pipeline stage; of the rank's only one when `stage` is None."""
    where = {"ignore_virtual": False, "vp_stage": stage}
    model = GPTModel(
        transformer,
        layer_spec(transformer),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.context_length,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=hf.tied,
        position_embedding_type="rope",
        rotary_base=hf.rope_theta,
        vp_stage=stage,
    )
    return model.to(transformer.params_dtype)  # torch's norms are born in float32
