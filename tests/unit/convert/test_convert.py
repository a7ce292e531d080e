"""The name table, both directions, on tiny random models; folders that do not fit are refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlsys.config import Config
from rlsys.convert import hf as hf_module
from rlsys.convert.carried import save_carried, with_carried
from rlsys.convert.config import DeltaSizes, HFConfig, Routing
from rlsys.convert.families import FAMILIES
from rlsys.convert.fit import check_layout, check_requirements
from rlsys.convert.flops import crossover_length
from rlsys.convert.hf import HFTensors, write_hf
from rlsys.convert.layout import to_hf, to_megatron
from rlsys.convert.rope import Rope
from rlsys.convert.table import carried_names, check_names, entries
from rlsys.convert.torch_dist import Box, DistWriter
from rlsys.core.errors import UserError
from tests.helpers import tiny


def raw_config(architecture: str = "Qwen3MoeForCausalLM", **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        **({} if "n_routed_experts" in changes else {"num_experts": 3}),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        **changes,
    }


DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "q_lora_rank": 5, "kv_lora_rank": 7, "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2, "v_head_dim": 4, "num_hidden_layers": 3,
}  # fmt: skip
GLM = {
    "n_routed_experts": 4, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
GPT_OSS = {
    "num_local_experts": 3, "attention_bias": True, "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
OF_FAMILY: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 3},
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "Glm4MoeForCausalLM": GLM,
}


def config_of(**changes: Any) -> HFConfig:
    family_fields = OF_FAMILY.get(changes.get("architecture", ""), {})
    return HFConfig.of(raw_config(**{**family_fields, **changes}), "config.json")


def random_tensors(config: HFConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: shape for entry in entries(config) for name, shape in entry.hf.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw_config()))
    (path / "tokenizer.json").write_text("{}")
    save_file(random_tensors(config_of()), path / "model.safetensors")
    return path


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_every_family_has_a_tiny_model() -> None:
    assert {model.architecture for model in tiny.TINY.values()} == FAMILIES.keys()


@pytest.mark.parametrize("family", tiny.TINY)
def test_round_trip_is_bit_equal(family: str) -> None:
    config = HFConfig.of(tiny.raw_config(tiny.TINY[family]), "config.json")
    tensors = random_tensors(config)
    back: dict[str, Tensor] = {}
    for entry in entries(config):
        combined = to_megatron(entry.rule, [tensors[name] for name in entry.hf], config)
        back.update(zip(entry.hf, to_hf(entry.rule, combined, config), strict=True))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def names_of(config: HFConfig) -> set[str]:
    return {name for entry in entries(config) for name in entry.hf}


def test_config_features_determine_the_tensors_of_a_model() -> None:
    glm = config_of(architecture="Glm4MoeForCausalLM")
    bare = config_of(architecture="Glm4MoeForCausalLM", use_qk_norm=False, attention_bias=False)
    lost = {n.split(".")[-2] + "." + n.split(".")[-1] for n in names_of(glm) - names_of(bare)}
    assert lost == {"q_norm.weight", "k_norm.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias"}
    full = config_of(architecture="DeepseekV3ForCausalLM", q_lora_rank=None)
    assert {n for n in names_of(full) if ".0.self_attn.q" in n} == {"model.layers.0.self_attn.q_proj.weight"}


def test_dense_layers_may_precede_or_alternate_with_moe_layers() -> None:
    assert config_of(architecture="DeepseekV3ForCausalLM").moe_layers == (False, True, True)
    assert config_of(num_hidden_layers=4, decoder_sparse_step=2).moe_layers == (False, True, False, True)
    mixed = config_of(num_hidden_layers=3, mlp_only_layers=[1])
    assert mixed.moe_layers == (True, False, True)
    assert "model.layers.1.mlp.up_proj.weight" in names_of(mixed)


def test_deepseek_shapes_follow_its_ranks_and_head_sizes() -> None:
    shapes = {n: s for e in entries(config_of(architecture="DeepseekV3ForCausalLM")) for n, s in e.hf.items()}
    prefix = "model.layers.1."
    assert shapes[prefix + "self_attn.q_a_proj.weight"] == (5, 16)
    assert shapes[prefix + "self_attn.q_b_proj.weight"] == (4 * (3 + 2), 5)
    assert shapes[prefix + "self_attn.kv_a_proj_with_mqa.weight"] == (7 + 2, 16)
    assert shapes[prefix + "self_attn.kv_b_proj.weight"] == (4 * (3 + 4), 7)
    assert shapes[prefix + "self_attn.o_proj.weight"] == (16, 4 * 4)
    assert shapes[prefix + "mlp.shared_experts.up_proj.weight"] == (2 * 10, 16)
    assert shapes[prefix + "mlp.gate.e_score_correction_bias"] == (4,)


def test_multi_token_prediction_layers_are_not_in_the_name_table() -> None:
    config = config_of(architecture="DeepseekV3ForCausalLM", num_nextn_predict_layers=1)
    names = frozenset(names_of(config))
    check_names(config, names | {"model.layers.3.eh_proj.weight"}, "here")
    with pytest.raises(UserError, match=r"not belong to the model, first: model\.layers\.4\.eh_proj"):
        check_names(config, names | {"model.layers.4.eh_proj.weight"}, "here")


def test_multi_token_prediction_tensors_are_carried_from_folders_and_checkpoints(tmp_path: Path) -> None:
    """In files of bounded size."""
    raw = raw_config("DeepseekV3ForCausalLM", **DEEPSEEK, num_nextn_predict_layers=1)
    config = HFConfig.of(raw, "config.json")
    extra_tensors = {
        f"model.layers.3.{name}.weight": torch.randn(16) for name in ("enorm", "hnorm", "eh_proj")
    }
    folder, checkpoint = tmp_path / "folder", tmp_path / "checkpoint"
    for path in (folder, checkpoint):
        path.mkdir()
    save_file(random_tensors(config) | extra_tensors, folder / "model.safetensors")
    save_carried(checkpoint, HFTensors(folder, config), max_file_bytes=100)
    assert len(list(checkpoint.iterdir())) == 2
    for source in (folder, checkpoint):
        carried_tensors = dict(with_carried([], source, config))
        assert carried_tensors.keys() == extra_tensors.keys()
        assert all(torch.equal(carried_tensors[name], tensor) for name, tensor in extra_tensors.items())


VISION: dict[str, Any] = {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}


def test_language_model_tensors_keep_their_names_and_vision_tensors_are_carried() -> None:
    """Whether embeddings are tied is the whole model's to say."""
    text = {**raw_config(), "tie_word_embeddings": True}
    config = HFConfig.of({**VISION, "text_config": text}, "config.json")
    assert (config.tied, config.hidden_size, config.routing.normalised) == (False, 16, True)
    names = frozenset(names_of(config))
    assert {"model.language_model.embed_tokens.weight", "lm_head.weight"} < names
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in names)
    assert carried_names(config, names | {"model.visual.merger.norm.bias"}) == {
        "model.visual.merger.norm.bias"
    }
    check_names(config, names | {"model.visual.merger.norm.bias"}, "here")
    with pytest.raises(UserError, match=r"not belong to the model, first: model\.audio\.conv\.weight"):
        check_names(config, names | {"model.audio.conv.weight"}, "here")
    with pytest.raises(UserError, match=r"config\.json: text_config = None: expected an object"):
        HFConfig.of(VISION, "config.json")


