"""Settings that suit the quickstart's small model only, and the memory of hosts without GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config import load_config
from rlsys.convert.config import HFConfig
from rlsys.planner.unusual_settings import (
    cpu_multiplies_bfloat16,
    host_memory_problems,
    slow_bfloat16,
    unusual_settings,
)

MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"
LARGE, SMALL = HFConfig.read(MODELS / "Qwen3-30B-A3B"), HFConfig.read(MODELS / "quickstart-moe")


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("trainer.lr=1e-4", "trainer.lr"),
        ("model.dtype=float32", "model.dtype"),
        ("rollout.max_response_tokens=256", "rollout.max_response_tokens"),
    ],
)
def test_a_setting_of_a_small_model_is_named_for_a_large_one(override: str, field: str) -> None:
    usual = ["trainer.lr=1e-6", "model.dtype=bfloat16", "rollout.max_response_tokens=4096"]
    on_gpus = [*usual, "launch.gpus_per_node=8"]
    assert unusual_settings(load_config(Path("quickstart"), on_gpus), LARGE) == []
    (line,) = unusual_settings(load_config(Path("quickstart"), [*on_gpus, override]), LARGE)
    assert line.startswith(field)
    assert unusual_settings(load_config(Path("quickstart"), [override]), SMALL) == []


def test_adapters_take_a_larger_learning_rate() -> None:
    config = load_config(Path("quickstart_lora"), ["trainer.lr=2e-4", "rollout.max_response_tokens=4096"])
    assert unusual_settings(config, LARGE) == []


def test_all_roles_of_a_machine_without_gpus_count() -> None:
    config = load_config(Path("quickstart"))
    (line,) = host_memory_problems(config, LARGE, 24.0)
    assert line.startswith("trainer and engines need") and line.endswith("this one has 24 GB")
    assert host_memory_problems(config, SMALL, 24.0) == []


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\n", True),
        ("flags\t\t: fpu avx2 amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx2 avx512f avx512vl\n", False),
        ("bogomips: 50\n", True),
        (None, True),
    ],
)
def test_bfloat16_is_slow_where_a_cpu_has_no_instructions_for_it(
    cpuinfo: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    assert cpu_multiplies_bfloat16(file) is expected
    monkeypatch.setattr("rlsys.planner.unusual_settings.cpu_multiplies_bfloat16", lambda: expected)
    lines = slow_bfloat16(load_config(Path("quickstart"), ["model.dtype=bfloat16"]))
    assert bool(lines) is not expected
    assert all(line.startswith("model.dtype = bfloat16: this CPU") for line in lines)
    assert slow_bfloat16(load_config(Path("quickstart"))) == []
