"""Concurrent calls of several workers that may die during a call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from rlsys.router.pool import PinLost

T = TypeVar("T")


class WorkerGone(PinLost):
    """Raised when a rollout worker dies during a call."""


async def call_each(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Wait for all calls, and return the results of those whose worker did not die.

    A single call is awaited directly, so that it starts at once and not in the next iteration of the event loop.

    Raises:
        Exception: the first exception of a call other than WorkerGone.
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
