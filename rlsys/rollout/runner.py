"""SampleRunner: the tasks of samples, from the first token to the reward, and how many of them there may be.

A sample has one task: it waits in the router (at the gate, in an engine, again at the gate), then for its
score. An interrupt does not end the task: the router parks the sample inside it. Slots bound the samples that
are not done with generating; admission bounds the groups by age (admission.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Collection, Coroutine, Iterable
from typing import Any

from rlsys.algo.planners import Accept, Decision, Hold, More
from rlsys.config import Config
from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.core.imports import source_location
from rlsys.core.seeds import sample_seed
from rlsys.core.texts import shorten, valid_text
from rlsys.core.types import LONGEST_REASON, CensorCause, GroupState, Prompt, Sample, SampleGroup, Status
from rlsys.generators.censoring import REFUSED, FailedSamples, boundary, named
from rlsys.ledger.buffer import DEAD, RolloutBuffer
from rlsys.ledger.commit_scheduler import CommitScheduler
from rlsys.planning.planning import Planning
from rlsys.planning.teacher import AWAY, EngineTeacher
from rlsys.rollout.beside import Means
from rlsys.rollout.occupancy import Occupancy
from rlsys.rollout.schedule import admission_capacity
from rlsys.worker.run_replay import ReplaySchedule
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.scoring import set_turn_rewards
from rlsys.worker.streams import Streams
from rlsys.worker.workers import Workers

CENSORED_STEPS = 2
"""Train steps' worth of groups censored in a row that stop the run: then it is no accident."""

AT_ONCE = 512
"""Samples that start in one turn of the loop. At 50,000 slots a step starts tens of thousands, some seconds of work:
meanwhile others are heard, and the first of them generate."""

log = logging.getLogger("rlsys.rollout")


