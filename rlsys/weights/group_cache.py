"""Cache of a sender's process groups with engines, from push to push."""

from __future__ import annotations

from rlsys.weights.receivers import Receivers
from rlsys.weights.transports import GroupTransport


class GroupCache:
    """Owns one group for each set of engines that receive together: all, or those of a round of a rolling push.

    Creating a group takes a round of connections, and with NCCL seconds. If one of its engines joins another
    group, the group is closed.
    """

    def __init__(self, seconds: float, join_seconds: float) -> None:
        """Create an empty cache. For the arguments see GroupTransport."""
        self._seconds, self._join_seconds = seconds, join_seconds
        self._groups: list[GroupTransport] = []

    def get(self, receivers: Receivers) -> GroupTransport:
        """Return the joined group of the present engines; of fewer engines if some fail meanwhile."""
        urls = {engine.url for engine in receivers.present}
        for stale in [g for g in self._groups if g.urls != urls and (not g.urls or g.urls & urls)]:
            self._groups.remove(stale)
            stale.close()
        group = next((g for g in self._groups if g.urls == urls), None)
        if group is None:
            group = GroupTransport(self._seconds, self._join_seconds)
            self._groups.append(group)
        group.begin(receivers)
        return group

    def close(self) -> None:
        """Leave all groups."""
        while self._groups:
            self._groups.pop().close()
