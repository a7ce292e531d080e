"""A trainer's life on a pretended GPU (tests/helpers/two_devices.py): no operation mixes devices as CUDA refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import two_device_life
from tests.helpers.servers import ROOT
from tests.helpers.tiny import TINY

pytestmark = pytest.mark.integration

KINDS = ("qwen2", "qwen3-moe")
"""Of these, `make test` runs the life: dense, and experts."""
VARIANTS = (
    "qwen3:bfloat16", "qwen3-moe:bfloat16", "deepseek-v3:bfloat16", "qwen3:support", "qwen3-moe:lora",
    "deepseek-v3:lora", "deepseek-v3:mtp", "glm-4.5:mtp_trunk", "qwen3-moe:muon", "deepseek-v3:muon",
    "qwen3-moe:replay", "qwen3-moe:recompute", "qwen3-moe:padded", "deepseek-v3:bias",
    "qwen3:engine", "qwen3-moe:engine", "qwen3-moe:engine_replay",
)  # fmt: skip
PARTS = {"build", "steps", "score", "shared prefixes", "canaries", "push", "save", "load", "step after load"}


def recorded(folder: Path, cases: Sequence[str]) -> dict[str, Any]:
    """`{case: {part: what it recorded}}`, of a process of its own."""
    file = folder / "recorded.json"
    command = [sys.executable, two_device_life.__file__, str(file), str(folder), *cases]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, (process.stdout + process.stderr)[-4000:]
    lives: dict[str, Any] = json.loads(file.read_text())
    return lives


def check(lives: dict[str, Any]) -> None:
    for case, parts in lives.items():
        for part, record in parts.items():
            assert not record["refused"], (case, part, record["stacks"])
            assert record["counts"]["launches"], (case, part, "computes on the pretended GPU")


@pytest.mark.gate
def test_the_life_of_a_dense_model_and_of_experts_mixes_no_devices_and_a_planted_host_tensor_is_caught(
    tmp_path: Path,
) -> None:
    lives = recorded(tmp_path, [*KINDS, "planted"])
    planted = lives.pop("planted")
    assert lives.keys() == set(KINDS) and all(parts.keys() == PARTS for parts in lives.values())
    check(lives)
    assert not planted["build"]["refused"] and not planted["pack"]["refused"]
    assert any(
        problem.startswith("mixed devices: aten::mul at tests/helpers/two_device_life.py")
        for problem in planted["step"]["refused"]
    ), planted["step"]
    step = lives["qwen3-moe"]["step after load"]["counts"]
    assert step["launches"] > 1000 and 0 < step["synchronizations"] < 500, step


@pytest.mark.parametrize("family", [name for name in TINY if name not in KINDS])
def test_no_family_mixes_devices(family: str, tmp_path: Path) -> None:
    check(recorded(tmp_path, [family]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_option_mixes_devices(variant: str, tmp_path: Path) -> None:
    check(recorded(tmp_path, [variant]))


def test_a_critic_mixes_no_devices(tmp_path: Path) -> None:
    check(recorded(tmp_path, ["critic"]))


def test_no_recipe_mixes_devices(tmp_path: Path) -> None:
    check(recorded(tmp_path, ["recipes"]))
