"""An event loop whose clock jumps to the next event: hours of waiting cost nothing, and nothing is ever late."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


REAL_SECONDS = 10.0
"""For a thread that the loop waits for without having started it itself, as at its own end."""


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting, it moves the clock; but threads take the time that they take. `threads`: calls in them."""

    now = 0.0
    threads = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if self.threads:
            return super().select(None)
        if timeout is not None:
            self.now += timeout
        elif not (events := super().select(REAL_SECONDS)):
            raise RuntimeError("nothing will ever happen again")
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting costs nothing and always takes exactly as long as asked for."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """In a thread; the clock stands meanwhile."""
        future = super().run_in_executor(executor, func, *args)
        self._jumping.threads += 1
        future.add_done_callback(self._one_less)
        return future

    def _one_less(self, _: object) -> None:
        self._jumping.threads -= 1


def run_virtual(body: Coroutine[Any, Any, T]) -> T:
    """Raises RuntimeError when everything waits for something that nobody will do."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(body)
