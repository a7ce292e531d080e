"""SampleRunner: runs the tasks of samples, from the first token to the reward, and limits their number.

Each sample has one task. The task waits in the router until the sample has ended, then for its score. An interrupt
does not end the task: the router parks the sample, and the task waits. Slots limit the number of generating samples;
admission limits the groups by age (schedule.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rlsys.algo.planners import Accept, AddSamples, Decision, Hold
from rlsys.config import Config
from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.core.imports import source_location
from rlsys.core.seeds import sample_seed
from rlsys.core.texts import shorten, valid_text
from rlsys.core.types import LONGEST_REASON, CensorCause, GroupState, Prompt, Sample, SampleGroup, Status
from rlsys.generators.censoring import PROMPT_REFUSED, Censored, FailedSamples, boundary, prompt_name
from rlsys.ledger.buffer import DEAD, RolloutBuffer
from rlsys.ledger.commit_scheduler import CommitScheduler
from rlsys.planning.planning import Planning
from rlsys.planning.teacher import UNAVAILABLE, EngineTeacher
from rlsys.rollout.occupancy import Occupancy
from rlsys.rollout.reward_metrics import RewardMetrics
from rlsys.rollout.schedule import admission_capacity
from rlsys.worker.run_replay import ReplaySchedule
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.scoring import set_turn_rewards
from rlsys.worker.workers import Workers

CENSORED_STEPS = 2
"""The run stops after this number of consecutive censored groups, in multiples of groups_per_step."""
MAX_STARTS_PER_ITERATION = 512
"""Largest number of samples that start in one iteration of the event loop.

