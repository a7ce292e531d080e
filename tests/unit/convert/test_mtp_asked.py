"""What is asked of multi-token prediction, and what is told of it before a run."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.table import entries
from rlsys.core.errors import UserError
from rlsys.planner.memory import describe_memory, model_size
from rlsys.planner.model_preflight import read_model
from rlsys.weights.shard_plan import plan_senders
from tests.helpers import tiny

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "configs" / "models"


def config_of(model: Path, **sections: dict[str, Any]) -> Config:
    fields: dict[str, dict[str, Any]] = {"model": {"path": model}, "trainer": {"mtp_loss": 0.2}}
    for name, values in sections.items():
        fields[name] = {**fields.get(name, {}), **values}
    return Config.model_validate(fields)


@pytest.mark.parametrize(
    ("trainer", "told"),
    [
        ({"lora": {"rank": 4}}, "trainer.lora trains only adapters"),
        ({"balance_loss": 0.1}, "would count padding"),
        ({"early_backward": True}, "trainer.early_backward = true processes a part"),
        ({"mtp_loss": 0.0, "mtp_trunk": True}, "needs a trainer.mtp_loss above 0"),
    ],
)
def test_mtp_loss_is_refused_with_incompatible_settings(trainer: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        config_of(MODELS / "DeepSeek-V3", trainer=trainer, launch={"placement": "disaggregated"})


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("qwen3-moe", {}, "no layer for multi-token prediction"),
        ("deepseek-v3", {"num_nextn_predict_layers": 0}, "no layer for multi-token prediction"),
        ("deepseek-v3", {"num_nextn_predict_layers": 2}, "only one layer"),
        ("deepseek-v3", {"num_nextn_predict_layers": 1, "tie_word_embeddings": True}, "tie_word_embeddings"),
        ("qwen2-moe", {"num_nextn_predict_layers": 1}, "is not supported for Qwen2MoeForCausalLM"),
    ],
)
def test_mtp_loss_is_refused_for_unsupported_models(
    family: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    raw = tiny.raw_config(tiny.TINY[family]) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=told) as exc_info:
        read_model(config_of(tmp_path, rollout={"max_response_tokens": 64}))
    assert "\n" not in str(exc_info.value) and "trainer.mtp_loss = 0.2" in str(exc_info.value)


@pytest.mark.parametrize(
    ("args", "drafts"),
    [
        ([], False),
        (["--speculative-algorithm", "EAGLE"], True),
        (["--mem-fraction-static", "0.7", "--speculative-algorithm=nextn"], True),
        (["--speculative-algorithm", "NGRAM"], False),
        (["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "other"], False),
    ],
)
def test_engines_hold_the_layer_when_they_draft_with_it(args: list[str], drafts: bool) -> None:
    assert config_of(MODELS / "DeepSeek-V3", engine={"extra_args": args}).engine.drafts_with_model is drafts


@pytest.mark.parametrize(("name", "billions"), [("DeepSeek-V3", 11.6), ("GLM-4.5-Air", 2.4)])
def test_the_layer_is_counted(name: str, billions: float) -> None:
    """As the name table has it."""
    hf = read_model(config_of(MODELS / name))
    plain, size = model_size(replace(hf, mtp=False)), model_size(hf)
    mtp_elements = sum(e.elements for e in entries(hf)) - sum(
        e.elements for e in entries(replace(hf, mtp=False))
    )
    assert sum(size.mtp) == mtp_elements and round(mtp_elements / 1e9, 1) == billions
    assert (plain.total, plain.mtp) == (size.total, (0, 0))
    facts = dict(describe_memory(config_of(MODELS / name), hf))
    assert "not in the engines" in facts["multi-token prediction"]


def test_the_last_stage_sends_it_to_engines_that_draft() -> None:
    parallel = {"tp": 2, "pp": 2, "ep": 2}
    hf = replace(
        HFConfig.of(tiny.raw_config(tiny.TINY["deepseek-v3"]), "here"), prediction_layers=1, mtp=True
    )
    config = config_of(MODELS / "DeepSeek-V3", parallel=parallel)
    plan = plan_senders(config, hf)
    lanes = config.parallel.world_size // 2
    senders = {next(iter(part.entry.hf)): s.sender for s in plan.schedules for part in s.parts}
    assert senders.keys() == {next(iter(entry.hf)) for entry in entries(hf)}
    assert all(rank >= lanes for name, rank in senders.items() if name.startswith("model.layers.4."))


def test_shapes_are_those_of_published_folders() -> None:
    """Of DeepSeek-V3's index: what the layer has beside a whole layer."""
    hf = replace(HFConfig.read(MODELS / "DeepSeek-V3"), mtp=True)
    shapes = {name: shape for e in entries(hf) for name, shape in e.hf.items() if ".61." in name}
    assert shapes["model.layers.61.eh_proj.weight"] == (7168, 14336)
    assert shapes["model.layers.61.shared_head.norm.weight"] == (7168,)
    assert shapes["model.layers.61.mlp.experts.255.down_proj.weight"] == (7168, 2048)
    assert prod(shapes["model.layers.61.self_attn.kv_b_proj.weight"]) == 32768 * 512
