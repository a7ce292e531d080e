"""The benches of trainer, weight pushes and router run and say what they promise. Figures mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def summary(script: str) -> dict[str, float | None]:
    command = [sys.executable, f"bench/{script}.py", "--json", "--quick"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, float | None] = json.loads(ended.stdout)["summary"]
    return found


def test_trainer() -> None:
    found = summary("trainer")
    assert found.keys() == {"ratio_to_bare_megatron", "real_token_share", "logprob_share"}
    assert found["real_token_share"] == 1, "packing on one rank has no padding"


@pytest.mark.slow
def test_weight_sync() -> None:
    assert summary("weight_sync").keys() == {
        f"{m}_ratio_to_copy" for m in ("tensor", "broadcast", "disk", "disk_delta")
    }


@pytest.mark.slow
def test_router() -> None:
    found = summary("router")
    assert {name for name, value in found.items() if value is not None} >= {
        "throughput_ratio_to_direct",
        "added_p50_ms",
        "requests_per_second",
    }
    assert "sglang_router_added_p50_ms" in found
