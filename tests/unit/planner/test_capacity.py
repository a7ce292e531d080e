"""ECHO-2's capacity rule: against simulated runs of the real rollout code, and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlsys.config import load_config
from rlsys.core.machines import machines
from rlsys.planner.capacity import (
    Demand,
    EngineKind,
    describe_capacity,
    engine_rate,
    forecast_step,
    step_demand,
)
from rlsys.planner.costs import Costs
from rlsys.planner.lengths import LengthDistribution
from rlsys.planner.model_preflight import read_model
from rlsys.planner.simulation import simulate
from tests.helpers.rollout_rig import make_config

ROOT = Path(__file__).resolve().parents[3]
DISAGGREGATED = ROOT / "configs/experiments/glm-4.5-air_64gpu_disaggregated.yaml"
PROMPT = 10


EVEN = range(60, 141)
TAIL = [round(20 * 1.35**i) for i in range(10)]


@pytest.mark.parametrize("train", [0.3, 0.8, 3.0], ids=["engines are too few", "even", "engines wait"])
@pytest.mark.parametrize(
    ("drawn", "policy", "off"),
    [(EVEN, "drop", 0.05), (TAIL, "wait", 0.1)],
    ids=["even lengths", "a long tail"],
)
def test_a_step_takes_as_long_as_the_rollouts_own_code_makes_it(
    tmp_path: Path, drawn: Sequence[int], policy: str, off: float, train: float
) -> None:
    """At a staleness of 0 to 3: the next step's first samples run beside the last ones of this step."""
    lengths = LengthDistribution(drawn, max(drawn))
    costs = Costs(pass_overhead=0.01, prompt_token=1e-5, train_step=train, push=0.2)
    for staleness in range(4):
        config = make_config(
            tmp_path / str(staleness),
            rollout={
                "groups_per_step": 8, "group_size": 4, "max_response_tokens": max(drawn), "over_provision": 1.0,
                "max_staleness": staleness, "staleness_policy": policy,
            },
            launch={"placement": "disaggregated"},
        )  # fmt: skip
        result = simulate(config, costs, lengths, prompt_tokens=PROMPT, steps=12)
        demand = step_demand(config, costs, lengths, config.slots, PROMPT)
        expected = demand.step_seconds(engine_rate(costs, lengths, config.slots, PROMPT), staleness)
        assert result.step_seconds == pytest.approx(expected, rel=off), staleness


def test_the_longest_of_all_samples_counts_however_many_engines_share_them(tmp_path: Path) -> None:
    """One of a hundred is ten times as long: few engines, or many, wait for one of those."""
    lengths, costs = LengthDistribution([100] * 99 + [1000], 1000), Costs(pass_overhead=0.01)
    config = make_config(tmp_path, rollout={"groups_per_step": 100, "group_size": 10, "over_provision": 1.0})
    lags = [step_demand(config, costs, lengths, running, PROMPT).lag for running in (1000, 10, 1)]
    assert lags == pytest.approx([10.01] * 3, rel=0.01)


def test_the_cheapest_engines_that_suffice_are_hired() -> None:
    demand = Demand(samples=100, busy=12.0, pause=2.0, lag=25.0)
    fast, cheap = EngineKind("fast", 4, rate=4.0, cost=8.0), EngineKind("cheap", 3, rate=1.0, cost=1.0)
    assert demand.engines_needed([fast, cheap]) == {"cheap": 3, "fast": 2}, "10 samples a second: 3 and 8"
    assert demand.engines_needed([EngineKind("few", 2, 1.0)]) == {"few": 2}
    assert demand.staleness == 3
    assert [demand.step_seconds(10.0, s) for s in range(4)] == [37.0, 19.5, pytest.approx(41 / 3), 12.0]
    assert demand.step_seconds(5.0, 3) == 22.0, "then engines limit"


def test_explain_shows_capacity_only_for_disaggregated_gpu_runs() -> None:
    h100 = machines()["h100"]
    config = load_config(DISAGGREGATED)
    ((name, description),) = describe_capacity(config, forecast_step(config, read_model(config), h100))
    assert name == "capacity"
    assert "it needs 119 samples/s, engines finish 42.4; a step takes" in description
    slower = load_config(DISAGGREGATED, ["parallel.dp=1", "parallel.ep=4"])
    ((_, description),) = describe_capacity(slower, forecast_step(slower, read_model(slower), h100))
    assert "2 of 4 engines are enough; a step takes" in description
    for elsewhere in ("configs/quickstart.yaml", "configs/experiments/qwen2.5-7b_8gpu_colocated.yaml"):
        other_config = load_config(ROOT / elsewhere)
        assert (
            describe_capacity(other_config, forecast_step(other_config, read_model(other_config), h100)) == []
        )
