"""Event loop with a virtual clock that jumps to the next event, so that waiting takes no real time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


REAL_SECONDS = 10.0
"""Real-time limit for threads that the loop did not start itself, as at its own end."""


class _VirtualSelector(selectors.DefaultSelector):
    """Selector that advances the clock instead of waiting."""

    virtual_now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Return the ready events, after advancing the clock if there are none."""
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is not None:
            self.virtual_now += timeout
        elif not (events := super().select(REAL_SECONDS)):
            raise RuntimeError("deadlock: all tasks wait, and no event can occur")
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop in which waiting costs nothing, and takes exactly the requested virtual time.

    The order of events does not depend on the machine's speed.
    """

    def __init__(self) -> None:
        self._virtual_selector = _VirtualSelector()
        super().__init__(self._virtual_selector)

    def time(self) -> float:
        """Return the virtual time."""
        return self._virtual_selector.virtual_now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Call the function on the loop's own thread, so that its end does not depend on the machine's speed."""
        return self.create_task(_call(func, args))


async def _call(func: Callable[..., T], args: tuple[Any, ...]) -> T:
    return func(*args)


def run_virtual(body: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time.

    Raises:
        RuntimeError: all tasks wait for an event that cannot occur.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(body)
