"""Queue of samples that a selector deferred to an extra update in a later step. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class DeferredSamples(Generic[Item]):
    """Owner of the deferred samples. Every rank keeps the same store, because all ranks take the same groups.

    An item contains everything that a later update needs, including the advantage within the sample's own group.
    """

    def __init__(self, capacity: int, max_age: int) -> None:
        self._capacity, self._max_age = capacity, max_age
        self._items: list[tuple[int, Item]] = []
        self.expired = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, step: int, items: Iterable[Item]) -> None:
        """Store items of this train step."""
        self._items.extend((step, item) for item in items)

    def take(self, step: int) -> list[Item]:
        """Return the oldest `capacity` items if there are that many, else none. Expired items are dropped and
        counted."""
        fresh = [(added_step, item) for added_step, item in self._items if step - added_step <= self._max_age]
        self.expired += len(self._items) - len(fresh)
        count = self._capacity if len(fresh) >= self._capacity else 0
        self._items = fresh[count:]
        return [item for _, item in fresh[:count]]

    def state_dict(self, encode: Callable[[Item], Any]) -> dict[str, Any]:
        return {
            "items": [[added_step, encode(item)] for added_step, item in self._items],
            "expired": self.expired,
        }

    def load_state_dict(self, state: dict[str, Any], decode: Callable[[Any], Item]) -> None:
        self._items = [(int(added_step), decode(item)) for added_step, item in state["items"]]
        self.expired = int(state["expired"])
