"""Means of what reward functions say beside the reward."""

from __future__ import annotations

from rlsys.rollout.reward_metrics import RewardMetrics


def test_reward_metrics_average_per_name_and_reset_on_take() -> None:
    means = RewardMetrics()
    for values in ({"length": 1.0, "format": 1.0}, {"length": 4.0}, {"length": 4.0}):
        means.add(values)
    assert means.take() == {"length": 3.0, "format": 1.0}
    means.add({"length": 7.0})
    assert means.take() == {"length": 7.0}