def test_queries_keys_and_values_are_interleaved_by_group() -> None:
    """Two groups of two queries, head size 1, hidden 1: [q0 q1 k0 v0 | q2 q3 k1 v1]."""
    config = config_of(num_attention_heads=4, num_key_value_heads=2, head_dim=1, hidden_size=1)
    rule = next(e.rule for e in entries(config) if e.rule.layout == "qkv")
    parts = [torch.tensor(x)[:, None] for x in ([0.0, 1.0, 2.0, 3.0], [10.0, 11.0], [20.0, 21.0])]
    assert to_megatron(rule, parts, config).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


NEXT = HFConfig.of(tiny.raw_config(tiny.TINY["qwen3-next"]), "config.json")


def test_megatron_orders_gates_after_the_queries_of_a_group() -> None:
    """Two groups of two queries. A folder has [query, gate] head by head, megatron all queries of a group first."""
    config = replace(NEXT, heads=4, kv_heads=2, head_dim=1)
    rule = next(e.rule for e in entries(NEXT) if e.rule.layout == "gated_qkv")
    queries = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5])[:, None]
    parts = [queries, *(torch.tensor(x)[:, None] for x in ([10.0, 11.0], [20.0, 21.0]))]
    assert to_megatron(rule, parts, config).flatten().tolist() == [
        0,
        1,
        0.5,
        1.5,
        10,
        20,
        2,
        3,
        2.5,
        3.5,
        11,
        21,
    ]


