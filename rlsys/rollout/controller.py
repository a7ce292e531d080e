"""OverProvision: the number of samples in flight, constant or controlled (over_provision: auto).

The factor is the number of samples in flight divided by the number of samples of a step (N'/N). A group waits
N'/N - 1 steps on average (Little's law), so a larger factor makes steps faster and tokens older. The speed saturates,
but the off-policy share keeps rising; `auto` therefore controls the off-policy share.
"""

from __future__ import annotations

from rlsys.config import Config
from rlsys.config.slots import largest_factor
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.rollout.runner import SampleRunner

GAIN = 0.5
"""Fraction of the computed correction that one step applies: a correction takes effect only some steps later."""
LARGEST_CHANGE = 1.1
"""Largest ratio of the factors of two consecutive steps."""


def next_factor(factor: float, target_share: float, measured_share: float, ceiling: float) -> float:
    """Return the over-provision factor of the next step, in [1, ceiling].

    The rule assumes an off-policy share of about 1 - 1 / factor**2, as measured with long-tailed lengths.

    Args:
        factor: factor of the last step.
        target_share: desired fraction of trained tokens that older weights sampled.
        measured_share: this fraction in the last step.
        ceiling: largest factor.
    """
    ratio = (max(1 - measured_share, 0.01) / max(1 - target_share, 0.01)) ** (GAIN / 2)
    return min(max(factor * min(max(ratio, 1 / LARGEST_CHANGE), LARGEST_CHANGE), 1.0), ceiling)


class OverProvision:
    """Controls the runner's slots. Owns the over-provision factor, which the buffer stores across restarts."""

    def __init__(self, config: Config, buffer: RolloutBuffer, runner: SampleRunner) -> None:
        self._config = config
        self._buffer = buffer
        self._runner = runner
        note = buffer.note("over_provision")
        auto = config.rollout.over_provision == "auto"
        self._factor = float(note) if auto and note is not None else config.over_provision
        runner.slots = self._slots
        self.metrics = self._current_metrics(idle_share=0.0)
        """Metrics of the last step."""

    def steer(self, off_policy_share: float) -> None:
        """Update factor, slots and metrics after a step was taken.

        Args:
            off_policy_share: fraction of the step's trained tokens that older weights sampled.
        """
        self.metrics = self._current_metrics(self._runner.occupancy.idle_share())
        r = self._config.rollout
        if r.over_provision == "auto":
            self._factor = next_factor(
                self._factor, r.auto_share, off_policy_share, largest_factor(self._config)
            )
        self._runner.slots = self._slots
        self._buffer.set_note("over_provision", repr(self._factor))

    @property
    def _slots(self) -> int:
        return round(self._factor * self._config.samples_per_step)

    def _current_metrics(self, idle_share: float) -> dict[str, float]:
        return {"over_provision": self._factor, "slots": self._slots, "idle_share": idle_share}
