"""Construction of one rank's part of megatron-core's GPTModel from a Hugging Face config."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron_patches import have_transformer_engine
from rlsys.config import Config
from rlsys.config.precision import trainer_fields
from rlsys.convert.carried import CheckpointCarried
from rlsys.convert.config import DeltaSizes, HFConfig, LatentAttention
from rlsys.convert.fit import stage_layers
from rlsys.convert.table import entries
from rlsys.core.errors import UserError
from rlsys.trainer.checkpoints import checkpoint
from rlsys.trainer.model.attention import PackedAttention, engine_attention, rotate_by_position
from rlsys.trainer.model.chunks import EXPERT_BIAS, MTP, Chunks
from rlsys.trainer.model.delta_net import ZeroCentredNorm, set_delta_net
from rlsys.trainer.model.experts import set_experts
from rlsys.trainer.model.mtp import MTPModel, mtp_spec
from rlsys.trainer.model.norms import set_heads_norms
from rlsys.trainer.model.output_layer import TrunkModel
from rlsys.trainer.model.topk_routing import set_topk_routing
from rlsys.trainer.model.weights import TE_NAMES, fill, load_hf, mark_shards


def uses_transformer_engine(config: Config, hf: HFConfig) -> bool:
    """Return whether the model uses Transformer Engine's layers.

    Adapters and gated delta nets need Megatron's own layers, because Transformer Engine fuses norms and experts.
    """
    return have_transformer_engine() and config.trainer.lora is None and hf.delta is None


def rotates_by_position(config: Config, hf: HFConfig) -> bool:
    """Return whether rotary embeddings need the tokens' positions in every micro-batch, not only with shared tokens.

    They do not need them under context parallelism, where Megatron computes positions, and with Transformer Engine,
    whose rotary kernel uses the sequence lengths.
    """
    return config.parallel.cp == 1 and not uses_transformer_engine(config, hf)


def _has_torch_grouped_gemm(config: Config) -> bool:
    """Return whether torch has a GPU kernel for experts in this precision (rlsys/ops/grouped_gemm.py).

    The kernel computes all experts in one launch; Transformer Engine's grouped linear layer launches one per expert.
    """
    is_bfloat16 = config.model.dtype == "bfloat16" and not config.model.fp8_trainer
    return is_bfloat16 and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def _fusions(config: Config, hf: HFConfig) -> dict[str, bool]:
    """Return the fields of TransformerConfig that enable the installed fusions of Transformer Engine and Apex."""
    engine = uses_transformer_engine(config, hf)
    rope = engine and rope_utils.fused_apply_rotary_pos_emb_thd is not None
    permutation = engine and getattr(moe_utils, "fused_permute", None) is not None
    apex = (
        torch.cuda.is_available() and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    )
    fusions = {
        # MTP layers share the head, and their gradient is clipped separately.
        "gradient_accumulation_fusion": (engine or apex) and not hf.mtp,
        # No kernel supports latent attention without yarn, or the factor of yarn.
        "apply_rope_fusion": rope and hf.latent is None and hf.rope.kind != "yarn",
    }
    return {**fusions, "moe_permute_fusion": permutation} if hf.experts else fusions


def _experts(hf: HFConfig, config: Config) -> dict[str, Any]:
    """Return the fields of TransformerConfig for experts; empty for a dense model."""
    if not hf.experts:
        return {}
    routing, t = hf.routing, config.trainer
    fields: dict[str, Any] = {
        "num_moe_experts": hf.experts,
        "moe_router_topk": hf.experts_per_token,
        "moe_ffn_hidden_size": hf.expert_ffn_size,
        "moe_router_score_function": routing.kind,
        "moe_router_load_balancing_type": "aux_loss" if t.balance_loss else "none",
        "moe_aux_loss_coeff": t.balance_loss,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": uses_transformer_engine(config, hf) and not _has_torch_grouped_gemm(config),
    }
    # Not for equal layers: with a list, checkpoints store each layer under a separate name.
    if not all(hf.moe_layers):
        fields["moe_layer_freq"] = [int(moe) for moe in hf.moe_layers]
    if hf.shared_ffn_size:
        fields["moe_shared_expert_intermediate_size"] = hf.shared_ffn_size
    if routing.scale != 1:
        fields["moe_router_topk_scaling_factor"] = routing.scale
    if routing.kind == "softmax":
        # A softmax over the selected experts equals a softmax over all that is normalised again (norm_topk_prob).
        return {**fields, "moe_router_pre_softmax": not routing.normalised}
    return {
        **fields,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": t.balance_rate,  # Megatron's default is not 0
    }


@dataclass
class YarnConfig(TransformerConfig):
    """TransformerConfig with the fields for yarn, which GPTModel 0.16.1 reads and TransformerConfig lacks."""

    yarn_rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool = True


def _yarn(hf: HFConfig) -> dict[str, Any]:
    """Return the fields that YarnConfig adds to TransformerConfig."""
    rope = hf.rope
    return {
        "yarn_rotary_scaling_factor": rope.factor,
        "yarn_original_max_position_embeddings": rope.original_context,
        "yarn_beta_fast": rope.beta_fast,
        "yarn_beta_slow": rope.beta_slow,
        "yarn_correction_range_round_to_int": rope.truncate,
    }


_ACTIVATIONS = {"silu": torch.nn.functional.silu, "quick_gelu": quick_gelu}


def _family_fields(hf: HFConfig) -> dict[str, Any]:
    """Return the fields of TransformerConfig that the model family defines, and those of windowed attention."""
    fields = dict(hf.megatron)
    if "activation_func" in fields:
        fields["activation_func"] = _ACTIVATIONS[fields["activation_func"]]
    if hf.window:
        fields["window_size"] = (hf.window - 1, 0)  # numbers of keys before and after the query's own
        fields["window_attn_skip_freq"] = [int(windowed) for windowed in hf.windowed_layers]
    return fields


def _recompute(config: Config) -> dict[str, Any]:
    """Return the fields of TransformerConfig for trainer.recompute."""
    modules = config.trainer.recompute
    if "layer" in modules:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)} if modules else {}


def _latent_attention(hf: HFConfig, latent: LatentAttention) -> dict[str, Any]:
    """Return the fields that MLATransformerConfig adds to TransformerConfig."""
    rope = hf.rope
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.rotary,
        "v_head_dim": latent.value,
        "rope_type": "yarn" if rope.kind == "yarn" else "rope",
        "rotary_base": rope.theta,
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_context,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }


def transformer_config(config: Config, hf: HFConfig) -> TransformerConfig:
    """Build Megatron's config. Every field of the architecture comes from config.json."""
    p = config.parallel
    *layers, last = stage_layers(hf.layers, p.pp)
    dtype = getattr(torch, config.model.dtype)
    fields = dict(
        num_layers=hf.layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.heads,
        num_query_groups=hf.kv_heads,
        kv_channels=hf.head_dim,
        ffn_hidden_size=hf.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.norm_eps,
        # False for norms over all heads: Megatron would sum the gradients of parameters with these names over ranks.
        qk_layernorm=hf.qk_norm or hf.latent is not None,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        num_layers_in_last_pipeline_stage=last if layers and last != layers[0] else None,
        # Between two stages, the default exchange silently confuses the two directions of interleaved chunks.
        overlap_p2p_comm=p.vpp > 1,
        batch_p2p_comm=p.vpp == 1,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=p.expert_tp,
        sequence_parallel=p.tp > 1,
        variable_seq_lengths=not config.equal_lengths,
        moe_token_dispatcher_type=p.dispatcher,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        calculate_per_token_loss=True,  # otherwise Megatron's DDP would divide gradients by dp
        deterministic_mode=not torch.cuda.is_available(),
        **_fusions(config, hf),
        **trainer_fields(config),
        **_experts(hf, config),
        **_recompute(config),
        **({"mtp_num_layers": hf.prediction_layers} if hf.mtp else {}),
    )
    if hf.latent is not None:
        return MLATransformerConfig(**(fields | _latent_attention(hf, hf.latent) | _family_fields(hf)))
    if hf.rope.kind == "yarn":
        return YarnConfig(**(fields | _yarn(hf) | _family_fields(hf)))
    return TransformerConfig(**(fields | _family_fields(hf)))


