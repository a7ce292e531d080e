"""What SGLang makes of the command line of every shipped experiment, on faked H100: no process of it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rlsys.config import load_config
from tests.helpers.python_path import python_path
from tests.helpers.servers import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.gate]

CONFIGS = sorted(
    [p for p in (ROOT / "configs/experiments").glob("*.yaml") if p.stem != "base"]
    + [ROOT / "configs/quickstart.yaml", ROOT / "configs/quickstart_cuda.yaml"]
)


@pytest.fixture(scope="module")
def resolved() -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.helpers.faked_h100", *map(str, CONFIGS)]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "SGLANG_PLATFORM": ""}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    answers = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(CONFIGS), process.stderr[-3000:]
    return {answer["config"]: answer for answer in answers}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_sglang_takes_the_command_line(path: Any, resolved: dict[str, dict[str, Any]]) -> None:
    config, server_args = load_config(path), resolved[path.stem]
    assert "error" not in server_args
    assert server_args["tp_size"] == config.engine.tp
    assert server_args["max_total_tokens"] == config.fixed_pool_tokens
    assert server_args["enable_memory_saver"] == config.launch.release_memory
    if config.model.dtype == "float32":
        assert server_args["attention_backend"] == "triton", "FlashAttention 3 refuses float32"
