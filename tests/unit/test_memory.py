"""Memory of a layout: counts against real files and published sizes, bytes against sums done by hand."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
from safetensors import safe_open

from launch.memory import budget, describe_memory, expected_staleness, model_size
from rlsys.config import Config, load_config

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs/models/quickstart-moe"
QUICKSTART = json.loads((MODEL / "config.json").read_text())

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129280,
    "num_attention_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "topk_method": "noaux_tc",
}  # fmt: skip


def config(*overrides: str) -> Config:
    return load_config(ROOT / "configs/quickstart.yaml", overrides)


def test_parameters_are_those_of_the_file() -> None:
    with safe_open(MODEL / "model.safetensors", "np") as f:
        shapes = {name: f.get_slice(name).get_shape() for name in f.keys()}  # noqa: SIM118
    size = model_size(QUICKSTART)
    assert size.total == sum(prod(shape) for shape in shapes.values())
    assert size.experts == sum(prod(s) for n, s in shapes.items() if ".experts." in n)


@pytest.mark.parametrize(("hf", "billions"), [(QWEN3_30B_A3B, 30.532), (DEEPSEEK_V3, 671.026)])
def test_parameters_of_known_models(hf: dict[str, object], billions: float) -> None:
    """DeepSeek-V3's own figure, 671 B, leaves its extra prediction layer out, as we do."""
    assert model_size(hf).total / 1e9 == pytest.approx(billions, abs=0.001)


def test_bytes_by_hand() -> None:
    """Float32, EP 2 over two ranks: dense parts are whole on each, experts and all optimizer states halved."""
    size = model_size(QUICKSTART)
    b = budget(config("parallel.ep=2", "engine.max_total_tokens=1000"), size)
    held = size.dense + size.experts / 2
    assert b.weights == b.gradients == 4 * held
    assert b.optimizer == 8 * (size.dense / 2 + size.experts / 2)
    assert b.engine_weights == 4 * size.total
    assert b.kv_pool == 4 * 1000 * 3 * (2 * 2 * 32)
    halves = budget(config("parallel.ep=2", "model.dtype=bfloat16"), size)
    assert halves.weights == 2 * held
    assert halves.optimizer == 12 * (size.dense / 2 + size.experts / 2)


def test_what_will_not_fit_is_a_warning() -> None:
    text = describe_memory(config("model.dtype=bfloat16", "engine.tp=2"), QWEN3_30B_A3B, 80.0)
    assert "parameters           30.5 B, 29 B of them in routed experts" in text
    assert "a weight push        61.1 GB to each engine, about 3.1 s at 20 GB/s (tensor)" in text
    assert "warning              a trainer rank needs" in text
    assert "samples are in flight, but the engines decode 128 at once" in text
    roomy = config("engine.max_running_requests=256", "engine.max_total_tokens=65536")
    assert "warning" not in describe_memory(roomy, QUICKSTART, 80.0)


def test_expected_staleness() -> None:
    assert expected_staleness(config("rollout.over_provision=1", "rollout.max_staleness=0")).startswith("0:")
    assert expected_staleness(config("rollout.over_provision=3")) == "about 2 versions on average, at most 8"
    apart = config("rollout.over_provision=1.5", "launch.placement=disaggregated")
    assert expected_staleness(apart) == "about 1.5 versions on average, at most 8"