class SampleRunner:
    """Owns the tasks and the slots; groups and their states are the buffer's.

    `wake` is set when a group settles and when something breaks. What breaks a task is kept, and raised to the
    trainer by `raise_failure`: nothing that goes wrong in the background is swallowed.
    """

    def __init__(
        self,
        config: Config,
        buffer: RolloutBuffer,
        commits: CommitScheduler,
        planning: Planning,
        streams: Streams | Workers,
        repeat: ReplaySchedule | None = None,
        spans: SampleSpans | None = None,
    ) -> None:
        """`repeat`: says which groups are let in, whatever slots and ages. `spans`: somebody else's to stop."""
        self._spans = spans or SampleSpans(None)
        self._config = config
        self._buffer = buffer
        self._commits = commits
        self._streams = streams
        self._repeat = repeat
        self._planning = planning
        self.wake = asyncio.Event()
        self.beside_rewards = Means()
        """What reward functions said beside the rewards, since the last take."""
        self.settled = 0
        """Samples that got a reward, or a reason for none."""
        self.censored = Counter[CensorCause]()
        """Samples that got a reason for none, by cause."""
        self._failures = FailedSamples(config.rollout.max_failed_share, config.samples_per_step)
        self._failure: BaseException | None = None
        self._trained_steps: int | None = None  # train steps in the engines' weights; None: start nothing
        self._held: deque[SampleGroup] = deque()  # active since before a restart, not let in again yet
        self._pending: deque[tuple[SampleGroup, Sample]] = deque()  # let in, waiting for a slot
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._generating: set[int] = set()  # ids of samples that hold a slot
        self._filling: asyncio.Handle | None = None  # the turn of the loop that starts more of them
        self._prompts: dict[int, Prompt] = {}  # of groups that were let in
        self._concluding: set[int] = (
            set()
        )  # ids of groups whose samples are all settled, until they are decided
        self._censored_in_row = 0
        self._admitted_at: dict[int, float] = {}  # of groups that were let in, on the loop's clock
        self.slots = config.slots
        """Samples that may be generating at once; fewer take effect as samples finish."""
        self.occupancy = Occupancy(config.samples_per_step)
        commits.on_failure = self._fail

    def advance(self, trained_steps: int) -> None:
        """Start what may start with weights of this many train steps in the engines."""
        self._trained_steps = trained_steps
        if self._repeat is not None:
            self._repeat.advance(trained_steps)
            self._streams.advance(trained_steps)
        self._fill()
        self._note_occupancy()

    def pause(self) -> None:
        """Nobody wants samples until the next `go`: no idle slot counts."""
        self.occupancy.update(asyncio.get_running_loop().time(), None)

    async def reset(self) -> None:
        """After an interrupt: end all tasks; what is active waits to be let in again, start nothing before `go`."""
        self._trained_steps = None
        await self.stop(_tasks_of(self._buffer.active()))
        self._pending.clear()
        self._prompts.clear()
        self._admitted_at.clear()
        self._held = deque(self._buffer.active())
        self._planning.restart()

    async def drop(self, groups: Collection[SampleGroup], state: GroupState) -> None:
        """After an interrupt: end the tasks of these groups and move them to a state that nobody trains."""
        await self.stop(_tasks_of(groups))
        for group in groups:
            self._prompts.pop(group.group_id, None)
            self._admitted_at.pop(group.group_id, None)
            if group.state is GroupState.ACTIVE:
                for sample in group.samples:
                    self._spans.end(sample, sample.censor_reason or f"its group is {state.value}")
                self._planning.close(group, rewarded=False)
            self._buffer.finish(group, state)
        self._save_planning()
        self._pending = deque(p for p in self._pending if p[0].state is GroupState.ACTIVE)
        self._held = deque(g for g in self._held if g.state is GroupState.ACTIVE)

    async def censor_overdue(self, groups: Collection[SampleGroup]) -> None:
        """After an interrupt: what of these groups has not finished meanwhile is given up."""
        reason = f"not finished within rollout.group_deadline = {self._config.rollout.group_deadline:g} s"
        late = [g for g in groups if g.state is GroupState.ACTIVE]
        for sample in (s for g in late for s in g.samples if not is_settled(s)):
            sample.censor(CensorCause.DEADLINE, reason)
            self.censored[CensorCause.DEADLINE] += 1
        prompts = {g.group_id: self._name(g) for g in late}
        await self.drop(late, GroupState.CENSORED)
        for group in late:
            self._watch_censored(group, prompts[group.group_id], reason)

    async def stop(self, sample_ids: Collection[int]) -> None:
        """End tasks. Only after an interrupt: no sample is in an engine."""
        tasks = [self._tasks[i] for i in sample_ids if i in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._generating.difference_update(sample_ids)

    def overdue(self) -> list[SampleGroup]:
        """Groups that have had rollout.group_deadline seconds and are not finished."""
        limit = self._config.rollout.group_deadline
        if limit is None:
            return []
        now = asyncio.get_running_loop().time()
        late = [g for g, start in self._admitted_at.items() if now - start > limit]
        return [self._buffer.groups[g] for g in late if g not in self._planning.waiting()]

    def _note_occupancy(self) -> None:
        self.occupancy.update(asyncio.get_running_loop().time(), len(self._generating))

    def raise_failure(self) -> None:
        if isinstance(self._failure, RlsysError):
            raise self._failure
        if self._failure is not None:
            error = self._failure
            raise RunError(f"rollout: {type(error).__name__}: {error}{source_location(error)}") from error

    def _fill(self) -> None:
        """Start samples while slots are free, oldest group first; new groups as admission allows."""
        step = self._trained_steps
        if step is None:
            return
        try:
            for _ in range(AT_ONCE):
                if not (self._has_slot() and (self._pending or self._admit(step))):
                    break
                if self._pending:
                    self._start_next()
            else:
                self._fill_soon()
                return
            if self._prompts and self._prompts.keys() <= self._planning.waiting():
                self._planning.close_round()
                self._decide_released()
        except RlsysError as e:  # called from tasks and commands alike: the next command tells it
            self._fail(e)

    def _fill_soon(self) -> None:
        if self._filling is None:
            self._filling = asyncio.get_running_loop().call_soon(self._fill_on)

    def _fill_on(self) -> None:
        self._filling = None
        self._fill()
        if self._trained_steps is not None:
            self._note_occupancy()

    def _has_slot(self) -> bool:
        return self._repeat is not None or len(self._generating) < self.slots

    def _may_admit(self, trained_steps: int) -> bool:
        if self._repeat is not None:
            return self._repeat.admits(self._held[0].group_id if self._held else self._buffer.next_group_id)
        dead = sum(self._buffer.counts[state] for state in DEAD)
        accepted = self._buffer.next_group_id - dead - len(self._held)
        capacity = admission_capacity(
            max_staleness=self._config.rollout.max_staleness,
            trained_steps=trained_steps,
            groups_per_step=self._config.rollout.groups_per_step,
            accepted=accepted,
        )
        return capacity > 0

    def _admit(self, trained_steps: int) -> bool:
        """Let one group in: one from before a restart, else a new one."""
        if not self._may_admit(trained_steps):
            return False
        if self._held:
            group = self._held.popleft()
            prompt = self._planning.again(group)
        else:
            group_id = self._buffer.next_group_id
            prompt = self._planning.prompt(group_id)
            group = self._buffer.issue(prompt, self._seeds(group_id, range(self._planning.size)))
            self._save_planning()
            self._commits.flush_soon()
        self._buffer.replay_log.record_admission(group)
        self._prompts[group.group_id] = prompt
        self._admitted_at[group.group_id] = asyncio.get_running_loop().time()
        if self._planning.wants_probes(group):
            self._watch(_exploring(group), self._explore(group))
        waiting = [s for s in group.samples if not is_settled(s)]
        self._pending.extend((group, s) for s in waiting)
        if not waiting:  # a restart came between its last reward and its decision
            self._watch(group.samples[-1].sample_id, self._conclude(group))
        return True

    def _seeds(self, group_id: int, places: Iterable[int]) -> list[int]:
        return [sample_seed(self._config.run.seed, group_id, i) for i in places]

    def _save_planning(self) -> None:
        """With the decisions that changed it: both are committed by the same flush."""
        if state := self._planning.state():
            self._buffer.set_note("planning", state)

    def _start_next(self) -> None:
        """The next sample; those of its group with it where they have to be together, whatever slots there are."""
        group, sample = self._pending.popleft()
        self._start(group, sample)
        while self._streams.gang_start and self._pending and self._pending[0][0] is group:
            self._start(*self._pending.popleft())

    def _start(self, group: SampleGroup, sample: Sample) -> None:
        if not sample.status.terminal:
            self._generating.add(sample.sample_id)
        self._watch(sample.sample_id, self._run(group, sample))

    def _watch(self, sample_id: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"sample {sample_id}")
        self._tasks[sample_id] = task
        task.add_done_callback(lambda t: self._ended(sample_id, t))

    async def _run(self, group: SampleGroup, sample: Sample) -> None:
        """One sample to its reward, or to the reason why it has none."""
        prompt = self._prompts[group.group_id]
        self._spans.begin(sample)
        if not sample.status.terminal:
            await self._streams.generate(sample, prompt)
            self._generating.discard(sample.sample_id)
            self._fill()
            self._note_occupancy()
            if self._config.rollout.max_resumes is not None:
                self.wake.set()  # a take may have waited for this one alone
        if sample.status is not Status.CENSORED and self._planning.teacher is not None:
            await self._ask(self._planning.teacher, sample)
        if sample.status is not Status.CENSORED:
            verdict = await self._streams.score(sample, prompt)
            reason = verdict.reason
            if reason is None and verdict.turns is not None:
                reason = set_turn_rewards(sample, verdict.turns)
            if reason is None:
                sample.reward, sample.named_rewards = verdict.reward, verdict.parts
                sample.answer = verdict.answer
                self.beside_rewards.add(verdict.figures)
            else:
                sample.censor(verdict.cause, reason)
        self.settled += 1
        self._settle_sample(group, sample)
        self._spans.end(sample, sample.censor_reason)
        if all(is_settled(s) for s in group.samples):
            await self._conclude(group)

    def _settle_sample(self, group: SampleGroup, sample: Sample) -> None:
        """Count it. Raises RunError when too many samples failed in ways that nobody foresaw."""
        self._failures.settle(1)
        if sample.status is Status.CENSORED:
            cause = sample.censor_cause or CensorCause.EXCEPTION
            self.censored[cause] += 1
            if cause is CensorCause.EXCEPTION:
                self._failures.add(1, group.prompt_index, sample.censor_reason or "")

    def begin_step(self) -> None:
        """A train step has taken its groups: samples that fail from now on are of the next one."""
        self._failures.begin_step()

    def _name(self, group: SampleGroup) -> str:
        """Of its prompt, for messages."""
        prompt = self._prompts.get(group.group_id)
        return f"prompt {group.prompt_index}" if prompt is None else named(prompt)

    async def _explore(self, group: SampleGroup) -> None:
        """The group gets as many further samples as its prompt is worth."""
        more = await self._planning.explore(self._prompts[group.group_id], group)
        if more:
            self._grow(group, More(more))
        else:
            self._save_planning()
            self._commits.flush_soon()

    async def _explored(self, group: SampleGroup) -> bool:
        """Once its size is known: whether all of its samples are there, and settled."""
        if (task := self._tasks.get(_exploring(group))) is not None:
            await asyncio.wait({task})
            if task.cancelled() or task.exception() is not None:  # which ends the run
                return False
        return all(is_settled(s) for s in group.samples)

    async def _ask(self, teacher: EngineTeacher, sample: Sample) -> None:
        """What the teacher says of it is saved before it has a reward: nobody asks twice."""
        with boundary(f"{named(self._prompts[sample.group_id])}, sample {sample.sample_id}") as item:
            reason = await teacher.ask(sample)
        if item.censored is not None:
            sample.censor(item.censored.cause, item.censored.reason)
        elif reason is not None:
            sample.censor(CensorCause.TEACHER, reason)
        else:
            self._commits.save([sample])
            self._commits.flush_soon()

    async def _conclude(self, group: SampleGroup) -> None:
        """Every sample of the group has its reward or its reason: what becomes of it. Once: a worker tells of several
        samples together, and each of their tasks finds all settled."""
        if group.group_id in self._concluding or group.group_id not in self._prompts:
            return
        self._concluding.add(group.group_id)
        try:
            await self._decide_whole(group)
        finally:
            self._concluding.remove(group.group_id)

    async def _decide_whole(self, group: SampleGroup) -> None:
        if not await self._explored(group):
            return
        reason = next((s.censor_reason for s in group.samples if s.status is Status.CENSORED), None)
        if reason is None:
            reason = await self._ask_planners(group)
        if reason is None:
            self._decide(group)
        else:
            self._settle(group, GroupState.CENSORED, reason)

    async def _ask_planners(self, group: SampleGroup) -> str | None:
        """What needs the whole group: why it cannot be used; None: it can."""
        prompt = self._prompts[group.group_id]
        with boundary(f"{named(prompt)}, group {group.group_id}") as item:
            reason = await self._planning.reward(prompt, group, self._buffer.load)
            if reason is None:
                await self._planning.score_prompt(group)
                await self._planning.repair(prompt, group, self._buffer.load)
                await self._planning.guide(prompt, group, self._buffer.load)
            return reason
        assert item.censored is not None
        if item.censored.cause is CensorCause.EXCEPTION:
            self._failures.add(len(group.samples), group.prompt_index, item.censored.reason)
        return item.censored.reason

    def _decide(self, group: SampleGroup) -> None:
        """What becomes of a group that has its rewards, and of those that have waited for it."""
        self._carry_out(group, self._planning.decide(group))
        self._decide_released()

    def _decide_released(self) -> None:
        while released := self._planning.released():
            group = self._buffer.groups[released[0]]
            self._carry_out(group, self._planning.decide(group))

    def _carry_out(self, group: SampleGroup, decision: Decision) -> None:
        if isinstance(decision, More):
            self._grow(group, decision)
        elif isinstance(decision, Hold):
            self._fill()  # which closes the round when nothing else can come
        else:
            self._settle(group, GroupState.READY if isinstance(decision, Accept) else GroupState.FILTERED)

    def _settle(self, group: SampleGroup, state: GroupState, reason: str | None = None) -> None:
        """The group is decided. `reason`: why it is censored."""
        name = self._name(group)
        del self._prompts[group.group_id], self._admitted_at[group.group_id]
        self._planning.close(group, rewarded=reason is None, kept=state is GroupState.READY)
        self._buffer.finish(group, state)
        self._save_planning()
        self._commits.flush_soon()
        self._watch_censored(group, name, reason)
        self._fill()  # a filtered or a censored group makes room
        self.wake.set()

    def _grow(self, group: SampleGroup, more: More) -> None:
        """The group gets further samples, ahead of all that wait: its siblings are done and grow old."""
        places = range(len(group.samples), len(group.samples) + more.samples)
        seeds = self._seeds(group.group_id, places)
        samples = self._buffer.grow(group, seeds, more.prompt_ids, more.prefixes)
        self._save_planning()
        self._commits.flush_soon()
        self._pending.extendleft((group, s) for s in reversed(samples))
        self._fill()

    def _watch_censored(self, group: SampleGroup, name: str, reason: str | None) -> None:
        """One censored group is counted and left out; nothing but censored groups is no run. But all groups of a
        time in which the teacher is away are censored, each after a long wait, and the next ones are not. `name`: of
        its prompt."""
        if reason is not None:
            reason = shorten(valid_text(reason), LONGEST_REASON)
            log.warning("group %d (%s) is censored: %s", group.group_id, name, reason)
            if reason.startswith(AWAY):
                return
        self._censored_in_row = 0 if reason is None else self._censored_in_row + 1
        if reason is None:
            return
        if self._censored_in_row >= CENSORED_STEPS * self._config.rollout.groups_per_step:
            kind = UserError if reason.startswith(REFUSED) else RunError
            told = reason if name in reason else f"{reason} ({name})"
            raise kind(f"the last {self._censored_in_row} groups could not be used; the last one: {told}")

    def _ended(self, sample_id: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(sample_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, RlsysError):
                log.error("sample %d", sample_id, exc_info=error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self.wake.set()


def _exploring(group: SampleGroup) -> int:
    """Key of the task that tries the group's prompt out, among those of samples."""
    return -1 - group.group_id


def _tasks_of(groups: Iterable[SampleGroup]) -> list[int]:
    """Keys of all tasks of these groups."""
    return [key for g in groups for key in (_exploring(g), *(s.sample_id for s in g.samples))]


def is_settled(sample: Sample) -> bool:
    """It has its reward, or there will never be one."""
    return sample.status is Status.CENSORED or (sample.status.terminal and sample.reward is not None)
