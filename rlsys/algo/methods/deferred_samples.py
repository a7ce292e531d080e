"""Queue of samples that a selector defers to an extra update in a later step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class DeferredSamples(Generic[Item]):
    """Queue of deferred samples, the oldest first. Every rank has the same queue, because all ranks get all groups.

    An item contains everything that a later update needs, including the sample's advantage in its own group.

    Attributes:
        expired: Number of items that were dropped because of their age.
    """

    def __init__(self, capacity: int, max_age: int) -> None:
        """Create an empty queue.

        Args:
            capacity: number of items of an extra update.
            max_age: largest age of an item, in train steps.
        """
        self._capacity = capacity
        self._max_age = max_age
        self._items: list[tuple[int, Item]] = []
        self.expired = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, step: int, items: Iterable[Item]) -> None:
        """Append the items that were deferred in a train step."""
        self._items.extend((step, item) for item in items)

    def take(self, step: int) -> list[Item]:
        """Drop the expired items; remove and return the oldest `capacity` items, or none if there are fewer."""
        fresh = [(added_step, item) for added_step, item in self._items if step - added_step <= self._max_age]
        self.expired += len(self._items) - len(fresh)
        count = self._capacity if len(fresh) >= self._capacity else 0
        self._items = fresh[count:]
        return [item for _, item in fresh[:count]]

    def state_dict(self, encode: Callable[[Item], Any]) -> dict[str, Any]:
        """Return the queue as JSON values. `encode` converts an item."""
        return {
            "items": [[added_step, encode(item)] for added_step, item in self._items],
            "expired": self.expired,
        }

    def load_state_dict(self, state: dict[str, Any], decode: Callable[[Any], Item]) -> None:
        """Restore the `state_dict` of a checkpoint. `decode` converts JSON values to an item."""
        self._items = [(int(added_step), decode(item)) for added_step, item in state["items"]]
        self.expired = int(state["expired"])
