"""Calls of several workers at once, some of which may die meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from rlsys.router.pool import PinLost

T = TypeVar("T")


class WorkerGone(PinLost):
    """Raised when a rollout worker died during a call."""


async def call_each(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Wait for calls of all workers, and return the results of those that did not die meanwhile.

    The call of an only worker is awaited directly: it takes effect at once.
    """
    if len(calls) == 1:
        try:
            return [await calls[0]]
        except WorkerGone:
            return []
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, WorkerGone):
            raise result
    return [r for r in results if not isinstance(r, BaseException)]
