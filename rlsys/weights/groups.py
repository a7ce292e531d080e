"""A sender's process groups with engines, kept from push to push."""

from __future__ import annotations

from rlsys.weights.receivers import Receivers
from rlsys.weights.transports import GroupTransport


class Groups:
    """Owns one group for each set of engines that take part together: all of them, or those of a round of a rolling
    push. Making one costs a round of connections, with NCCL seconds. One that an engine leaves for another is closed.
    """

    def __init__(self, seconds: float, joining: float) -> None:
        """See GroupTransport."""
        self._seconds, self._joining = seconds, joining
        self._kept: list[GroupTransport] = []

    def of(self, receivers: Receivers) -> GroupTransport:
        """The group of those who are present, who have joined it; with fewer of them, when some go meanwhile."""
        wanted = {engine.url for engine in receivers.present}
        for group in [g for g in self._kept if g.urls != wanted and (not g.urls or g.urls & wanted)]:
            self._kept.remove(group)
            group.close()
        found = next((g for g in self._kept if g.urls == wanted), None)
        if found is None:
            found = GroupTransport(self._seconds, self._joining)
            self._kept.append(found)
        found.begin(receivers)
        return found

    def close(self) -> None:
        """Leave them all."""
        while self._kept:
            self._kept.pop().close()