def block_spec(
    transformer: TransformerConfig, hf: HFConfig, stage: int | None, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """Return the spec of the layers of one virtual pipeline stage.

    Args:
        transformer: Megatron's config.
        hf: The model's configuration.
        stage: Index of the virtual pipeline stage; None without virtual stages (vpp = 1).
        transformer_engine: Whether to use Transformer Engine's layers; otherwise Megatron's local layers with
            PackedAttention.
    """
    spec = get_gpt_decoder_block_spec(
        transformer, transformer_engine, normalization="RMSNorm", vp_stage=stage
    )
    for layer in spec.layer_specs:
        if not transformer_engine:
            _set_local_attention(layer.submodules)
        elif transformer.softmax_type == "vanilla":  # sinks are parameters of Transformer Engine's attention
            layer.submodules.self_attention.submodules.core_attention = engine_attention()
        set_experts(layer.submodules)
        if hf.family.head_norms:
            set_heads_norms(layer.submodules, transformer)
    if hf.delta is not None:
        _set_delta_nets(spec, transformer, hf, hf.delta, stage)
    return spec


def _set_local_attention(layer: TransformerLayerSubmodules) -> None:
    """Use PackedAttention, and Transformer Engine's names in checkpoints, in the spec of a Megatron layer."""
    parts = layer.self_attention.submodules
    parts.core_attention = PackedAttention
    # Megatron's own table lacks latent attention, and also renames a norm before experts.
    layer.sharded_state_dict_keys_map = {
        plain.removesuffix("weight"): fused.removesuffix("weight")
        for plain, fused in TE_NAMES.items()
        if _has_module(layer, fused)
    }
    if isinstance(parts, MLASelfAttentionSubmodules):
        # Not sharded, as in Transformer Engine's spec. Megatron's local spec shards them, and silently loses the
        # other ranks' part of the gradient of the keys' rotary half.
        parts.linear_q_down_proj = parts.linear_kv_down_proj = Linear


def _set_delta_nets(
    spec: TransformerBlockSubmodules,
    transformer: TransformerConfig,
    hf: HFConfig,
    sizes: DeltaSizes,
    stage: int | None,
) -> None:
    """Use zero-centred norms in all layers of a spec, and gated delta nets in the linear layers of the model."""
    first = get_transformer_layer_offset(transformer, vp_stage=stage)
    # Copied, because some entries are the same object.
    spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]
    spec.layer_norm = ZeroCentredNorm
    for number, layer in enumerate(spec.layer_specs, first):
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCentredNorm
        if hf.linear_layers[number]:
            set_delta_net(parts, sizes)
            parts.sharded_state_dict_keys_map = {}  # a delta net has no linear_qkv to fuse a norm into
        else:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = ZeroCentredNorm


