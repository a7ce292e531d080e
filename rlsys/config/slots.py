"""Upper bounds of the over-provision factor and of the number of samples in flight."""

from __future__ import annotations

from rlsys.config import Config


def largest_factor(config: Config) -> float:
    """Return the largest over-provision factor of a run: its constant one, or the bound of `auto`."""
    if config.rollout.over_provision == "auto":
        return 1.0 + config.rollout.max_staleness  # the age limit admits no more groups
    return config.over_provision


def most_slots(config: Config) -> int:
    """Return the maximum number of samples that a run has in flight at any time."""
    return round(largest_factor(config) * config.samples_per_step)