With 50,000 slots a step starts tens of thousands of samples, which takes seconds. Between iterations the loop
handles other events, and the first samples generate.
"""

log = logging.getLogger("rlsys.rollout")


class SampleRunner:
    """Runs samples. Owns their tasks and the slots; the buffer owns groups and their states.

    `wake` is set when a group is decided and when a task fails. The first failure is stored, and `raise_failure`
    raises it in a command of the trainer.
    """

    def __init__(
        self,
        config: Config,
        buffer: RolloutBuffer,
        commits: CommitScheduler,
        planning: Planning,
        workers: Workers,
        replay: ReplaySchedule | None = None,
        spans: SampleSpans | None = None,
    ) -> None:
        """Create a runner.

        Args:
            replay: the schedule of a replayed run, which admits groups regardless of slots and ages.
            spans: stopped by the caller.
        """
        self._spans = spans or SampleSpans(None)
        self._config = config
        self._buffer = buffer
        self._commits = commits
        self._workers = workers
        self._replay = replay
        self._planning = planning
        self.wake = asyncio.Event()
        self.reward_metrics = RewardMetrics()
        """Additional metrics of reward functions since the last take."""
        self.settled_samples = 0
        """Number of samples that have a reward or were censored."""
        self.censored = Counter[CensorCause]()
        """Number of samples without a reward, by cause."""
        self._failures = FailedSamples(config.rollout.max_failed_share, config.samples_per_step)
        self._failure: BaseException | None = None
        self._trained_steps: int | None = None
        """Number of train steps in the engines' weights; None: start no sample."""
        self._unadmitted: deque[SampleGroup] = deque()
        """Active groups from before a restart that were not admitted again yet."""
        self._pending: deque[tuple[SampleGroup, Sample]] = deque()
        """Samples of admitted groups that wait for a slot."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Sample id, or key of an exploration (_exploring) -> running task."""
        self._generating: set[int] = set()
        """Ids of the samples that hold a slot."""
        self._fill_handle: asyncio.Handle | None = None
        """Scheduled call that starts more samples."""
        self._prompts: dict[int, Prompt] = {}
        """Group id -> prompt, for admitted groups."""
        self._concluding: set[int] = set()
        """Ids of groups whose samples are all settled, while their decision is under way."""
        self._censored_in_row = 0
        self._admitted_at: dict[int, float] = {}
        """Group id -> loop time of its admission, for admitted groups."""
        self.slots = config.slots
        """Largest number of concurrently generating samples. A lower value takes effect as samples finish."""
        self.occupancy = Occupancy(config.samples_per_step)
        commits.on_failure = self._fail

    def advance(self, trained_steps: int) -> None:
        """Start samples as admission and slots allow.

        Args:
            trained_steps: number of train steps in the engines' weights.
        """
        self._trained_steps = trained_steps
        if self._replay is not None:
            self._replay.advance(trained_steps)
            self._workers.advance(trained_steps)
        self._fill()
        self._update_occupancy()

    def pause(self) -> None:
        """Stop counting idle slots until the next `advance`, because no samples are needed."""
        self.occupancy.update(asyncio.get_running_loop().time(), None)

    async def reset(self) -> None:
        """End all tasks after an interrupt. No sample starts before `advance`, which admits active groups again."""
        self._trained_steps = None
        await self.stop(_tasks_of(self._buffer.active()))
        self._pending.clear()
        self._prompts.clear()
        self._admitted_at.clear()
        self._unadmitted = deque(self._buffer.active())
        self._planning.restart()

    async def drop(self, groups: Collection[SampleGroup], state: GroupState) -> None:
        """End the tasks of these groups, and move the groups to a state that is never trained.

        Call it after an interrupt.
        """
        await self.stop(_tasks_of(groups))
        for group in groups:
            self._admitted_at.pop(group.group_id, None)
            if group.state is GroupState.ACTIVE:
                for sample in group.samples:
                    self._spans.end(sample, sample.censor_reason or f"its group is {state.value}")
                with boundary(self._group_name(group)):
                    self._planning.close(group, rewarded=False)
            self._prompts.pop(group.group_id, None)
            self._buffer.finish(group, state)
        self._save_planning()
        self._pending = deque(p for p in self._pending if p[0].state is GroupState.ACTIVE)
        self._unadmitted = deque(g for g in self._unadmitted if g.state is GroupState.ACTIVE)

    async def censor_overdue(self, groups: Collection[SampleGroup]) -> None:
        """Censor the groups, except those that are no longer active. Call it after an interrupt."""
        reason = f"not finished within rollout.group_deadline = {self._config.rollout.group_deadline:g} s"
        late = [g for g in groups if g.state is GroupState.ACTIVE]
        for sample in (s for g in late for s in g.samples if not is_settled(s)):
            sample.censor(CensorCause.DEADLINE, reason)
            self.censored[CensorCause.DEADLINE] += 1
        prompts = {g.group_id: self._name(g) for g in late}
        await self.drop(late, GroupState.CENSORED)
        for group in late:
            self._count_censored(group, prompts[group.group_id], reason)

    async def stop(self, sample_ids: Collection[int]) -> None:
        """Cancel the tasks of these samples. Call it after an interrupt, when no sample is in an engine."""
        tasks = [self._tasks[i] for i in sample_ids if i in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._generating.difference_update(sample_ids)

    def overdue(self) -> list[SampleGroup]:
        """Return unfinished groups that were admitted more than rollout.group_deadline seconds ago."""
        limit = self._config.rollout.group_deadline
        if limit is None:
            return []
        time = asyncio.get_running_loop().time()
        late = [group_id for group_id, start in self._admitted_at.items() if time - start > limit]
        return [
            self._buffer.groups[group_id] for group_id in late if group_id not in self._planning.waiting()
        ]

    def _update_occupancy(self) -> None:
        self.occupancy.update(asyncio.get_running_loop().time(), len(self._generating))

    def raise_failure(self) -> None:
        """Raise the first error of a background task as a RunError or UserError, if there is one."""
        if isinstance(self._failure, RlsysError):
            raise self._failure
        if self._failure is not None:
            error = self._failure
            raise RunError(f"rollout: {type(error).__name__}: {error}{source_location(error)}") from error

    def _fill(self) -> None:
        """Start samples while slots are free, the oldest group first, and admit new groups."""
        step = self._trained_steps
        if step is None:
            return
        try:
            for _ in range(MAX_STARTS_PER_ITERATION):
                if self._replay is None and len(self._generating) >= self.slots:
                    break
                if not self._pending and not self._admit(step):
                    break
                if self._pending:
                    self._start_next()
            else:
                if self._fill_handle is None:
                    self._fill_handle = asyncio.get_running_loop().call_soon(self._continue_fill)
                return
            if self._prompts and self._prompts.keys() <= self._planning.waiting():
                self._planning.close_round()
                self._decide_released()
        except RlsysError as e:  # called from tasks and commands: the next command raises it
            self._fail(e)

    def _continue_fill(self) -> None:
        self._fill_handle = None
        self._fill()
        if self._trained_steps is not None:
            self._update_occupancy()

    def _may_admit(self, trained_steps: int) -> bool:
        """Return whether the age limit, or the record of a replayed run, allows another group."""
        if self._replay is not None:
            next_id = self._unadmitted[0].group_id if self._unadmitted else self._buffer.next_group_id
            return self._replay.admits(next_id)
        dead = sum(self._buffer.counts[state] for state in DEAD)
        accepted = self._buffer.next_group_id - dead - len(self._unadmitted)
        capacity = admission_capacity(
            max_staleness=self._config.rollout.max_staleness,
            trained_steps=trained_steps,
            groups_per_step=self._config.rollout.groups_per_step,
            accepted=accepted,
        )
        return capacity > 0

    def _admit(self, trained_steps: int) -> bool:
        """Admit one group, groups from before a restart first. Return whether a group was admitted."""
        if not self._may_admit(trained_steps):
            return False
        if self._unadmitted:
            group = self._unadmitted.popleft()
            prompt = self._planning.restored_prompt(group)
        else:
            group_id = self._buffer.next_group_id
            prompt = self._planning.prompt(group_id)
            group = self._buffer.issue(prompt, self._seeds(group_id, range(self._planning.size)))
            self._save_planning()
            self._commits.flush_soon()
        self._buffer.replay_log.record_admission(group)
        self._prompts[group.group_id] = prompt
        self._admitted_at[group.group_id] = asyncio.get_running_loop().time()
        with boundary(self._group_name(group)) as item:
            if self._planning.needs_probes(group):
                self._start_task(_exploring(group), self._explore(group))
        self._refuse(group, item.censored)
        waiting = [s for s in group.samples if not is_settled(s)]
        self._pending.extend((group, s) for s in waiting)
        if not waiting:  # a restart occurred between its last reward and its decision
            self._start_task(group.samples[-1].sample_id, self._conclude(group))
        return True

    def _seeds(self, group_id: int, indices: Iterable[int]) -> list[int]:
        return [sample_seed(self._config.run.seed, group_id, i) for i in indices]

    def _save_planning(self) -> None:
        """Save the state of planning, so that the flush that commits a decision also commits this state."""
        if state := self._planning.state():
            self._buffer.set_note("planning", state)

    def _start_next(self) -> None:
        """Start the next pending sample; with gang start, all pending samples of its group, regardless of slots."""
        group, sample = self._pending.popleft()
        self._start(group, sample)
        while self._workers.gang_start and self._pending and self._pending[0][0] is group:
            self._start(*self._pending.popleft())

    def _start(self, group: SampleGroup, sample: Sample) -> None:
        if not sample.status.terminal:
            self._generating.add(sample.sample_id)
        self._start_task(sample.sample_id, self._run(group, sample))

    def _start_task(self, sample_id: int, work: Coroutine[Any, Any, None]) -> None:
        name = f"sample {sample_id}" if sample_id >= 0 else f"exploration of group {-1 - sample_id}"
        task = asyncio.create_task(work, name=name)
        self._tasks[sample_id] = task
        task.add_done_callback(lambda t: self._on_task_done(sample_id, t))

    async def _run(self, group: SampleGroup, sample: Sample) -> None:
        """Run one sample until it has a reward or is censored. The last sample of a group decides on the group."""
        prompt = self._prompts[group.group_id]
        self._spans.begin(sample)
        if not sample.status.terminal:
            await self._workers.generate(sample, prompt)
            self._generating.discard(sample.sample_id)
            self._fill()
            self._update_occupancy()
            if self._config.rollout.max_resumes is not None:
                self.wake.set()  # a take may wait for this sample only
        if sample.status is not Status.CENSORED and self._planning.teacher is not None:
            await self._score_with_teacher(self._planning.teacher, sample)
        if sample.status is not Status.CENSORED:
            await self._score(sample, prompt)
        self.settled_samples += 1
        self._settle_sample(group, sample)
        self._spans.end(sample, sample.censor_reason)
        if all(is_settled(s) for s in group.samples):
            await self._conclude(group)

    async def _score(self, sample: Sample, prompt: Prompt) -> None:
        """Set the sample's rewards, or censor it if scoring fails."""
        verdict = await self._workers.score(sample, prompt)
        reason = verdict.reason
        if reason is None and verdict.turns is not None:
            reason = set_turn_rewards(sample, verdict.turns)
        if reason is not None:
            sample.censor(verdict.cause, reason)
            return
        sample.reward, sample.named_rewards = verdict.reward, verdict.parts
        sample.answer = verdict.answer
        self.reward_metrics.add(verdict.metrics)

    def _settle_sample(self, group: SampleGroup, sample: Sample) -> None:
        """Count a finished sample.

        Raises:
            RunError: too many samples failed with unexpected errors.
        """
        self._failures.settle(1)
        if sample.status is Status.CENSORED:
            cause = sample.censor_cause or CensorCause.EXCEPTION
            self.censored[cause] += 1
            if cause is CensorCause.EXCEPTION:
                self._failures.add(1, group.prompt_index, sample.censor_reason or "")

    def begin_step(self) -> None:
        """Start a new window of failed samples, when a train step has taken its groups."""
        self._failures.begin_step()

    def _name(self, group: SampleGroup) -> str:
        """Return the name of the group's prompt, for messages."""
        prompt = self._prompts.get(group.group_id)
        return f"prompt {group.prompt_index}" if prompt is None else prompt_name(prompt)

    def _group_name(self, group: SampleGroup) -> str:
        """Return the name of the group, for messages."""
        return f"{self._name(group)}, group {group.group_id}"

    def _refuse(self, group: SampleGroup, censored: Censored | None) -> None:
        """Record the failure of a group in its prompt, so that the group is censored.

        Samples that have not started are censored at once, the others when the group is decided.

        Args:
            censored: the failure; None: the group has not failed.
        """
        if censored is not None and (prompt := self._prompts.get(group.group_id)) is not None:
            self._prompts[group.group_id] = replace(
                prompt, refusal=censored.reason, refusal_cause=censored.cause
            )

    def _count_failure(self, group: SampleGroup, censored: Censored) -> str:
        """Count all samples of a group as censored. Return the reason.

        Raises:
            RunError: too many samples failed with unexpected errors.
        """
        self.censored[censored.cause] += len(group.samples)
        if censored.cause is CensorCause.EXCEPTION:
            self._failures.add(len(group.samples), group.prompt_index, censored.reason)
        return censored.reason

    async def _explore(self, group: SampleGroup) -> None:
        """Add the samples that exploration assigns to the group."""
        samples: list[Sample] = []
        with boundary(self._group_name(group)) as item:
            if extra_samples := await self._planning.explore(self._prompts[group.group_id], group):
                samples = self._grow(group, AddSamples(extra_samples))
        self._refuse(group, item.censored)
        if samples:
            self._start_added(group, samples)
        else:
            self._save_planning()
            self._commits.flush_soon()

    async def _wait_explored(self, group: SampleGroup) -> bool:
        """Wait until exploration has determined the group's size. Return whether all of its samples are settled."""
        if (task := self._tasks.get(_exploring(group))) is not None:
            await asyncio.wait({task})
            if task.cancelled() or task.exception() is not None:  # the error ends the run
                return False
        return all(is_settled(s) for s in group.samples)

    async def _score_with_teacher(self, teacher: EngineTeacher, sample: Sample) -> None:
        """Request the teacher's log-probs, and save them at once, so that a restart does not repeat the request."""
        with boundary(f"{prompt_name(self._prompts[sample.group_id])}, sample {sample.sample_id}") as item:
            reason = await teacher.score(sample)
        if item.censored is not None:
            sample.censor(item.censored.cause, item.censored.reason)
        elif reason is not None:
            sample.censor(CensorCause.TEACHER, reason)
        else:
            self._commits.save([sample])
            self._commits.flush_soon()

    async def _conclude(self, group: SampleGroup) -> None:
        """Decide on a group whose samples are all settled. Tasks of several samples may call it; one decides."""
        if group.group_id in self._concluding or group.group_id not in self._prompts:
            return
        self._concluding.add(group.group_id)
        try:
            await self._decide_complete(group)
        finally:
            self._concluding.remove(group.group_id)

    async def _decide_complete(self, group: SampleGroup) -> None:
        """Reward the group and apply the planners' decision, or censor the group if a sample is censored."""
        if not await self._wait_explored(group):
            return
        reason = next((s.censor_reason for s in group.samples if s.status is Status.CENSORED), None)
        if reason is None:
            reason = await self._reward_group(group)
        if reason is None:
            self._decide(group)
            self._decide_released()
        else:
            self._settle(group, GroupState.CENSORED, reason)

    async def _reward_group(self, group: SampleGroup) -> str | None:
        """Run the rewards and planners that need the whole group.

        Returns:
            the reason if the group is unusable, otherwise None.
        """
        prompt = self._prompts[group.group_id]
        if prompt.refusal:
            return self._count_failure(group, Censored(prompt.refusal_cause, prompt.refusal))
        with boundary(self._group_name(group)) as item:
            reason = await self._planning.reward(prompt, group, self._buffer.load)
            if reason is None:
                await self._planning.score_prompt(group)
                await self._planning.repair(prompt, group, self._buffer.load)
                await self._planning.guide(prompt, group, self._buffer.load)
            return reason
        assert item.censored is not None
        return self._count_failure(group, item.censored)

    def _decide_released(self) -> None:
        """Decide on the held groups that the planners have released."""
        last_id = None
        while released := self._planning.released():
            group_id = released[0]
            if group_id not in self._prompts or group_id == last_id:
                raise self._planning.released_error(group_id)
            last_id = group_id
            self._decide(self._buffer.groups[group_id])

    def _decide(self, group: SampleGroup) -> None:
        """Decide on a group that has its rewards."""
        samples: list[Sample] = []
        with boundary(self._group_name(group)) as item:
            decision = self._planning.decide(group)
            if isinstance(decision, AddSamples):
                samples = self._grow(group, decision)
        if item.censored is None:
            self._apply(group, decision, samples)
        else:
            self._settle(group, GroupState.CENSORED, self._count_failure(group, item.censored))

    def _apply(self, group: SampleGroup, decision: Decision, samples: Sequence[Sample]) -> None:
        """Apply a decision.

        Args:
            samples: samples that an AddSamples decision has added to the group, but that have not started.
        """
        if isinstance(decision, AddSamples):
            self._start_added(group, samples)
        elif isinstance(decision, Hold):
            self._fill()  # closes the round if no other group can finish
        else:
            self._settle(group, GroupState.READY if isinstance(decision, Accept) else GroupState.FILTERED)

    def _settle(self, group: SampleGroup, state: GroupState, reason: str | None = None) -> None:
        """Apply the final decision on a group.

        Args:
            reason: why the group is censored; None: it is not.
        """
        name = self._name(group)
        with boundary(self._group_name(group)) as item:
            self._planning.close(group, rewarded=reason is None, accepted=state is GroupState.READY)
        if item.censored is not None and reason is None:
            state, reason = GroupState.CENSORED, self._count_failure(group, item.censored)
        del self._prompts[group.group_id], self._admitted_at[group.group_id]
        self._buffer.finish(group, state)
        self._save_planning()
        self._commits.flush_soon()
        self._count_censored(group, name, reason)
        self._fill()  # a filtered or censored group frees capacity
        self.wake.set()

    def _grow(self, group: SampleGroup, growth: AddSamples) -> list[Sample]:
        """Add samples to the group and return them."""
        indices = range(len(group.samples), len(group.samples) + growth.samples)
        seeds = self._seeds(group.group_id, indices)
        return self._buffer.grow(group, seeds, growth.prompt_ids, growth.prefixes)

    def _start_added(self, group: SampleGroup, samples: Sequence[Sample]) -> None:
        """Start added samples before all pending ones, because the tokens of their siblings are growing old."""
        self._save_planning()
        self._commits.flush_soon()
        self._pending.extendleft((group, s) for s in reversed(samples))
        self._fill()

    def _count_censored(self, group: SampleGroup, name: str, reason: str | None) -> None:
        """Count consecutive censored groups.

        Groups that are censored because the teacher is unreachable do not count: the teacher may come back.

        Args:
            name: name of the group's prompt.
            reason: why the group is censored; None: it is not, which resets the count.

        Raises:
            UserError: there are too many, and the last one has a refused prompt.
            RunError: there are too many, and the last one has another reason.
        """
        if reason is None:
            self._censored_in_row = 0
            return
        reason = shorten(valid_text(reason), LONGEST_REASON)
        log.warning("group %d (%s) is censored: %s", group.group_id, name, reason)
        if reason.startswith(UNAVAILABLE):
            return
        self._censored_in_row += 1
        if self._censored_in_row >= CENSORED_STEPS * self._config.rollout.groups_per_step:
            kind = UserError if reason.startswith(PROMPT_REFUSED) else RunError
            description = reason if name in reason else f"{reason} ({name})"
            raise kind(
                f"the last {self._censored_in_row} groups could not be used; the last one: {description}"
            )

    def _on_task_done(self, sample_id: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(sample_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, RlsysError):
                log.error("%s failed", task.get_name(), exc_info=error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self.wake.set()


def _exploring(group: SampleGroup) -> int:
    """Return the key of the task that explores the group's prompt. It is negative, unlike sample ids."""
    return -1 - group.group_id


def _tasks_of(groups: Iterable[SampleGroup]) -> list[int]:
    """Return the keys of all tasks of these groups."""
    return [key for g in groups for key in (_exploring(g), *(s.sample_id for s in g.samples))]


def is_settled(sample: Sample) -> bool:
    """Return whether the sample has its reward, or will never have one."""
    return sample.status is Status.CENSORED or (sample.status.terminal and sample.reward is not None)
