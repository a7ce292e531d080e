"""Circuit breaker: when a failed engine may be retried. Pure: the time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

BACK_OFF_SECONDS = 0.5
LONGEST_BACK_OFF = 30.0


@dataclass
class Breaker:
    """A circuit breaker. States and transitions:

    closed --failure--> open --after the back-off--> on trial --success--> closed '--failure--> open for longer
    """

    failures: int = 0  # in a row
    retry_at: float = 0.0

    def record_failure(self, time: float) -> None:
        """Open the breaker. The back-off doubles with each consecutive failure; failures while open do not count."""
        if self.open(time):
            return
        self.failures += 1
        self.retry_at = time + min(LONGEST_BACK_OFF, BACK_OFF_SECONDS * 2.0 ** (self.failures - 1))

    def record_success(self) -> None:
        """Close the breaker."""
        self.failures = 0

    def open(self, time: float) -> bool:
        """Return whether the breaker is open: no request may be sent."""
        return self.failures > 0 and time < self.retry_at

    def on_trial(self, time: float) -> bool:
        """Return whether the breaker is on trial: one request at a time may be sent."""
        return self.failures > 0 and time >= self.retry_at
