"""Upper bound of the samples of a run that are in flight."""

from __future__ import annotations

from rlsys.config import Config


def most_slots(config: Config) -> int:
    """Return the maximum number of samples that a run has in flight at any time."""
    return round(_ceiling(config) * config.samples_per_step)


def _ceiling(config: Config) -> float:
    if config.rollout.over_provision != "auto":
        return config.over_provision
    return 1.0 + config.rollout.max_staleness  # the bound of admission
