"""ProgressWatch: commands that wait for samples, and the error when nothing progresses."""

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
from rlsys.worker.worker_engines import WorkerEngines

POLL_SECONDS = 0.5
"""Interval at which a waiting command checks for stale engines, failures and progress."""
LOG_SECONDS = 30.0
"""Interval of log lines while groups are filtered."""
T = TypeVar("T")

log = logging.getLogger("rlsys.rollout")


class ProgressWatch:
    """Waits for samples, and raises an error if they make no progress."""

    def __init__(
        self,
        config: Config,
        buffer: RolloutBuffer,
        engines: WorkerEngines,
        runner: SampleRunner,
        selection: Selection,
        is_preempted: Callable[[], bool],
        censor_overdue: Callable[[Collection[SampleGroup], int], Awaitable[None]],
    ) -> None:
        """Create a watch.

        Args:
            is_preempted: returns whether to end a wait early.
            censor_overdue: censors groups; called with them and the number of train steps in the engines' weights.
        """
        self._config = config
        self._buffer = buffer
        self._engines = engines
        self._runner = runner
        self._selection = selection
        self._is_preempted = is_preempted
        self._censor_overdue = censor_overdue
        self._filtered = 0
        """Number of filtered groups when the wait for a step's groups started."""
        self._budget = config.trainer.token_budget * config.parallel.data_parallel
        """Number of tokens of a full micro-batch on every trainer rank."""

    async def wait_for_groups(self, trained_steps: int) -> None:
        """Wait until there are enough groups for the step after `trained_steps`, or the wait is preempted."""
        count = self._config.rollout.groups_per_step
        self._filtered = self._buffer.counts[GroupState.FILTERED]
        await self.watch(self._poll_groups(trained_steps), f"{count} groups of a train step")

    async def _poll_groups(self, trained_steps: int) -> None:
        loop = asyncio.get_running_loop()
        logged = 0
        next_line = loop.time() + LOG_SECONDS
        while self._selection.groups(trained_steps) is None and not self._is_preempted():
            await self._poll_overdue(trained_steps)
            filtered = self._buffer.counts[GroupState.FILTERED] - self._filtered
            if filtered > logged and loop.time() >= next_line:
                logged = filtered
                next_line = loop.time() + LOG_SECONDS
                log.warning(
                    "step %d: algo.planners filtered %d groups during the wait for groups, such as those with equal "
                    "rewards: prompts are too hard or too easy, or the reward ignores the response",
                    trained_steps + 1,
                    filtered,
                )

    async def wait_for_part(self, trained_steps: int, excluded: Collection[int]) -> list[int]:
        """Wait for groups of the next step that fill a micro-batch of every trainer rank.

        Args:
            excluded: ids of groups that do not count.

        Returns:
            the ids of the groups; empty if the wait is preempted, or all groups of the step are ready.
        """
        return await self.watch(self._poll_part(trained_steps, excluded), "groups of a train step")

    async def _poll_part(self, trained_steps: int, excluded: Collection[int]) -> list[int]:
        while self._selection.groups(trained_steps) is None and not self._is_preempted():
            fresh = [g for g in self._selection.certain() if g.group_id not in excluded]
            sequences = (q for g in fresh for s in g.samples for q in s.trained_sequences)
            if sum(len(q.prompt_ids) + q.tokens for q in sequences) >= self._budget:
                return [g.group_id for g in fresh]
            await self._poll_overdue(trained_steps)
        return []

    async def wait_until_interruptible(self, trained_steps: int, members: Collection[str] | None) -> None:
        """Wait until no sample is protected from interruption, or the wait is preempted.

        Args:
            members: URLs of the engines whose samples count; None: all.
        """
        await self.watch(self._poll_protected(trained_steps, members), "samples that must not be interrupted")

    async def _poll_protected(self, trained_steps: int, members: Collection[str] | None) -> None:
        while self._selection.has_protected_samples(trained_steps, members) and not self._is_preempted():
            await self._poll()

    async def _poll_overdue(self, trained_steps: int) -> None:
        if late := self._runner.overdue():
            await self._censor_overdue(late, trained_steps)
        await self._poll()

    async def _poll(self) -> None:
        """Wait for a decision on a group, at most POLL_SECONDS, because deadlines and stale engines set no event."""
        self._runner.raise_failure()
        self._runner.wake.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._runner.wake.wait(), POLL_SECONDS)

    async def watch(self, work: Awaitable[T], description: str) -> T:
        """Return the result of `work`.

        Args:
            description: what the work waits for, for the error.

        Raises:
            RunError: a sample failed, or neither a token nor a reward arrived for rollout.stall_timeout (plus
                the start time of an engine while none serves).
        """
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        stall_timeout = self._config.rollout.stall_timeout
        progress, last_progress = self._progress(), loop.time()
        try:
            while not task.done():
                self._runner.raise_failure()
                await asyncio.wait({task}, timeout=min(POLL_SECONDS, stall_timeout / 4))
                no_engine = not self._engines.stats()["engines_serving"]
                limit = stall_timeout + (self._config.start_seconds if no_engine else 0.0)
                current = self._progress()
                if current != progress:
                    progress, last_progress = current, loop.time()
                elif not task.done() and loop.time() - last_progress > limit:
                    raise self._stall_error(description, no_engine=no_engine)
            self._runner.raise_failure()
            return task.result()
        finally:
            task.cancel()

    def _stall_error(self, description: str, *, no_engine: bool) -> RunError:
        limit = f"rollout.stall_timeout = {self._config.rollout.stall_timeout:g} s"
        if no_engine:
            limit += f" and engine.start_timeout = {self._config.start_seconds:g} s"
        engines = ", ".join(f"{url} {state}" for url, state in self._engines.engine_states().items())
        return RunError(
            f"no token and no reward for {limit}; waiting for {description}: {self.missing()}; engines: {engines}"
        )

    def _progress(self) -> tuple[float, int]:
        """Return a value that changes with any progress."""
        return self._engines.stats()["received_tokens"], self._runner.settled_samples

    def missing(self) -> str:
        """Describe the oldest unfinished groups."""
        waiting = [(g, [s for s in g.samples if not is_settled(s)]) for g in self._buffer.active()]
        examples = "; ".join(
            f"group {g.group_id}: "
            + ", ".join(f"sample {s.sample_id} {s.status} with {s.all_tokens} tokens" for s in unfinished[:3])
            for g, unfinished in waiting[:3]
        )
        unfinished = f"{len(waiting)} unfinished ({examples})" if examples else "none unfinished"
        filtered = self._buffer.counts[GroupState.FILTERED] - self._filtered
        filtered_note = f", {filtered} filtered since the last step" if filtered > 0 else ""
        return f"{len(self._buffer.ready())} groups are ready{filtered_note}, {unfinished}"
