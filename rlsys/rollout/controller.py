"""How many samples are kept in flight: a number, or a controller that holds a target (over_provision: auto).

Why a target is needed: with N'/N samples in flight a group waits N'/N - 1 steps on average (Little's law), so the
factor buys speed with age. The gain flattens while the off-policy share goes on rising.
"""

from __future__ import annotations

from typing import Literal

from rlsys.config import Config

GAIN = 0.5
"""Share of the way to the computed factor that one step goes: what it changes shows only steps later."""
LARGEST_CHANGE = 1.1

Target = Literal["off_policy", "idle"]


def next_factor(factor: float, target: Target, wanted: float, measured: float, ceiling: float) -> float:
    """The factor of the next step, in [1, ceiling], from what was measured with `factor` in the last one.

    off_policy: share of the trained tokens that older weights sampled, about 1 - 1 / factor**2 on long-tailed
    lengths; idle: mean share of a batch's slots without a sample, which falls as the factor rises.
    """
    if target == "off_policy":
        ratio = (max(1 - measured, 0.01) / max(1 - wanted, 0.01)) ** (GAIN / 2)
    else:
        ratio = ((measured + 0.01) / (wanted + 0.01)) ** (GAIN / 2)
    return min(max(factor * min(max(ratio, 1 / LARGEST_CHANGE), LARGEST_CHANGE), 1.0), ceiling)


class OverProvision:
    """Owns the factor of the step to come."""

    def __init__(self, config: Config, saved: float | None) -> None:
        """`saved`: where an earlier process of this run left off."""
        r = config.rollout
        self._samples_per_step = config.samples_per_step
        self._hold, self._share = r.auto_hold, r.auto_share
        self._ceiling = 1.0 + r.max_staleness  # admission lets no more in
        self._auto = r.over_provision == "auto"
        self.factor = config.over_provision if saved is None or not self._auto else saved

    @property
    def slots(self) -> int:
        return round(self.factor * self._samples_per_step)

    @property
    def most_slots(self) -> int:
        """The most samples that this run can ever have in flight."""
        return round((self._ceiling if self._auto else self.factor) * self._samples_per_step)

    def figures(self, idle_share: float) -> dict[str, float]:
        """For the step's metrics."""
        return {"over_provision": self.factor, "slots": self.slots, "idle_share": idle_share}

    def step(self, off_policy_share: float, idle_share: float) -> None:
        """A step was taken; its shares decide about the next one."""
        if self._auto:
            measured = off_policy_share if self._hold == "off_policy" else idle_share
            self.factor = next_factor(self.factor, self._hold, self._share, measured, self._ceiling)


class Occupancy:
    """Integrates over time how many of `slots` have no sample, while it is on."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._busy = 0
        self._since: float | None = None  # None: off
        self._time = self._idle_time = 0.0

    def update(self, now: float, busy: int | None) -> None:
        """From now on so many samples are in flight; None: nobody wants any."""
        if self._since is not None:
            self._time += now - self._since
            self._idle_time += (now - self._since) * max(0.0, 1 - self._busy / self._slots)
        self._since = None if busy is None else now
        self._busy = busy or 0

    def idle_share(self) -> float:
        """Since it was asked for last; 0 when there was no time in between."""
        share = self._idle_time / self._time if self._time else 0.0
        self._time = self._idle_time = 0.0
        return share