def _has_module(layer: TransformerLayerSubmodules, fused: str) -> bool:
    """Return whether the layer has the linear module into which Transformer Engine fuses a norm.

    `fused`: name of the norm's weight in Transformer Engine.
    """
    part, module, _ = fused.split(".")
    if part == "mlp":
        return layer.mlp.module is MLP
    return hasattr(layer.self_attention.submodules, module)


LoadWeights = Callable[[Chunks, Path, HFConfig], None]
"""(model, folder, model configuration): loads the folder's weights into this rank's part of the model. Collective."""


def load_model(chunks: Chunks, path: Path, hf: HFConfig) -> None:
    """Load the weights from a converted Megatron checkpoint or a Hugging Face folder. Collective.

    A converted checkpoint stores the MTP layers of its Hugging Face folder in a separate file.

    Raises:
        UserError: A tensor is missing or does not fit the model.
        RunError: A file of the checkpoint is missing or damaged.
    """
    if not checkpoint.is_checkpoint(path):
        load_hf(chunks, path, hf)
        return
    checkpoint.load_weights(path, chunks)
    if hf.mtp:
        table = [entry for entry in entries(hf) if entry.megatron.startswith(MTP)]
        carried = CheckpointCarried(path)
        if missing := {name for entry in table for name in entry.hf} - carried.names:
            raise UserError(
                f"{path}: {len(missing)} tensors of MTP layers are missing, first: {min(missing)}"
            )
        fill(chunks, hf, table, carried.read)