def test_megatron_orders_convolution_channels_by_key_head() -> None:
    config = replace(NEXT, delta=DeltaSizes(key_heads=2, value_heads=4, key_size=1, value_size=1, width=4))
    rule = next(e.rule for e in entries(NEXT) if e.rule.layout == "by_key_head")
    channels = torch.tensor([0.0, 1.0, 10.0, 11.0, 20.0, 21.0, 22.0, 23.0])[
        :, None, None
    ]  # queries, keys, values
    assert to_megatron(rule, [channels], config).flatten().tolist() == [0, 10, 20, 21, 1, 11, 22, 23]


def test_layer_types_or_the_interval_determine_gated_delta_net_layers() -> None:
    raw = tiny.raw_config(tiny.TINY["qwen3-next"])
    assert NEXT.linear_layers == (True, False, True, False)
    del raw["layer_types"]
    published = HFConfig.of({**raw, "full_attention_interval": 4}, "config.json")
    assert published.linear_layers == (True, True, True, False)
    assert "model.layers.2.linear_attn.A_log" in names_of(published)
    with pytest.raises(
        UserError, match="linear_num_value_heads = 3: expected a multiple of linear_num_key_heads = 2"
    ):
        HFConfig.of({**raw, "linear_num_value_heads": 3}, "config.json")


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"parallel": {"cp": 2}}, r"parallel\.cp = 2: expected 1, because .* has gated delta nets"),
        ({"parallel": {"tp": 4}}, r"parallel\.tp = 4 does not divide key heads of the gated delta net = 2"),
        (
            {"trainer": {"optimizer": "muon"}},
            r"trainer\.optimizer = muon: expected adamw, because Muon is untested with gated delta nets",
        ),
        (
            {"trainer": {"lora": {"rank": 4}}},
            r"trainer\.lora: adapters are untested with the gated delta net",
        ),
    ],
)
def test_untested_settings_with_a_gated_delta_net_are_refused(section: dict[str, Any], told: str) -> None:
    config = Config.model_validate({"model": {"path": "next"}, **section})
    with pytest.raises(UserError, match=told):
        check_layout(config, replace(NEXT, kv_heads=4))
        check_requirements(config, NEXT)


def test_fp8_was_never_tried_with_it_either() -> None:
    config = Config.model_validate({"model": {"path": "next"}})
    in_fp8 = config.model.model_copy(update={"fp8": "rollout"})
    with pytest.raises(UserError, match=r"model\.fp8 = rollout: expected none, because FP8 is untested"):
        check_requirements(config.model_copy(update={"model": in_fp8}), NEXT)


def test_gate_precedes_up_in_the_fused_weight() -> None:
    config = config_of()
    rule = next(e.rule for e in entries(config) if e.rule.layout == "gate_up")
    combined = to_megatron(rule, [torch.zeros(10, 16), torch.ones(10, 16)], config)
    assert combined.shape == (20, 16)
    assert combined[:10].sum() == 0


def test_entries_cover_a_whole_model_in_layer_order() -> None:
    config = config_of()
    weight_entries = list(entries(config))
    per_layer = 4 + 2 + 1 + 2 * config.experts  # attention, q and k norm, router, experts
    assert len(weight_entries) == 3 + config.layers * per_layer
    assert len({(e.megatron, e.expert) for e in weight_entries}) == len(weight_entries)
    layers = [int(e.megatron.split(".")[2]) for e in weight_entries if e.rule.per_layer]
    assert layers == sorted(layers)
    assert list(weight_entries[0].hf) == ["model.embed_tokens.weight"]
    assert list(weight_entries[-1].hf) == ["lm_head.weight"]


def test_tied_embeddings_have_no_head_and_ignore_a_stored_one() -> None:
    config = config_of(tie_word_embeddings=True)
    names = {n for e in entries(config) for n in e.hf}
    assert "lm_head.weight" not in names
    check_names(config, frozenset(names | {"lm_head.weight"}), "here")


def test_absent_fields_take_the_defaults_of_the_family() -> None:
    raw = raw_config()
    for name in ("norm_topk_prob", "head_dim", "tie_word_embeddings"):
        del raw[name]
    config = HFConfig.of(raw, "config.json")
    assert (config.routing.normalised, config.head_dim, config.tied) == (False, 4, False)


