"""How many samples are kept in flight: a number, or a controller that holds a target (over_provision: auto).

Why a target is needed: with N'/N samples in flight a group waits N'/N - 1 steps on average (Little's law), so the
factor buys speed with age. The gain flattens while the off-policy share goes on rising.
"""

from __future__ import annotations

from typing import Literal

from rlsys.config import Config
from rlsys.config.slots import _ceiling
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.rollout.runner import SampleRunner

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
    """Owns the factor, and with it the runner's slots. Kept in the buffer over restarts."""

    def __init__(self, config: Config, buffer: RolloutBuffer, runner: SampleRunner) -> None:
        self._config = config
        self._buffer = buffer
        self._runner = runner
        saved = buffer.note("over_provision")
        auto = config.rollout.over_provision == "auto"
        self._factor = float(saved) if auto and saved is not None else config.over_provision
        runner.slots = self._slots
        self.figures = self._figures(idle_share=0.0)
        """What it was in the step taken last, for the step's metrics."""

    def steer(self, off_policy_share: float) -> None:
        """A step was taken; how it went decides how many samples are in flight during the next one."""
        self.figures = self._figures(idle_share := self._runner.occupancy.idle_share())
        r = self._config.rollout
        if r.over_provision == "auto":
            measured = off_policy_share if r.auto_hold == "off_policy" else idle_share
            ceiling = _ceiling(self._config)
            self._factor = next_factor(self._factor, r.auto_hold, r.auto_share, measured, ceiling)
        self._runner.slots = self._slots
        self._buffer.set_note("over_provision", repr(self._factor))

    @property
    def _slots(self) -> int:
        return round(self._factor * self._config.samples_per_step)

    def _figures(self, idle_share: float) -> dict[str, float]:
        return {"over_provision": self._factor, "slots": self._slots, "idle_share": idle_share}
