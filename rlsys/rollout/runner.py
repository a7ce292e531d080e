"""SampleRunner: the tasks of samples, from the first token to the reward, and how many of them there may be.

A sample has one task: it waits in the router (at the gate, in an engine, again at the gate), then for its
score. An interrupt does not end the task: the router parks the sample inside it. Slots bound the samples that
are not done with generating; admission bounds the groups by age (admission.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection

from rlsys.config import Config
from rlsys.data import PromptSource
from rlsys.errors import RlsysError, RunError, UserError
from rlsys.rollout.admission import admission_capacity, sample_seed
from rlsys.rollout.buffer import DEAD, RolloutBuffer
from rlsys.rollout.scoring import Scorer
from rlsys.router.router import RefusedPrompt, Router
from rlsys.types import GroupState, Prompt, Sample, SampleGroup, Status

FLUSH_SECONDS = 0.2
"""Finished samples are committed together: at most this much work is done again after a crash."""
CENSORED_STEPS = 2
"""Train steps' worth of groups censored in a row that stop the run: then it is no accident."""

REFUSED = "prompt refused"

log = logging.getLogger("rlsys.rollout")


class SampleRunner:
    """Owns the tasks and the slots; groups and their states are the buffer's.

    `wake` is set when a group settles and when something breaks. What breaks a task is kept, and raised to the
    trainer by `raise_failure`: nothing that goes wrong in the background is swallowed.
    """

    def __init__(
        self, config: Config, buffer: RolloutBuffer, router: Router, source: PromptSource, scorer: Scorer
    ) -> None:
        self._config = config
        self._buffer = buffer
        self._router = router
        self._source = source
        self._scorer = scorer
        self.wake = asyncio.Event()
        self.settled = 0
        """Samples that got a reward, or a reason for none."""
        self._failure: BaseException | None = None
        self._policy_step: int | None = None  # train steps behind the engines' weights; None: start nothing
        self._held: deque[SampleGroup] = deque()  # active since before a restart, not let in again yet
        self._pending: deque[tuple[SampleGroup, Sample]] = deque()  # let in, waiting for a slot
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._generating: set[int] = set()  # ids of samples that hold a slot
        self._prompts: dict[int, Prompt] = {}  # of groups that were let in
        self._censored_in_row = 0
        self._flush_handle: asyncio.TimerHandle | None = None

    def go(self, policy_step: int) -> None:
        """Start what may start with weights of this many train steps in the engines."""
        self._policy_step = policy_step
        self._fill()

    async def reset(self) -> None:
        """After an interrupt: end all tasks; what is active waits to be let in again, start nothing before `go`."""
        self._policy_step = None
        await self.stop([s.sample_id for g in self._buffer.active() for s in g.samples])
        self._pending.clear()
        self._prompts.clear()
        self._held = deque(self._buffer.active())

    async def drop(self, groups: Collection[SampleGroup], state: GroupState) -> None:
        """After an interrupt: end the tasks of these groups and move them to a state that nobody trains."""
        await self.stop([s.sample_id for g in groups for s in g.samples])
        for group in groups:
            self._prompts.pop(group.group_id, None)
            self._buffer.finish(group, state)
        self._pending = deque(p for p in self._pending if p[0].state is GroupState.ACTIVE)
        self._held = deque(g for g in self._held if g.state is GroupState.ACTIVE)

    async def stop(self, sample_ids: Collection[int]) -> None:
        """End tasks. Only after an interrupt: no sample is in an engine."""
        tasks = [self._tasks[i] for i in sample_ids if i in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._generating.difference_update(sample_ids)

    def save_running(self) -> None:
        """Into the buffer with all tokens that running samples have got so far."""
        running = (s for g in self._buffer.active() for s in g.samples if s.sample_id in self._tasks)
        self._buffer.save(s for s in running if s.response_ids)

    def raise_failure(self) -> None:
        if isinstance(self._failure, RlsysError):
            raise self._failure
        if self._failure is not None:
            raise RunError(f"rollout: {type(self._failure).__name__}: {self._failure}") from self._failure

    def flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        self._buffer.flush()

    def _fill(self) -> None:
        """Start samples while slots are free, oldest group first; new groups as admission allows."""
        step, slots = self._policy_step, self._config.slots
        if step is None:
            return
        try:
            while len(self._generating) < slots and (self._pending or self._admit(step)):
                if self._pending:
                    self._start(*self._pending.popleft())
        except RlsysError as e:  # called from tasks and commands alike: the next command tells it
            self._fail(e)

    def _admit(self, policy_step: int) -> bool:
        """Let one group in: one from before a restart, else a new one."""
        dead = sum(self._buffer.counts[state] for state in DEAD)
        capacity = admission_capacity(
            max_staleness=self._config.rollout.max_staleness,
            policy_step=policy_step,
            groups_per_step=self._config.rollout.groups_per_step,
            accepted=self._buffer.next_group_id - dead - len(self._held),
        )
        if capacity <= 0:
            return False
        if self._held:
            group = self._held.popleft()
            prompt = self._source.train(group.prompt_index)
            if prompt.ids != group.samples[0].prompt_ids:
                raise UserError(f"data.source: prompt {prompt.index} is not what it was when its group began")
        else:
            group_id, size = self._buffer.next_group_id, self._config.rollout.group_size
            prompt = self._source.train(group_id)
            seeds = [sample_seed(self._config.run.seed, group_id, i) for i in range(size)]
            group = self._buffer.issue(prompt, seeds)
            self._flush_soon()
        self._prompts[group.group_id] = prompt
        self._pending.extend((group, s) for s in group.samples if not is_settled(s))
        return True

    def _start(self, group: SampleGroup, sample: Sample) -> None:
        if not sample.status.terminal:
            self._generating.add(sample.sample_id)
        task = asyncio.create_task(self._run(group, sample), name=f"sample {sample.sample_id}")
        self._tasks[sample.sample_id] = task
        task.add_done_callback(lambda t: self._ended(sample.sample_id, t))

    async def _run(self, group: SampleGroup, sample: Sample) -> None:
        """One sample to its reward, or to the reason why it has none."""
        prompt = self._prompts[group.group_id]
        if not sample.status.terminal:
            r = self._config.rollout
            try:
                await self._router.generate(
                    sample, max_response_tokens=r.max_response_tokens, temperature=r.temperature
                )
            except RefusedPrompt as e:
                sample.status, sample.censor_reason = Status.CENSORED, f"{REFUSED}: {e}"
            self._generating.discard(sample.sample_id)
            self._buffer.save([sample])
            self._flush_soon()
            self._fill()
        if sample.status is not Status.CENSORED:
            verdict = await self._scorer.score(prompt, sample.response_ids)
            if verdict.reason is None:
                sample.reward = verdict.reward
            else:
                sample.status, sample.censor_reason = Status.CENSORED, verdict.reason
        self._settle(group)

    def _settle(self, group: SampleGroup) -> None:
        """A sample of the group has its reward or its reason; the last one decides the group."""
        self.settled += 1
        if not all(is_settled(s) for s in group.samples):
            return
        del self._prompts[group.group_id]
        reason = next((s.censor_reason for s in group.samples if s.status is Status.CENSORED), None)
        self._buffer.finish(group, GroupState.READY if reason is None else GroupState.CENSORED)
        self._flush_soon()
        self._watch_censored(group, reason)
        self._fill()  # a censored group makes room
        self.wake.set()

    def _watch_censored(self, group: SampleGroup, reason: str | None) -> None:
        """One censored group is counted and left out; nothing but censored groups is no run."""
        self._censored_in_row = 0 if reason is None else self._censored_in_row + 1
        if reason is None:
            return
        log.warning("group %d is censored: %s", group.group_id, reason)
        if self._censored_in_row >= CENSORED_STEPS * self._config.rollout.groups_per_step:
            kind = UserError if reason.startswith(REFUSED) else RunError
            raise kind(f"the last {self._censored_in_row} groups could not be used; the last one: {reason}")

    def _ended(self, sample_id: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(sample_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, RlsysError):
                log.error("sample %d", sample_id, exc_info=error)
            self._fail(error)

    def _flush_soon(self) -> None:
        if self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush_now)

    def _flush_now(self) -> None:
        try:
            self.flush()
        except RunError as e:
            self._fail(e)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self.wake.set()


def is_settled(sample: Sample) -> bool:
    """It has its reward, or there will never be one."""
    return sample.status is Status.CENSORED or (sample.status.terminal and sample.reward is not None)
