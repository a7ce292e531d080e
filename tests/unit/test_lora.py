"""Adapters: which matrices have one, what their factors are called, what is refused, what they cost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from launch.memory import budget, checkpoint_host, describe_memory, model_size
from rlsys.algo.preflight import check
from rlsys.cli import main
from rlsys.config import Config, load_config
from rlsys.config.mistakes import ConfigError
from rlsys.config.trainer import LoraConfig
from rlsys.convert.adapters import adapted, check_lora, factors, matrices
from rlsys.convert.config import HFConfig
from rlsys.convert.peft import adapter_config
from rlsys.errors import UserError
from tests.helpers import tiny

HERE = Path(__file__).parents[2]
RANK_4 = LoraConfig(rank=4, alpha=8)


def model(name: str) -> HFConfig:
    return HFConfig.of(tiny.raw_config(tiny.TINY[name]), name)


def config(*overrides: str) -> Config:
    return load_config(HERE / "configs/quickstart_lora.yaml", list(overrides))


def test_each_matrix_has_two_factors_under_pefts_names() -> None:
    """Query, key and value three pairs, each expert its own; cut where the matrix is."""
    found = {
        name: (e.rule.cut, shape) for e in factors(model("qwen3-moe"), RANK_4) for name, shape in e.hf.items()
    }
    layer = "base_model.model.model.layers.3."
    assert found[f"{layer}self_attn.k_proj.lora_A.weight"] == (None, (4, 64))
    assert found[f"{layer}self_attn.k_proj.lora_B.weight"] == (0, (48, 4)), "two heads of 24"
    assert found[f"{layer}self_attn.o_proj.lora_A.weight"] == (1, (4, 96)), "its columns are cut"
    assert found[f"{layer}self_attn.o_proj.lora_B.weight"] == (None, (64, 4))
    assert found[f"{layer}mlp.experts.7.down_proj.lora_A.weight"] == (1, (4, 32))
    assert len(found) == 2 * 4 * (4 + 8 * 3)


def test_targets_choose_by_the_last_part_of_a_name() -> None:
    lora = LoraConfig(rank=4, targets=("q_proj", "v_proj"))
    pairs = [pair for _, of_parameter in adapted(model("qwen3-moe"), lora) for pair in of_parameter]
    assert Counter(pair.part for pair in pairs) == {0: 4, 2: 4}, (
        "of query, key and value the first and the last"
    )
    assert adapter_config(Path("base"), lora, model("qwen3"))["target_modules"] == ["q_proj", "v_proj"]
    assert matrices(model("deepseek-v3"))[:3] == ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"]


@pytest.mark.parametrize(
    ("family", "overrides", "told"),
    [
        ("qwen3-moe", {"targets": ["q_prj"]}, "trainer.lora.targets names q_prj: .*did you mean q_proj?"),
        (
            "qwen3-moe",
            {"targets": ["gate"]},
            "trainer.lora.targets names gate: expected some of q_proj, k_proj",
        ),
        ("gpt-oss", {}, "the experts of .* are stacked with their biases.*q_proj, k_proj, v_proj, o_proj"),
    ],
)
def test_what_a_model_does_not_have_is_refused(family: str, overrides: dict[str, Any], told: str) -> None:
    made = Config.model_validate({"model": {"path": "m"}, "trainer": {"lora": {"rank": 4, **overrides}}})
    with pytest.raises(UserError, match=told):
        check_lora(made, model(family))


def test_ranks_that_share_experts_but_nothing_else_are_refused() -> None:
    made = config("parallel.etp=2")
    with pytest.raises(
        UserError, match=r"parallel.etp = 2 with adapters of experts: .* at most parallel.tp = 1"
    ):
        check_lora(made, HFConfig.read(made.model.path))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.lora.rank=0", "trainer.lora.rank = 0: expected at least 1"),
        ("trainer.lora.alpha=0", "trainer.lora.alpha = 0"),
        ("trainer.lora.ranks=4", "did you mean trainer.lora.rank"),
        ("trainer.lora.targets=[]", "trainer.lora.targets"),
        ("trainer.optimizer=muon", "trainer.lora trains nothing but adapters: trainer.optimizer = muon"),
        ("trainer.balance_rate=0.01", "trainer.balance_rate = 0.01 moves the routers' biases"),
        ("algo.critic={}", "algo.critic trains a second model"),
    ],
)
def test_what_cannot_be_with_adapters_is_one_line(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(override)


def test_values_are_refused() -> None:
    made = config("algo.advantage=gae", "algo.loss=[clip, value]")
    with pytest.raises(UserError, match=r"trainer.lora trains nothing but adapters, and values need a layer"):
        check(made)


def test_optimizer_and_checkpoints_are_of_the_adapters_alone() -> None:
    whole, lean = config("trainer.lora=null"), config()
    hf = HFConfig.read(lean.model.path)
    size, trained = model_size(hf), sum(e.elements for e in factors(hf, LoraConfig(rank=16)))
    assert budget(lean, size).optimizer == pytest.approx(8 * trained)
    assert budget(lean, size).gradients == pytest.approx(4 * trained)
    assert budget(lean, size).weights == budget(whole, size).weights
    share = trained / size.total
    assert checkpoint_host(lean, size) == pytest.approx(share * checkpoint_host(whole, size))
    assert ("trained", "adapters of rank 16") in [
        (name, text.split(", ")[-1].split(";")[0]) for name, text in describe_memory(lean, hf)
    ]


def test_a_rehearsal_is_of_whole_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", str(HERE / "configs/quickstart_lora.yaml")]) == 2
    assert "trainer.lora: a rehearsal counts the training of whole models" in capsys.readouterr().err
