"""Means of what reward functions say beside the reward."""

from __future__ import annotations

from rlsys.rollout.reward_metrics import RewardMetrics


def test_each_name_has_the_mean_of_the_samples_that_had_it_and_begins_anew() -> None:
    means = RewardMetrics()
    for values in ({"length": 1.0, "format": 1.0}, {"length": 4.0}, {"length": 4.0}):
        means.add(values)
    assert means.take() == {"length": 3.0, "format": 1.0}
    means.add({"length": 7.0})
    assert means.take() == {"length": 7.0}
