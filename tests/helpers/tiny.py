"""Tiny random models of all families, created by transformers. A new family is one entry of TINY.

tests/integration/test_families.py tests every family, and tests/unit/convert/test_convert.py tests the round trip of
its name table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256,
    "initializer_range": 0.2, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,  # transformers keeps the embedding of a padding token at 0, without a gradient
}  # fmt: skip
"""Sizes of all models. Sizes that tensor parallelism divides are multiples of 32, because engines pad others."""


@dataclass(frozen=True)
class Tiny:
    """A tiny model.

    Attributes:
        architecture: transformers' class.
        sizes: Fields of config.json in addition to BASE.
        served: Further fields that SGLang needs: those that transformers omits from config.json or derives.
        tower: Fields of the vision tower; empty: the model has none.
    """

    architecture: str
    sizes: dict[str, Any] = field(default_factory=dict)
    served: dict[str, Any] = field(default_factory=dict)
    tower: dict[str, Any] = field(default_factory=dict)


_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 8, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
_LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
_DEEPSEEK = {**_LATENT, **_ROUTED, "num_experts_per_tok": 4, "n_shared_experts": 2}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.8,
}  # fmt: skip
_V2_YARN = {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
_OSS_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
_TOWER = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4], "mrope_interleaved": True}
_V3_SERVED = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_V2_SERVED = {"moe_layer_freq": 1, "scoring_func": "softmax"}

TINY: dict[str, Tiny] = {
    "qwen2": Tiny("Qwen2ForCausalLM", served={"head_dim": 16}),
    "qwen3": Tiny("Qwen3ForCausalLM", served={"tie_word_embeddings": True}),
    "llama": Tiny("LlamaForCausalLM"),
    "qwen3-moe": Tiny("Qwen3MoeForCausalLM", {**_EXPERTS, "norm_topk_prob": True}),
    "mixtral": Tiny("MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2}, {"head_dim": 16}),
    "glm-4.5": Tiny(
        "Glm4MoeForCausalLM",
        {**_ROUTED, "num_experts_per_tok": 2, "n_shared_experts": 1, "attention_bias": True, "use_qk_norm": True,
         "routed_scaling_factor": 2.5},
    ),
    "deepseek-v3": Tiny(
        "DeepseekV3ForCausalLM", {**_DEEPSEEK, "n_group": 4, "topk_group": 2, "rope_parameters": _YARN}, _V3_SERVED
    ),
    "kimi-k2": Tiny(
        "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, **_ONE_GROUP, "routed_scaling_factor": 2.827,
         "rope_parameters": {**_YARN, "mscale_all_dim": 1.0, "rope_theta": 50000.0}},
        _V3_SERVED,
    ),
    "moonlight": Tiny(
        "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, **_ONE_GROUP, "q_lora_rank": None, "routed_scaling_factor": 2.446}, _V3_SERVED,
    ),
    "glm-4.7-flash": Tiny(
        # transformers uses eps 1e-6 in the norms of latent attention, regardless of rms_norm_eps
        "Glm4MoeLiteForCausalLM", {**_DEEPSEEK, **_ONE_GROUP, "rms_norm_eps": 1e-6}, {"first_k_dense_replace": 1}
    ),
    "deepseek-v2": Tiny(
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
         "routed_scaling_factor": 4.0, "norm_topk_prob": False, "rope_parameters": _V2_YARN},
        _V2_SERVED,
    ),
    "deepseek-v2-lite": Tiny(
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, **_ONE_GROUP, "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0,
         "norm_topk_prob": False},
        _V2_SERVED,
    ),
    "gpt-oss": Tiny(
        "GptOssForCausalLM",
        # With weights of 0.2 it amplifies rounding errors, up to 6e-5 of the second gradient norm with cp=2.
        {"initializer_range": 0.1,
         "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16, "intermediate_size": 32,
         "rope_parameters": _OSS_YARN},
    ),
    "qwen2-moe": Tiny(
        "Qwen2MoeForCausalLM",
        {**_EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 64, "head_dim": 16},
    ),
    "hy-v3": Tiny(
        "HYV3ForCausalLM", {**_EXPERTS, "num_shared_experts": 1},
        {"route_norm": True, "first_k_dense_replace": 1, "qk_norm": True, "moe_router_use_sigmoid": True,
         "moe_router_enable_expert_bias": True, "expert_hidden_dim": 32},
    ),
    "minimax-m2": Tiny(
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16, "rotary_dim": 8},
        {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "olmoe": Tiny(
        "OlmoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "norm_topk_prob": False,
         "head_dim": 16, "num_key_value_heads": 4},  # SGLang supports no grouped-query attention in OLMoE
    ),
    "ernie-4.5": Tiny(
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2, "head_dim": 16},
    ),
    "qwen3-next": Tiny(
        "Qwen3NextForCausalLM",
        # With weights of 0.2, transformers' results in float32 and float64 differ by 1.3e-5.
        {**_EXPERTS, "norm_topk_prob": True, "shared_expert_intermediate_size": 64, "head_dim": 32,
         "initializer_range": 0.1, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "layer_types": ["linear_attention", "full_attention"] * 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
        {"full_attention_interval": 2},
    ),
    "qwen3-vl-moe": Tiny(
        # transformers recognises a transposed tensor by its shape, so tensors of experts must not be square
        "Qwen3VLMoeForConditionalGeneration",
        {**_EXPERTS, "moe_intermediate_size": 128, "rope_parameters": _AXES}, {"norm_topk_prob": True}, _TOWER,
    ),
}  # fmt: skip


def of_architecture(architecture: str) -> Tiny:
    """Return the first tiny model of an architecture."""
    return next(tiny for tiny in TINY.values() if tiny.architecture == architecture)


def raw_config(tiny: Tiny) -> dict[str, Any]:
    """Return the fields of config.json, without those that transformers adds."""
    kinds = ["sliding_attention", "full_attention"] * 2  # required by gpt-oss
    fields = {**BASE, **tiny.sizes, **tiny.served}
    architectures = {"architectures": [tiny.architecture]}
    if tiny.tower:
        return {**architectures, "text_config": fields, "vision_config": tiny.tower}
    return {**architectures, "layer_types": kinds, **fields}


def load(folder: Path) -> Any:
    """Load the transformers model of a folder, in float32."""
    import transformers

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    kind = getattr(transformers, architecture)
    return kind.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


def write(folder: Path, tiny: Tiny, *, mtp: bool = False, **changes: Any) -> Path:
    """Write a random model in float32.

    Norms and biases are random too, because ones and zeros, the initial values of transformers, hide errors.

    Args:
        folder: The model folder to write.
        tiny: The model.
        mtp: Add a layer for multi-token prediction, which transformers does not support.
        changes: Further fields of config.json.
    """
    from rlsys.engine.cpu.platform import declare_torchvision_ops

    declare_torchvision_ops()
    import transformers

    config_class = getattr(transformers, tiny.architecture.partition("For")[0] + "Config")
    fields = {**BASE, **tiny.sizes, **changes}
    if tiny.tower:
        fields = {"text_config": fields, "vision_config": tiny.tower}
    torch.manual_seed(0)
    model = getattr(transformers, tiny.architecture)(config_class(**fields))
    for name, weight in model.state_dict().items():
        if "norm" in name or name.endswith("bias"):
            weight.add_(torch.randn_like(weight) * 0.1)
        # Ernie's router starts at zero, which would route every token to the same experts.
        if name.endswith("gate.weight") and not weight.any():
            weight.normal_(0.0, BASE["initializer_range"])
        if name.endswith("sinks"):  # engines store sinks in bfloat16
            weight.copy_(weight.bfloat16())
    save(model, folder)
    if mtp:
        _add_prediction(folder)
    return folder


def save(model: Any, folder: Path) -> Path:
    """Save a model in the published form. transformers transposes experts only in models that it loaded."""
    model.save_pretrained(folder)
    if hasattr(model.config, "vision_config"):
        _transpose_experts(folder / "model.safetensors")
    return folder


def _transpose_experts(file: Path) -> None:
    tensors = load_file(file)
    transposed = {name: t.transpose(1, 2).contiguous() for name, t in tensors.items() if ".experts." in name}
    save_file(tensors | transposed, file, metadata={"format": "pt"})


def _add_prediction(folder: Path) -> None:
    """Add a layer for multi-token prediction in the published form: separate experts, copied embedding and head."""
    from rlsys.convert.config import HFConfig
    from rlsys.convert.table import entries, shared_names

    raw = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(raw))
    hf = HFConfig.read(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    base_names = {name for entry in entries(hf) for name in entry.hf}
    for entry in entries(replace(hf, mtp=True)):
        for name, shape in entry.hf.items():
            if name not in base_names:
                std, mean = (0.1, 1.0) if "norm" in name else (0.2, 0.0)
                tensors[name] = torch.randn(shape, generator=generator) * std + mean
    tensors |= {copy: tensors[shared].clone() for copy, shared in shared_names(hf).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