def test_newer_spellings_of_the_config_are_read() -> None:
    raw = raw_config(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, num_local_experts=3)
    del raw["num_experts"]
    del raw["rope_theta"]
    config = HFConfig.of(raw, "config.json")
    assert (config.experts, config.rope.theta) == (3, 500.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT9"]},
            "architecture 'GPT9' is unknown; expected one of DeepseekV3ForCausalLM",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "rope type = 'yarn' is not supported; expected 'default'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; expected 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported; expected False"),
        ({"attention_bias": True}, "attention_bias = True is not supported; expected False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported; expected 1.0"),
        (
            {"architectures": ["LlamaForCausalLM"], "mlp_bias": True},
            "mlp_bias = True is not supported; expected False",
        ),
        (
            {
                "architectures": ["LlamaForCausalLM"],
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 2.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            "rope high_freq_factor = 2.0 is not supported; expected 4.0",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "sliding_window": 4096},
            "sliding_window = 4096 is not supported; expected None",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "the weights are quantised (fp8); expected bfloat16 or float32, fp8 with",
        ),
        (
            {"compression_config": {"quant_method": "compressed-tensors"}},
            "the weights are quantised (compressed-tensors); expected bfloat16 or float32, fp8 with",
        ),
        (
            {"architectures": ["DeepseekV4ForCausalLM"]},
            "architecture 'DeepseekV4ForCausalLM' is not supported: megatron-core 0.16.1 does not have its layers",
        ),
        (
            {"architectures": ["Qwen3MoEForCausalLM"]},
            "did you mean Qwen3MoeForCausalLM?",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], **GPT_OSS, "layer_types": ["full_attention"]},
            "layer_types = ['full_attention']: expected a list of 2 entries, one per layer: 'full_attention' or ",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], **GPT_OSS, "sliding_window": None},
            "sliding_window = None: expected a number of tokens above 0",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], **GPT_OSS, "swiglu_alpha": 1.5},
            "swiglu_alpha = 1.5 is not supported; expected 1.702",
        ),
        (
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                **DEEPSEEK,
                "num_experts": None,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 2.0, "zoom": 1},
            },
            "rope attention_factor = 2.0 is not supported with 'yarn'",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: expected a finite number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06: expected a number above 0"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta = inf: expected a finite number"),
        ({"num_hidden_layers": [3]}, "num_hidden_layers = [3]: expected a whole number from 1 to 10000"),
        ({"num_attention_heads": True}, "num_attention_heads = True: expected a whole number"),
        ({"vocab_size": 32.5}, "vocab_size = 32.5: expected a whole number"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures = 'Qwen3ForCausalLM': expected a list"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 99},
            "num_experts_per_tok = 99: expected at most num_experts = 3",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 10**9, "num_experts": 10**9},
            "num_experts = 1000000000: expected at most 1000000 in all",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "mlp_only_layers": 5},
            "mlp_only_layers = 5: expected a list of layers",
        ),
        (
            {"text_config": {}},
            "text_config = {}: expected null or no field, because Qwen3MoeForCausalLM has no such part",
        ),
        (
            {"text_config": {"vocab_size": 7}},
            "text_config = {'vocab_size': 7}: expected null or no field",
        ),
        ({"text_config": "qwen"}, "text_config = 'qwen': expected null or no field"),
        (
            {"llm_config": {"hidden_size": 8}},
            "llm_config = {'hidden_size': 8}: expected null or no field",
        ),
    ],
)
def test_configs_that_would_compute_something_else_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        HFConfig.of({**raw_config(), **changes}, "config.json")


def test_a_part_that_is_null_is_no_part() -> None:
    assert HFConfig.of({**raw_config(), "text_config": None}, "") == HFConfig.of(raw_config(), "")


def test_a_missing_config_field_is_named() -> None:
    raw = raw_config()
    del raw["vocab_size"]
    with pytest.raises(UserError, match=r"config\.json: field 'vocab_size' is missing"):
        HFConfig.of(raw, "config.json")


def test_an_unreadable_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: cannot be read: No such file"):
        HFConfig.read(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"config\.json: not readable as JSON"):
        HFConfig.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not readable as JSON"):
        HFConfig.read(tmp_path)


def check(folder: Path) -> None:
    """What loading does before and while it reads."""
    config = HFConfig.read(folder)
    tensors = HFTensors(folder, config)
    for entry in entries(config):
        for name, shape in entry.hf.items():
            assert tensors.read(name).shape == shape


Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q0), f"1 tensor\\(s\\) are missing, first: {Q0}"),
        (
            lambda t: t.update(extra=torch.zeros(1)),
            "1 tensor\\(s\\) do not belong to the model, first: extra",
        ),
        (
            lambda t: t.update({Q0: torch.zeros(24, 15)}),
            rf"{Q0} has shape \(24, 15\); expected \(24, 16\)",
        ),
    ],
)
def test_every_tensor_is_accounted_for(folder: Path, change: Callable[[Any], object], message: str) -> None:
    check(folder)
    change_tensors(folder, change)
    with pytest.raises(UserError, match=message):
        check(folder)


