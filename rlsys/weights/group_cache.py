"""Cache of the process groups of a sending trainer rank and engines, so that later pushes reuse them."""

from __future__ import annotations

from rlsys.weights.receivers import Receivers
from rlsys.weights.transports import GroupTransport


class GroupCache:
    """Process groups: one for each set of engines that receive together, as in a round of a rolling push.

    Groups are reused because all members must connect to create one; with NCCL this takes seconds. The cache closes a
    group when one of its engines joins another group.
    """

    def __init__(self, seconds: float, join_seconds: float) -> None:
        """Create an empty cache. The arguments are those of GroupTransport."""
        self._seconds, self._join_seconds = seconds, join_seconds
        self._groups: list[GroupTransport] = []

    def get(self, receivers: Receivers) -> GroupTransport:
        """Return the group of the present engines; create it if necessary. Engines that fail to join are excluded."""
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
