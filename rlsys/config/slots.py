"""Upper bound of the number of samples in flight."""

from __future__ import annotations

from rlsys.config import Config


def most_slots(config: Config) -> int:
    """Return the maximum number of samples that a run has in flight at any time."""
    factor = config.over_provision
    if config.rollout.over_provision == "auto":
        factor = 1.0 + config.rollout.max_staleness  # the age limit admits no more groups
    return round(factor * config.samples_per_step)
