"""What explain says of the rollout processes' work."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config import load_config
from rlsys.core.machines import PASS_OVERHEAD_SECONDS
from rlsys.planner.model_preflight import read_model
from rlsys.planner.traffic import (
    describe_traffic,
    step_share,
    tokens_per_second,
    workers_needed,
)

ROOT = Path(__file__).resolve().parents[3]


MANY = [
    "launch.gpus_per_node=8",
    "rollout.groups_per_step=512",
    "engine.count=4",
    "engine.max_running_requests=2048",
]
"""8,192 samples in flight."""


def test_the_rate_is_all_slots_over_the_time_of_a_pass() -> None:
    config = load_config(ROOT / "configs/quickstart.yaml", MANY)
    rate = tokens_per_second(config, read_model(config))
    assert rate == pytest.approx(8192 / PASS_OVERHEAD_SECONDS, rel=0.02), "tiny weights are read in no time"


def test_token_traffic_beyond_one_core_recommends_more_rollout_workers() -> None:
    config = load_config(ROOT / "configs/quickstart.yaml", MANY)
    hf = read_model(config)
    assert workers_needed(config, hf) == 10, "2,680,000 tokens a second, 280,000 of them for each"
    facts, (odd,) = describe_traffic(config, hf)
    assert "670% of a core in each of 1 rollout process(es)" in facts[0][1]
    assert "expected rollout.workers = 4" in odd, "not more than there are engines"
    enough = load_config(
        ROOT / "configs/quickstart.yaml", [*MANY[:2], "engine.count=10", "rollout.workers=10"]
    )
    assert describe_traffic(enough, hf)[1] == []


def test_traffic_is_not_estimated_without_gpus() -> None:
    config = load_config(ROOT / "configs/quickstart.yaml")
    assert describe_traffic(config, read_model(config)) == ([], [])


def test_a_rank_reads_its_share_of_tokens_and_of_its_stages_routes() -> None:
    """DeepSeek-V3: 58 of 61 layers have experts, 8 of 256 for a token; pp 8 has 8 of them in a stage."""
    deepseek = ROOT / "configs/experiments/deepseek-v3_256gpu_colocated.yaml"
    config = load_config(deepseek, ["rollout.groups_per_step=64"])
    share = step_share(config, read_model(config))
    assert share.tokens == 1024 * 8192 / 4
    assert share.token_bytes == 12 * share.tokens
    assert share.route_bytes == 8 * 8 * share.tokens
    facts = dict(describe_traffic(config, read_model(config))[0])
    assert "0.5 MB from the rollout to the trainer" in facts["a step's data"]
    assert "at most 0.159 GB (0.025 of tokens, 0.13 of routes)" in facts["a step's data"]
    assert facts["an interrupt"] == "512 samples are parked at each step: 0.026 s of the rollout"
    without = load_config(deepseek, ["trainer.replay='off'", "engine.return_routes=false"])
    assert step_share(without, read_model(without)).route_bytes == 0
