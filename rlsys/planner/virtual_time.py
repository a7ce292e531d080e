"""Event loop with a virtual clock that advances to the next event, so that waiting takes no real time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


REAL_SECONDS = 10.0
"""Largest real time to wait for an event from a thread if no task waits for a time, for example at the loop's end."""


class _VirtualSelector(selectors.DefaultSelector):
    """Selector that advances the clock instead of waiting."""

    virtual_now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Return the ready events. If there are none, advance the clock by `timeout` seconds.

        Raises:
            RuntimeError: no task waits for a time, and no event occurs within REAL_SECONDS.
        """
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is not None:
            self.virtual_now += timeout
        elif not (events := super().select(REAL_SECONDS)):
            raise RuntimeError(f"deadlock: all tasks wait, and no event occurred in {REAL_SECONDS:g} s")
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop in which waiting takes exactly the requested virtual time, and no real time.

    The order of events does not depend on the speed of the machine.
    """

    def __init__(self) -> None:
        self._virtual_selector = _VirtualSelector()
        super().__init__(self._virtual_selector)

    def time(self) -> float:
        """Return the virtual time."""
        return self._virtual_selector.virtual_now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Call the function in the loop's thread, so that its duration does not depend on the machine's speed."""
        return self.create_task(_call(func, args))


async def _call(func: Callable[..., T], args: tuple[Any, ...]) -> T:
    """Return `func(*args)`."""
    return func(*args)


def run_virtual(body: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time.

    Raises:
        RuntimeError: all tasks wait for events that do not occur.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(body)
