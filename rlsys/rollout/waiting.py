"""Commands that wait for samples: until when, whether anything gets further, and whom they wait for when nothing
does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import TypeVar

from rlsys.config import Config
from rlsys.core.errors import RunError
from rlsys.core.types import GroupState, SampleGroup
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.rollout.runner import SampleRunner, is_settled
from rlsys.rollout.selection import Selection
from rlsys.router.engines import Engines

LOOK_SECONDS = 0.5
"""How often a waiting command looks for stale engines, failures and progress."""
TOLD_SECONDS = 30.0
"""Between two lines in the log while groups are filtered."""
T = TypeVar("T")

log = logging.getLogger("rlsys.rollout")


class Waiting:
    """Ends a wait in which nothing gets further."""

    def __init__(
        self,
        config: Config,
        buffer: RolloutBuffer,
        router: Engines,
        runner: SampleRunner,
        selection: Selection,
        called_away: Callable[[], bool],
        give_up: Callable[[Collection[SampleGroup], int], Awaitable[None]],
    ) -> None:
        """`called_away`: whether something else comes first. `give_up`: what to do with groups that are overdue, and
        the train steps that the weights contain."""
        self._config = config
        self._buffer = buffer
        self._router = router
        self._runner = runner
        self._selection = selection
        self._called_away = called_away
        self._give_up = give_up
        self._filtered = 0
        """Groups that had been filtered when the wait for a step's groups began."""
        self._budget = config.trainer.token_budget * config.parallel.data_parallel
        """Tokens of a full micro-batch on every trainer rank."""

    async def for_groups(self, trained_steps: int) -> None:
        """Until there are enough for a step, or something else comes first."""
        wanted = self._config.rollout.groups_per_step
        self._filtered = self._buffer.counts[GroupState.FILTERED]
        await self.watched(self._until_groups(trained_steps), f"{wanted} groups of a train step")

    async def _until_groups(self, trained_steps: int) -> None:
        loop = asyncio.get_running_loop()
        told, next_line = 0, loop.time() + TOLD_SECONDS
        while self._selection.groups(trained_steps) is None and not self._called_away():
            await self._look_again(trained_steps)
            filtered = self._buffer.counts[GroupState.FILTERED] - self._filtered
            if filtered > told and loop.time() >= next_line:
                told, next_line = filtered, loop.time() + TOLD_SECONDS
                log.warning(
                    "step %d waits for its groups: %d groups were filtered meanwhile (algo.planners keep none whose "
                    "rewards are all equal): prompts too hard or too easy, or a reward that does not see the answer",
                    trained_steps,
                    filtered,
                )

    async def for_part(self, trained_steps: int, given: Collection[int]) -> list[int]:
        """Ids of groups for the trainer to begin with, without those `given` before; none when a take would not
        wait."""
        return await self.watched(self._until_part(trained_steps, given), "groups of a train step")

    async def _until_part(self, trained_steps: int, given: Collection[int]) -> list[int]:
        while self._selection.groups(trained_steps) is None and not self._called_away():
            fresh = [g for g in self._selection.certain() if g.group_id not in given]
            sequences = (q for g in fresh for s in g.samples for q in s.trained_sequences)
            if sum(len(q.prompt_ids) + q.tokens for q in sequences) >= self._budget:
                return [g.group_id for g in fresh]
            await self._look_again(trained_steps)
        return []

    async def until_interruptible(self, trained_steps: int, members: Collection[str] | None) -> None:
        """Until no sample (in engines of these URLs) must go on, or something else comes first."""
        await self.watched(self._until_nobody_must(trained_steps, members), "samples that must go on")

    async def _until_nobody_must(self, trained_steps: int, members: Collection[str] | None) -> None:
        while self._selection.must_go_on(trained_steps, members) and not self._called_away():
            await self._look()

    async def _look_again(self, trained_steps: int) -> None:
        if late := self._runner.overdue():
            await self._give_up(late, trained_steps)
        await self._look()

    async def _look(self) -> None:
        """After a group has settled, or LOOK_SECONDS: time, a sample's end and a stale engine wake nobody."""
        self._runner.raise_failure()
        self._runner.wake.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._runner.wake.wait(), LOOK_SECONDS)

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
            + ", ".join(f"sample {s.sample_id} {s.status} with {s.all_tokens} tokens" for s in rest[:3])
            for g, rest in waiting[:3]
        )
        rest = f"{len(waiting)} unfinished ({shown})" if shown else "none unfinished"
        filtered = self._buffer.counts[GroupState.FILTERED] - self._filtered
        told = f", {filtered} filtered since the last step" if filtered > 0 else ""
        return f"{len(self._buffer.ready())} groups are ready{told}, {rest}"

    def _engines(self) -> str:
        return ", ".join(f"{url} {state}" for url, state in self._router.engine_states().items())
