"""A command that waits for samples: whether anything gets further, and whom it waits for when nothing does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from rlsys.config import Config
from rlsys.errors import RunError
from rlsys.rollout.buffer import RolloutBuffer
from rlsys.rollout.runner import SampleRunner, is_settled
from rlsys.router.router import Router

LOOK_SECONDS = 0.5
"""How often a waiting command looks for stale engines, failures and progress."""
T = TypeVar("T")


class Waiting:
    """Ends a wait in which nothing gets further."""

    def __init__(self, config: Config, buffer: RolloutBuffer, router: Router, runner: SampleRunner) -> None:
        self._config = config
        self._buffer = buffer
        self._router = router
        self._runner = runner

    async def watched(self, work: Awaitable[T], what: str) -> T:
        """The result of `work`. Raises what broke a sample meanwhile, and RunError after rollout.stall_timeout
        without a token or a reward. While no engine serves, the time that one may take to start comes on top."""
        task = asyncio.ensure_future(work)
        loop, stall = asyncio.get_running_loop(), self._config.rollout.stall_timeout
        start_seconds = self._config.start_seconds
        seen, since = self._progress(), loop.time()
        try:
            while not task.done():
                self._runner.raise_failure()
                await asyncio.wait({task}, timeout=min(LOOK_SECONDS, stall / 4))
                away = not self._router.stats()["engines_serving"]
                limit = stall + (start_seconds if away else 0.0)
                if (now := self._progress()) != seen:
                    seen, since = now, loop.time()
                elif not task.done() and loop.time() - since > limit:
                    raise RunError(
                        f"no token and no reward for rollout.stall_timeout = {stall:g} s"
                        f"{f' and engine.start_timeout = {limit - stall:g} s' * away}; waiting for {what}: "
                        f"{self.missing()}; engines: {self._engines()}"
                    )
            self._runner.raise_failure()
            return task.result()
        finally:
            task.cancel()

    def _progress(self) -> tuple[float, int]:
        """Changes when anything has got further."""
        return self._router.stats()["received_tokens"], self._runner.settled

    def missing(self) -> str:
        """Who is waited for: the oldest unfinished groups."""
        waiting = [(g, [s for s in g.samples if not is_settled(s)]) for g in self._buffer.active()]
        shown = "; ".join(
            f"group {g.group_id}: "
            + ", ".join(f"sample {s.sample_id} {s.status} with {s.tokens} tokens" for s in rest[:3])
            for g, rest in waiting[:3]
        )
        rest = f"{len(waiting)} unfinished ({shown})" if shown else "none unfinished"
        return f"{len(self._buffer.ready())} groups are ready, {rest}"

    def _engines(self) -> str:
        return ", ".join(f"{url} {state}" for url, state in self._router.engine_states().items())
