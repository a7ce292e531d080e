"""Leases: the episodes of an environment service, each of which belongs to one client.

The client chooses the id of its lease and numbers its steps. Every request may be repeated: the repetition gets the
stored response, so that no turn is played twice. An episode is closed after `idle_seconds` without a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlsys.environments.contract import Action, Environment, Episode, Opening, RequestRefused, Step

MAX_ABANDONED = 8
"""Number of closed leases with a hanging step at which the process exits, because a thread cannot be killed."""


@dataclass
class _Lease:
    episode: Episode | None = None
    opening: Opening = field(default_factory=Opening)
    steps: int = 0
    last_step: tuple[Action, Step] | None = None
    last_used: float = field(default_factory=time.monotonic)
    busy: threading.Lock = field(default_factory=threading.Lock)


class Leases:
    """The leases of an environment service. Owns the episodes. Thread-safe.

    Args:
        environment: opens the episodes.
        max_leases: largest number of leases at once.
        idle_seconds: time without a step after which an episode is closed, in seconds.

    Attributes:
        abandoned: number of leases that were closed during a hanging step.
    """

    def __init__(self, environment: Environment, max_leases: int, idle_seconds: float) -> None:
        self._environment, self._max_leases, self._idle = environment, max_leases, idle_seconds
        self._leases: dict[str, _Lease] = {}
        self._lock = threading.Lock()
        self.abandoned = 0

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, lease_id: str, task: Mapping[str, Any], seed: int) -> Opening:
        """Open an episode, or return the opening of the lease with this id.

        Args:
            lease_id: id of the lease, chosen by the client.
            task: row of the data.
            seed: seed of the episode.

        Raises:
            RequestRefused: all leases are in use (503), or the environment raised (422).
        """
        self._close_idle()
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                if len(self._leases) >= self._max_leases:
                    raise RequestRefused(503, f"all {self._max_leases} leases are in use", 0.5)
                lease = self._leases[lease_id] = _Lease()
        with lease.busy:
            if lease.episode is None:
                try:
                    lease.episode = self._environment.open(task, seed)
                    lease.opening = lease.episode.opening
                except Exception as e:  # noqa: BLE001  (user code: any exception is reported)
                    self._drop(lease_id)
                    raise RequestRefused(422, f"open raised {type(e).__name__}: {e}") from None
            lease.last_used = time.monotonic()
            return lease.opening

    def step(self, lease_id: str, number: int, action: Action) -> Step:
        """Play a turn. If the request repeats that of the last turn, return its stored result.

        Args:
            lease_id: id of the lease.
            number: number of the turn, from 0.
            action: turn of the model.

        Raises:
            RequestRefused: the lease does not exist (404), `number` is not the next turn (409), or the
                environment raised an exception (422).
        """
        with self._lock:
            lease = self._leases.get(lease_id)
        if lease is None:
            raise RequestRefused(404, f"lease {lease_id} does not exist")
        with lease.busy:
            if lease.episode is None:
                raise RequestRefused(404, f"lease {lease_id} does not exist")
            if lease.last_step is not None and number == lease.steps - 1 and lease.last_step[0] == action:
                return lease.last_step[1]
            if number != lease.steps:
                raise RequestRefused(409, f"turn {number} of lease {lease_id}: expected turn {lease.steps}")
            lease.last_used = time.monotonic()
            try:
                step = lease.episode.step(action)
            except Exception as e:  # noqa: BLE001  (as above)
                raise RequestRefused(422, f"step raised {type(e).__name__}: {e}") from None
            lease.steps, lease.last_step, lease.last_used = lease.steps + 1, (action, step), time.monotonic()
            return step

    def close(self, lease_id: str) -> None:
        """Close a lease and its episode, if the lease exists. An episode with a running step is abandoned."""
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
            except Exception as e:  # noqa: BLE001  (user code; no request waits for the result)
                print(f"close raised {type(e).__name__}: {e}", flush=True)

    def _drop(self, lease_id: str) -> _Lease | None:
        with self._lock:
            return self._leases.pop(lease_id, None)

    def _close_idle(self) -> None:
        """Close the leases that were not used for `idle_seconds`."""
        limit = time.monotonic() - self._idle
        with self._lock:
            idle_ids = [
                lease_id
                for lease_id, lease in self._leases.items()
                if lease.last_used < limit and not lease.busy.locked()
            ]
        for lease_id in idle_ids:
            self.close(lease_id)
