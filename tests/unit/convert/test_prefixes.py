"""Where a common prompt is computed once, by facts that explain and the planner know as well as the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.describe import describe_prompts
from rlsys.convert.fit import trained_model
from rlsys.convert.prefixes import why_not_shared
from tests.helpers import tiny
from tests.helpers.trainer_cases import config_of


@pytest.mark.parametrize(
    ("family", "sections", "transformer_engine", "why"),
    [
        ("qwen3", {}, False, None),
        ("deepseek-v3", {"parallel": {"tp": 2, "ep": 2, "etp": 1}}, False, None),
        ("qwen3", {"parallel": {"cp": 2}}, False, "parallel.cp = 2"),
        ("deepseek-v3", {"trainer": {"mtp_loss": 0.3}}, False, "trainer.mtp_loss = 0.3"),
        ("qwen3-next", {}, False, "gated delta net"),
        ("qwen3", {}, True, None),
        ("qwen3-moe", {"trainer": {"replay": "engine"}, "engine": {"return_routes": True}}, True, None),
        ("gpt-oss", {}, True, "attention sinks"),
        ("gpt-oss", {}, False, None),
        ("gpt-oss", {"trainer": {"lora": {"rank": 4, "alpha": 8}}}, True, None),
        ("qwen3", {"trainer": {"lora": {"rank": 4, "alpha": 8}}}, True, None),
    ],
)
def test_shared_prompts_are_computed_once_or_a_reason_is_reported(
    family: str, sections: dict[str, Any], transformer_engine: bool, why: str | None, tmp_path: Path
) -> None:
    model = tiny.write(tmp_path / "model", tiny.TINY[family], mtp="mtp_loss" in str(sections))
    config = config_of(model, tmp_path / "run", **sections)
    hf = trained_model(config)
    reason = why_not_shared(config, hf, transformer_engine)
    _, description = describe_prompts(config, hf, transformer_engine)
    if why is None:
        assert reason is None and description == "computed once in each micro-batch"
    else:
        assert reason is not None and why in reason and description == f"computed for every sample: {reason}"
