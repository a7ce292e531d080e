"""model.fp8: who gets which setting, what is refused, and what a push makes of the weights. No GPU is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlsys.config import Config, ConfigError, load_config, precision
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_fp8
from rlsys.convert.table import entries
from rlsys.core.errors import UserError
from rlsys.engine import launch_args
from rlsys.router.attest import Bounds
from rlsys.weights.fp8 import dequantise, quantise, quantise_for_engines

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "configs/models"
LARGEST = 448.0


def config(fp8: str, model: str = "Qwen3-30B-A3B", **sections: object) -> Config:
    path = {"path": MODELS / model, "dtype": "bfloat16", "fp8": fp8}
    return Config.model_validate({"model": path, **sections})


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


# Settings


@pytest.mark.parametrize("fp8", ["rollout", "both"])
def test_an_engine_in_fp8_waits_for_the_first_push(monkeypatch: pytest.MonkeyPatch, fp8: str) -> None:
    monkeypatch.setattr(launch_args, "have_cuda", lambda: True)
    argv, _ = launch_args.engine_command(config(fp8), 0, 3100)
    assert option(argv, "--quantization") == "fp8"
    assert option(argv, "--load-format") == "dummy"
    assert option(argv, "--dtype") == "bfloat16"
    quantization = json.loads(option(argv, "--json-model-override-args"))["quantization_config"]
    assert (quantization["quant_method"], quantization["weight_block_size"]) == ("fp8", [128, 128])
    plain, _ = launch_args.engine_command(config("none"), 0, 3100)
    assert "--quantization" not in plain and "--load-format" not in plain


def test_the_trainers_gemms_only_with_both() -> None:
    assert precision.trainer_fields(config("rollout")) == {}
    for fp8 in ("both", "trainer"):
        assert precision.trainer_fields(config(fp8)) == {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    hybrid = {"path": MODELS / "Qwen3-30B-A3B", "dtype": "bfloat16", "fp8": "both", "fp8_format": "hybrid"}
    assert precision.trainer_fields(Config.model_validate({"model": hybrid}))["fp8"] == "hybrid"
    with pytest.raises(ValueError, match="fp8_format = hybrid"):
        Config.model_validate({"model": hybrid | {"fp8": "rollout"}})
    parallel = {"tp": 2}
    assert precision.token_multiple(config("rollout", parallel=parallel)) == 2
    assert precision.token_multiple(config("both", parallel=parallel)) == 32


def test_fp8_in_the_trainer_only_keeps_engines_and_pushes_in_bfloat16() -> None:
    argv, _ = launch_args.engine_command(config("trainer"), 0, 3100)
    assert "--quantization" not in argv and option(argv, "--dtype") == "bfloat16"
    name, tensor = "model.layers.0.self_attn.q_proj.weight", torch.randn(128, 128, dtype=torch.bfloat16)
    assert list(quantise_for_engines(config("trainer"), [(name, tensor)])) == [(name, tensor)]
    assert Bounds.of(config("trainer")).mean > Bounds.of(config("none")).mean
    with pytest.raises(UserError, match=r"model\.fp8 = trainer needs Transformer Engine"):
        precision.check_device(config("trainer"), (9, 0), transformer_engine=False)


def test_bounds_of_a_push_are_wider() -> None:
    assert Bounds.of(config("rollout")).mean > Bounds.of(config("none")).mean


# What is refused


def test_weights_in_float32_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp8 = both needs dtype = bfloat16; dtype = float32"):
        load_config(ROOT / "configs/quickstart.yaml", ["model.fp8=both"])


@pytest.mark.parametrize(
    ("fp8", "capability", "transformer_engine", "told"),
    [
        ("rollout", None, True, r"fp8 = rollout needs a GPU of compute capability 8\.9 .*; this machine has no GPU"),
        ("rollout", (8, 0), True, r"8\.9 or more; this machine's has 8\.0"),
        ("both", (8, 9), True, r"fp8 = both needs a GPU of compute capability 9\.0 or more; this machine's has 8\.9"),
        ("both", (9, 0), False, "needs Transformer Engine, which is not installed; install it, or use rollout"),
    ],
)  # fmt: skip
def test_devices_without_fp8_support_are_rejected(
    fp8: str, capability: tuple[int, int] | None, transformer_engine: bool, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        precision.check_device(config(fp8), capability, transformer_engine)


def test_devices_with_fp8_support_are_accepted() -> None:
    precision.check_device(config("none"), None, False)
    precision.check_device(config("rollout"), (8, 9), False)
    precision.check_device(config("both"), (10, 0), True)


@pytest.mark.parametrize(
    ("said", "found"), [("9.0\n9.0\n8.9\n", (8, 9)), ("No devices were found\n", None), ("10.0\n", (10, 0))]
)
def test_the_lowest_capability_of_the_machine_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, found: tuple[int, int] | None
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{said.encode('unicode_escape').decode()}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert precision.device_capability() == found


def test_no_tool_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert precision.device_capability() is None


def test_every_rank_of_an_engine_holds_whole_blocks() -> None:
    """Experts of 768: 384 on each of two ranks, 192 on each of four."""
    hf = HFConfig.read(MODELS / "Qwen3-30B-A3B")
    check_fp8(config("rollout", engine={"tp": 2}), hf)
    check_fp8(config("none", engine={"tp": 4}), hf)
    with pytest.raises(
        UserError, match=r"experts' feed-forward size = 768 .* expected a multiple of 512, .* engine.tp = 4"
    ):
        check_fp8(config("rollout", engine={"tp": 4}), hf)


# The push


@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "GLM-4.5-Air", "DeepSeek-V3", "Qwen2.5-7B-Instruct"])
def test_only_projections_are_quantised(model: str) -> None:
    names = [name for entry in entries(HFConfig.read(MODELS / model)) for name in entry.hf]
    unquantised_modules = {name.rsplit(".", 2)[-2] for name in names if not precision.is_quantised(name)}
    biases = {name.rsplit(".", 2)[-2] for name in names if name.endswith(".bias")}
    allowed = {
        "embed_tokens", "norm", "lm_head", "gate", "input_layernorm", "post_attention_layernorm",
        "q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm",
    }  # fmt: skip
    assert unquantised_modules - biases <= allowed
    assert not any(precision.is_quantised(name) for name in names if name.endswith(".bias"))
    assert precision.is_quantised("model.layers.0.block_sparse_moe.experts.3.w2.weight")


def test_a_block_has_one_scale_by_hand() -> None:
    """Blocks of 1, of -2 at most, of zeros, and of a part: scales 1/448, 2/448, 1, 7/448."""
    weight = torch.zeros(256, 200)
    weight[:128, :128] = 1.0
    weight[5, 130] = -2.0
    weight[130, 199] = 7.0
    values, scale = quantise(weight)
    assert values.shape == weight.shape and values.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(scale, torch.tensor([[1 / LARGEST, 2 / LARGEST], [1.0, 7 / LARGEST]]))
    assert values.float()[5, 130] == -LARGEST
    torch.testing.assert_close(dequantise(values, scale), weight)


def test_the_quantisation_error_of_large_values_is_at_most_four_bits() -> None:
    weight = torch.randn(300, 257, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    values, scale = quantise(weight)
    assert scale.shape == (3, 3)
    deviation = (dequantise(values, scale) - weight.float()).abs()
    large = weight.float().abs() > 0.1
    assert (deviation[large] / weight.float().abs()[large]).max() <= 2**-4


def test_a_push_sends_values_in_order_and_all_scales_last() -> None:
    tensors = [
        ("model.embed_tokens.weight", torch.ones(4, 128)),
        ("model.layers.0.self_attn.q_proj.weight", torch.ones(128, 128)),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(128)),
        ("model.layers.0.mlp.experts.1.down_proj.weight", torch.ones(128, 256)),
        ("model.norm.weight", torch.ones(128)),
    ]
    pushed_tensors = list(quantise_for_engines(config("rollout"), tensors))
    assert [(name, t.dtype) for name, t in pushed_tensors] == [
        ("model.embed_tokens.weight", torch.float32),
        ("model.layers.0.self_attn.q_proj.weight", torch.float8_e4m3fn),
        ("model.layers.0.self_attn.q_proj.bias", torch.float32),
        ("model.layers.0.mlp.experts.1.down_proj.weight", torch.float8_e4m3fn),
        ("model.norm.weight", torch.float32),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", torch.float32),
        ("model.layers.0.mlp.experts.1.down_proj.weight_scale_inv", torch.float32),
    ]
    assert list(quantise_for_engines(config("none"), tensors)) == tensors
