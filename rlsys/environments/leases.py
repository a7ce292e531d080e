"""The episodes that a service plays: each is leased to one client, and every question may be asked again.

A lease has the id that its client chose, and each step a number. So a question whose answer was lost is asked again
and answered from memory, and no turn is played twice. What nobody steps for `idle_seconds` is closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlsys.environments.contract import Action, Environment, Episode, Opening, Refused, Step

ABANDONED = 8
"""Steps that hang and were given up, after which the process is of no use: their threads cannot be ended."""


@dataclass
class _Lease:
    episode: Episode | None = None
    opening: Opening = field(default_factory=Opening)
    steps: int = 0
    last: tuple[Action, Step] | None = None
    used: float = field(default_factory=time.monotonic)
    busy: threading.Lock = field(default_factory=threading.Lock)


class Leases:
    """Owns the episodes. Called from many threads."""

    def __init__(self, environment: Environment, most: int, idle_seconds: float) -> None:
        self._environment, self._most, self._idle = environment, most, idle_seconds
        self._leases: dict[str, _Lease] = {}
        self._lock = threading.Lock()
        self.abandoned = 0

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, lease_id: str, task: Mapping[str, Any], seed: int) -> Opening:
        """Refused: all leases are taken (503), or the environment raised (422)."""
        self._close_idle()
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                if len(self._leases) >= self._most:
                    raise Refused(503, f"all {self._most} leases are taken", 0.5)
                lease = self._leases[lease_id] = _Lease()
        with lease.busy:
            if lease.episode is None:
                try:
                    lease.episode = self._environment.open(task, seed)
                    lease.opening = lease.episode.opening
                except Exception as e:  # noqa: BLE001  (somebody else's code: whatever it raises is told)
                    self._drop(lease_id)
                    raise Refused(422, f"open raised {type(e).__name__}: {e}") from None
            lease.used = time.monotonic()
            return lease.opening

    def step(self, lease_id: str, number: int, action: Action) -> Step:
        """Turn `number`, counted from 0. Refused: no such lease (404), another turn is due (409), or the environment
        raised (422)."""
        with self._lock:
            lease = self._leases.get(lease_id)
        if lease is None:
            raise Refused(404, f"there is no lease {lease_id}")
        with lease.busy:
            if lease.episode is None:
                raise Refused(404, f"there is no lease {lease_id}")
            if lease.last is not None and number == lease.steps - 1 and lease.last[0] == action:
                return lease.last[1]
            if number != lease.steps:
                raise Refused(409, f"turn {number} of lease {lease_id}, where turn {lease.steps} is due")
            lease.used = time.monotonic()
            try:
                step = lease.episode.step(action)
            except Exception as e:  # noqa: BLE001  (as above)
                raise Refused(422, f"step raised {type(e).__name__}: {e}") from None
            lease.steps, lease.last, lease.used = lease.steps + 1, (action, step), time.monotonic()
            return step

    def close(self, lease_id: str) -> None:
        """Nothing when there is none: it was closed before."""
        lease = self._drop(lease_id)
        if lease is None:
            return
        if not lease.busy.acquire(blocking=False):
            self.abandoned += 1
            return
        episode, lease.episode = lease.episode, None
        lease.busy.release()
        if episode is not None:
            try:
                episode.close()
            except Exception as e:  # noqa: BLE001  (nobody waits for it)
                print(f"close raised {type(e).__name__}: {e}", flush=True)

    def _drop(self, lease_id: str) -> _Lease | None:
        with self._lock:
            return self._leases.pop(lease_id, None)

    def _close_idle(self) -> None:
        limit = time.monotonic() - self._idle
        with self._lock:
            idle = [i for i, lease in self._leases.items() if lease.used < limit and not lease.busy.locked()]
        for lease_id in idle:
            self.close(lease_id)