def test_a_padded_vocabulary_is_noticed(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"lm_head.weight": torch.zeros(32, 16)}))
    with pytest.raises(UserError, match=r"lm_head.weight has shape \(32, 16\); expected \(24, 16\)"):
        check(folder)


def test_a_cut_file_and_an_empty_folder_are_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model\.safetensors: not a whole safetensors file"):
        check(folder)
    file.unlink()
    with pytest.raises(UserError, match=r"contains no \*\.safetensors"):
        check(folder)


def fuse(tensors: dict[str, Tensor]) -> None:
    """Per-expert tensors -> one tensor a layer, as newer transformers hold them."""
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{e}.{x}_proj.weight") for e in range(3)])
            for x in ("gate", "up", "down")
        )
        tensors[prefix + "gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[prefix + "down_proj"] = down


def test_fused_experts_are_read_under_their_own_names(folder: Path) -> None:
    plain = load_file(folder / "model.safetensors")
    change_tensors(folder, fuse)
    check(folder)
    config = HFConfig.read(folder)
    tensors = HFTensors(folder, config)
    for entry in entries(config):
        for name in entry.hf:
            assert torch.equal(tensors.read(name), plain[name])


def test_fused_experts_of_another_number_are_refused(folder: Path) -> None:
    change_tensors(folder, fuse)
    (folder / "config.json").write_text(json.dumps(raw_config(num_experts=4)))
    with pytest.raises(UserError, match=r"down_proj contains 3 experts; expected 4"):
        check(folder)


def test_a_written_folder_is_whole_and_reads_back(folder: Path, tmp_path: Path) -> None:
    tensors = {k: v.to(torch.bfloat16) for k, v in load_file(folder / "model.safetensors").items()}
    out = tmp_path / "out"
    write_hf(out, folder, tensors.items())
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    check(out)
    back = load_file(out / "model.safetensors")
    assert all(torch.equal(back[k], tensors[k]) for k in tensors)


def test_write_hf_copies_all_files_except_weights(folder: Path, tmp_path: Path) -> None:
    """What config.json and tokenizer_config.json may name: code, vocabularies, templates, and files unknown today."""
    travel = [
        "LICENSE", "README.md", "added_tokens.json", "additional_chat_templates/rag.jinja", "chat_template.json",
        "configuration_deepseek.py", "encoding_k3.py", "generation_config.json", "merges.txt", "modeling_deepseek.py",
        "preprocessor_config.json", "qwen.tiktoken", "special_tokens_map.json", "spiece.model", "tekken.json",
        "tiktoken.model", "tokenization_kimi.py", "tokenizer.model", "tool_declaration_ts.py", "vocab.json",
    ]  # fmt: skip
    stay = [
        ".cache/huggingface/x.metadata", ".gitattributes", "hf_quant_config.json", "model.safetensors.index.json",
        "model-00001-of-00001.gguf", "onnx/model.onnx", "original/consolidated.00.pth", "original/params.json",
        "pytorch_model.bin", "pytorch_model.bin.index.json", "checkpoint-5/trainer_state.json",
        "checkpoint-5/optimizer.pt",
    ]  # fmt: skip
    for name in (*travel, *stay):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")
    tensors = load_file(folder / "model.safetensors")
    out = tmp_path / "out"
    write_hf(out, folder, tensors.items())
    copied = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert copied == {*travel, "config.json", "model.safetensors", "tokenizer.json"}
    assert all((out / name).read_text() == f"{name}\n" for name in travel)


def test_large_models_are_written_in_several_files_with_an_index(folder: Path, tmp_path: Path) -> None:
    tensors, out = load_file(folder / "model.safetensors"), tmp_path / "out"
    write_hf(out, folder, tensors.items(), max_file_bytes=4000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(t.nbytes for t in load_file(f).values()) <= 4000 for f in files)
    index = json.loads((out / hf_module.INDEX).read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    check(out)


def test_a_failed_write_keeps_the_old_folder(folder: Path, tmp_path: Path) -> None:
    def dying() -> Any:
        yield "a", torch.zeros(2)
        raise RuntimeError("killed")

    out = tmp_path / "out"
    write_hf(out, folder, [("old", torch.ones(1))])
    with pytest.raises(RuntimeError, match="killed"):
        write_hf(out, folder, dying())
    assert list(load_file(out / "model.safetensors")) == ["old"]


def test_written_tensors_are_copies(folder: Path, tmp_path: Path) -> None:
    """Views of parameters come one after the other; an update in between must not reach the file."""
    parameter = torch.zeros(4, 4)

    def tensors() -> Any:
        yield "first", parameter[:2]
        parameter.add_(1)
        yield "second", parameter.t()

    write_hf(tmp_path / "out", folder, tensors())
    back = load_file(tmp_path / "out/model.safetensors")
    assert back["first"].sum() == 0
    assert back["second"].sum() == 16


def test_attention_costs_as_much_as_all_matrices_at_the_crossover() -> None:
    """Counted by hand. A forward pass: 2 FLOPs a parameter visited; queries times keys and scores times values, half
    of them masked."""
    hf = HFConfig.of(raw_config(num_hidden_layers=1), "config.json")
    attention = 16 * 6 * (4 + 2 + 2) + 4 * 6 * 16
    router, chosen, norms, head = 16 * 3, 2 * 3 * 16 * 10, 3 * 16 + 2 * 6, 24 * 16
    n = crossover_length(hf)
    assert 2 * (attention + router + chosen + norms + head) * n == pytest.approx(4 * (6 + 6) * n * n)
    tied = HFConfig.of(raw_config(num_hidden_layers=1, tie_word_embeddings=True), "config.json")
    assert crossover_length(tied) == pytest.approx(n)


SIZES = {
    "vocab_size": 24, "hidden_size": 512, "intermediate_size": 20, "num_hidden_layers": 6, "num_attention_heads": 4,
    "max_position_embeddings": 64, "num_key_value_heads": 4,
}  # fmt: skip
SHARED = {"head_dim": 128, "norm_eps": 1e-6, "tied": False, "qk_norm": False, "qkv_bias": False}
EXPERTS = {"num_experts_per_tok": 8, "moe_intermediate_size": 10}
LATENT = {"kv_lora_rank": 7, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}


@pytest.mark.parametrize(
    ("architecture", "given", "meant"),
    [
        (
            "Qwen3MoeForCausalLM",
            {"num_experts": 16, **EXPERTS},
            {"qk_norm": True, "rope": Rope(10000.0), "routing": Routing("softmax", normalised=False)},
        ),
        ("Qwen3ForCausalLM", {"hidden_size": 64}, {"qk_norm": True, "rope": Rope(10000.0)}),  # not 64 / 4
        ("Qwen2ForCausalLM", {}, {"qkv_bias": True, "rope": Rope(10000.0)}),
        ("LlamaForCausalLM", {}, {"rope": Rope(10000.0)}),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 16, **EXPERTS},
            {"norm_eps": 1e-5, "rope": Rope(1e6), "routing": Routing("softmax"), "expert_ffn_size": 20},
        ),
        (
            "DeepseekV3ForCausalLM",
            {"n_routed_experts": 64, **EXPERTS, **LATENT},
            {
                "routing": Routing("sigmoid", True, groups=8, top_groups=4, scale=2.5, biased=True),
                "moe_layers": (False,) * 3 + (True,) * 3,
                "shared_ffn_size": 10,
            },
        ),
        (
            "Glm4MoeForCausalLM",
            {"n_routed_experts": 16, **EXPERTS},
            {
                "norm_eps": 1e-5,
                "routing": Routing("sigmoid", biased=True),
                "moe_layers": (False,) + (True,) * 5,
                "rope": Rope(10000.0, 0.5),
                "shared_ffn_size": 10,
            },
        ),
    ],
)
def test_absent_config_fields_take_the_defaults_of_transformers(
    architecture: str, given: dict[str, Any], meant: dict[str, Any]
) -> None:
    """The defaults of the configuration classes in transformers 5.19."""
    config = HFConfig.of({"architectures": [architecture], **SIZES, **given}, "config.json")
    assert {name: getattr(config, name) for name in (SHARED | meant)} == {**SHARED, **meant}


def test_a_checkpoint_file_is_whole_when_its_writer_ends(tmp_path: Path) -> None:
    with DistWriter(tmp_path) as writer:
        writer.write(0, "weight", (2, 3), Box((0, 0), (2, 3)), torch.ones(2, 3))
    assert len((tmp_path / "__0_0.distcp").read_bytes()) > 24, "nothing of it waits in memory"
