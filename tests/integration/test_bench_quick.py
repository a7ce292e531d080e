"""Benches run and say what they promise: trainer, weight pushes, relays, connections, router, scale, a share,
rehearsals, a walk, races, forecasts.

Figures mean nothing here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def printed(script: str, *args: str) -> dict[str, Any]:
    command = [sys.executable, f"bench/{script}.py", *args]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def summary(script: str) -> dict[str, float | None]:
    figures: dict[str, float | None] = printed(script, "--json", "--quick")["summary"]
    return figures


def test_trainer() -> None:
    figures = summary("trainer")
    assert figures.keys() == {"ratio_to_bare_megatron", "real_token_share", "logprob_share"}
    assert figures["real_token_share"] == 1, "packing on one rank has no padding"


@pytest.mark.slow
def test_weight_sync() -> None:
    to_copy = {f"{m}_ratio_to_copy" for m in ("auto", "broadcast", "disk", "disk_delta")}
    to_floor = {"auto_ratio_to_floor", "broadcast_ratio_to_floor", "hashes_ratio_to_hashlib"}
    assert summary("weight_sync").keys() == to_copy | to_floor


def test_relay() -> None:
    figures = summary("relay")
    assert figures["receivers"] == 2 and figures.keys() >= {"star_growth", "relay_growth"}
    assert 0.5 < (figures["relay_link_bytes_per_model_byte"] or 0) < 1.1, "to the first receiver alone"
    assert (figures["change_bfloat16"] or 1) < (figures["change_float32"] or 1) < 0.6


def test_connections() -> None:
    servers = ("exporter", "commands")
    result = printed("connections", "--json", "--quick", "--servers", *servers)
    assert set(result["servers"]) == set(servers)
    for cases in result["servers"].values():
        assert list(cases) == ["quiet", "idle", "slow_heads", "slow_bodies"]
        assert all(case["requests_per_second"] > 0 < case["p50_ms"] for case in cases.values())
    assert result["summary"]["highest_failed"] < 1


@pytest.mark.slow
def test_router() -> None:
    figures = summary("router")
    assert {name for name, value in figures.items() if value is not None} >= {
        "throughput_ratio_to_direct",
        "added_p50_ms",
        "requests_per_second",
    }
    assert "sglang_router_added_p50_ms" in figures


def test_share() -> None:
    """All bytes of a share of 16 are read, and become tokens of micro-batches."""
    figures = printed("share", "--json", "--quick")["summary"]
    assert figures["read_gb"] > 0
    assert 0.8 < figures["share_tokens"] / (256 * 200 / 16) < 1.2


@pytest.mark.parametrize("routes", [(), ("--routes",)], ids=["tokens", "routes"])
def test_scale(routes: tuple[str, ...]) -> None:
    figures = printed("scale", "--json", "--quick", *routes)["this"]
    assert figures["tokens"] > 5000 and figures["rollout_us_per_token"] > 0
    assert figures["disk_bytes_per_token"] > 12, "ids and log-probs are kept"
    assert (figures["take_bytes_per_sample"] > 0) and (figures["slots"] == 64)


def test_rehearse() -> None:
    ((name, (rank,)),) = printed("rehearse", "--json", "--quick")["results"].items()
    assert name == "qwen2.5-7b_8gpu_colocated"
    assert (rank["rank"], rank["world"]) == (0, 8)
    assert rank["operations"] > 0 < rank["rss_gb"]


def test_step_path() -> None:
    walks = printed("step_path")
    assert walks.keys() == {"step", "group"}
    for walk in walks.values():
        assert walk.keys() == {"functions", "files", "changes", "returns"}
        assert walk["functions"] > walk["files"] > 5


@pytest.mark.slow
def test_plan_check(tmp_path: Path) -> None:
    """Forecasts are written down, and held against runs of the same settings."""
    file = tmp_path / "predictions" / "plan.json"
    predicted = printed("plan_check", "--predict", "--quick", "--out", str(file))
    assert predicted == json.loads(file.read_text())
    measurements = printed("plan_check", "--measure", "--quick", "--out", str(file))
    assert measurements["settings"].keys() == predicted["settings"].keys() == {predicted["best"]}
    assert measurements["capacity"].keys() == predicted["capacity"].keys()
    (setting,) = measurements["settings"].values()
    assert setting["forecast"] > 0 < setting["measured"]["median"]
    assert measurements["summary"]["chosen_of_best"] == 1


@pytest.mark.slow
def test_race() -> None:
    """Against TRL, a step each."""
    assert summary("race").keys() == {"quick_sooner_without_start", "quick_sooner_from_start"}


@pytest.mark.slow
def test_april_claim() -> None:
    """Three runs of two steps: each is compared with the synchronous one."""
    runs = printed("april_claim", "--json", "--quick")["runs"]["grpo"]
    assert list(runs) == ["1", "1.5", "2"]
    assert all(
        figures["throughput"]["mean"] > 0 and figures["to_0"]["steps"] == [0] for figures in runs.values()
    )
    assert runs["1"]["against_synchronous"]["throughput"]["mean"] == 1
