"""When an engine that failed may be tried again. Pure: the time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

BACK_OFF_SECONDS = 0.5
LONGEST_BACK_OFF = 30.0


@dataclass
class Breaker:
    """closed --failed--> open --after the back-off--> on trial --succeeded--> closed
    '--failed--> open for longer
    """

    failures: int = 0  # in a row
    retry_at: float = 0.0

    def failed(self, now: float) -> None:
        """The back-off doubles with every failure in a row; those that come while it is open are the same one."""
        if self.open(now):
            return
        self.failures += 1
        self.retry_at = now + min(LONGEST_BACK_OFF, BACK_OFF_SECONDS * 2.0 ** (self.failures - 1))

    def succeeded(self) -> None:
        self.failures = 0

    def open(self, now: float) -> bool:
        """Nothing may be sent."""
        return self.failures > 0 and now < self.retry_at

    def on_trial(self, now: float) -> bool:
        """One request at a time may find out."""
        return self.failures > 0 and now >= self.retry_at