def build_layers(config: Config, hf: HFConfig, device: torch.device) -> Chunks:
    """Build this rank's part of the model on `device`, with uninitialised weights."""
    transformer = transformer_config(config, hf)
    vpp = config.parallel.vpp
    stages = range(vpp) if vpp > 1 else [None]
    engine = uses_transformer_engine(config, hf)
    return Chunks([chunk(transformer, hf, stage, engine).to(device) for stage in stages])


def build_model(config: Config, hf: HFConfig, device: torch.device, load: LoadWeights = load_model) -> Chunks:
    """Build this rank's part of the model on `device`, and load the weights in `config.model.path` with `load`.

    Collective.
    """
    chunks = build_layers(config, hf, device)
    load(chunks, config.model.path, hf)
    mark_shards(chunks, hf)
    for name, parameter in chunks.named_parameters():
        if ".experts." in name:
            # Gives the optimizer's buffers the same structure for any ep. Must precede the wrap in Megatron's DDP.
            parameter.allreduce = False  # type: ignore[attr-defined]
            # Megatron marks experts' biases as shared by tensor-parallel ranks and would sum their gradients, but
            # each rank has its own tokens or experts.
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
    return chunks


def chunk(
    transformer: TransformerConfig, hf: HFConfig, stage: int | None, transformer_engine: bool
) -> GPTModel:
    """Build the model chunk of one virtual pipeline stage on the default device, with uninitialised weights.

    Args:
        transformer: Megatron's config.
        hf: The model's configuration.
        stage: Index of the virtual pipeline stage; None without virtual stages (vpp = 1).
        transformer_engine: Whether to use Transformer Engine's layers; otherwise Megatron's local layers with
            PackedAttention.
    """
    stage_fields = {"ignore_virtual": False, "vp_stage": stage}
    layers = block_spec(transformer, hf, stage, transformer_engine)
    options: dict[str, Any] = {}
    if hf.mtp:
        options["mtp_block_spec"] = mtp_spec(transformer, layers, stage, transformer_engine)
    model = (MTPModel if hf.mtp else TrunkModel)(
        transformer,
        layers,
        vocab_size=hf.padded_vocab_size,
        max_sequence_length=hf.context_length,
        pre_process=parallel_state.is_pipeline_first_stage(**stage_fields),
        post_process=parallel_state.is_pipeline_last_stage(**stage_fields),
        parallel_output=True,
        share_embeddings_and_output_weights=hf.tied,
        position_embedding_type="yarn" if isinstance(transformer, YarnConfig) else "rope",
        rotary_base=hf.rope.theta,
        rotary_percent=hf.rope.share,
        rope_scaling=hf.rope.kind == "llama3",
        rope_scaling_factor=hf.rope.factor,
        vp_stage=stage,
        **options,
    )
    rotate_by_position(model)
    if model.pre_process:
        model.embedding.register_forward_hook(_contiguous_strides)
    for module in model.modules():
        if isinstance(module, TopKRouter):
            set_topk_routing(module, hf)
    model.to(transformer.params_dtype)  # torch creates norms in float32
    for name, buffer in model.named_buffers():
        if name.endswith(EXPERT_BIAS):
            buffer.data = buffer.float()  # as in Megatron: its rounding would change the selection of experts
    return model


def _contiguous_strides(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    """Return embeddings `[P, 1, H]`, which Megatron transposed from `[1, P, H]`, with contiguous strides.

    With the stride of the transposed axis of length 1, torch would multiply the embeddings with a frozen weight token
    by token (megatron_patches/frozen_weight_products.py).
    """
    return output.flatten(0, -2).view(output.shape)
