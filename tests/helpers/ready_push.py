"""Begin a push with retries until the engines are ready, as a run does."""

from __future__ import annotations

from rlsys.core.weight_updates import EngineAddress
from rlsys.router.push import begin_when_ready
from rlsys.router.router import Router

TIMEOUT_S = 120.0


async def begin_push(router: Router, version: int) -> list[EngineAddress]:
    """Begin a push to all engines; return those that are ready.

    An engine with an open push of an earlier router ends it in the first attempt, and is ready in the next one.
    """
    return await begin_when_ready(lambda: router.begin_push(version), router, version, TIMEOUT_S)
