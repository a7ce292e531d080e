"""Buffer and router against models of a few lines, over operations in any order that hypothesis can think of."""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlsys.core.errors import RunError, UserError
from rlsys.core.spans import VersionSpan
from rlsys.core.types import GroupState, Prompt, Sample, Segment, Status
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_ledger
from rlsys.ledger.reader import RunReader
from rlsys.ledger.store import FILE_NAME
from rlsys.planner.virtual_time import VirtualLoop
from tests.helpers.rollout_rig import abandon
from tests.helpers.router_rig import A, B, Rig, sample
from tests.helpers.router_rig import check as check_response
from tests.helpers.scripted_engine import ScriptedEngine, logprob, token

FEW = settings(max_examples=10, stateful_step_count=25)


# -- the buffer ---------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """What the buffer should hold."""

    states: list[GroupState] = field(default_factory=list)
    ids: dict[int, list[int]] = field(default_factory=dict)  # by sample
    order: list[int] = field(default_factory=list)  # of completion
    journal: dict[int, list[int]] = field(default_factory=dict)
    done: int = 0  # train steps of the trainer, which may have gone back
    pruned: int = 0
    version: int = 0


class BufferMachine(RuleBasedStateMachine):
    """A process that issues, grows, finishes, trains, forgets, and is killed between any two of these."""

    SIZE = 2

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.now = Model()
        self.committed = Model()
        self.buffer = self._opened()

    def _opened(self) -> RolloutBuffer:
        return RolloutBuffer(self.folder / FILE_NAME, "run", 4)

    def teardown(self) -> None:
        self.buffer.close()
        check_ledger(RunReader(self.folder).ledger())
        shutil.rmtree(self.folder)

    def _with(self, *states: GroupState) -> list[int]:
        return [g for g, s in enumerate(self.now.states) if s in states]

    @rule()
    def issue(self) -> None:
        number = len(self.now.states)
        group = self.buffer.issue(Prompt(number, "", [1, 2], {}), [number, number + 1])
        assert group.group_id == number
        self.now.states.append(GroupState.ACTIVE)
        self.now.ids |= {s.sample_id: [] for s in group.samples}

    @precondition(lambda self: self._with(GroupState.ACTIVE))
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2**31 - 1), max_size=5))
    def add_tokens(self, data: st.DataObject, tokens: list[int]) -> None:
        group = self.buffer.groups[data.draw(st.sampled_from(self._with(GroupState.ACTIVE)))]
        some = group.samples[data.draw(st.integers(0, self.SIZE - 1))]
        some.append(Segment(tokens, [-0.5] * len(tokens), [VersionSpan(self.now.version, 0, len(tokens))]))
        self.buffer.save([some])
        self.now.ids[some.sample_id] = list(some.response_ids)

    @precondition(lambda self: self._with(GroupState.ACTIVE))
    @rule(data=st.data(), state=st.sampled_from([GroupState.READY, GroupState.READY, GroupState.CENSORED]))
    def finish(self, data: st.DataObject, state: GroupState) -> None:
        group = self.buffer.groups[data.draw(st.sampled_from(self._with(GroupState.ACTIVE)))]
        for some in group.samples:
            some.status, some.reward = Status.FINISHED, 1.0
        self.buffer.finish(group, state)
        self._moved(group.group_id, state)

    @precondition(lambda self: self.now.order)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.now.order))
        self.buffer.finish(self.buffer.groups[number], GroupState.EXPIRED)
        self.now.order.remove(number)
        self._moved(number, GroupState.EXPIRED)

    def _moved(self, number: int, state: GroupState) -> None:
        self.now.states[number] = state
        if state is GroupState.READY:
            self.now.order.append(number)

    @rule(many=st.integers(1, 2))
    def train(self, many: int) -> None:
        """The next step: a new one takes what was ready first, a repeated one what it took."""
        step, model = self.now.done + 1, self.now
        if step not in model.journal:
            if len(model.order) < many:
                return
            chosen, model.order = model.order[:many], model.order[many:]
            self.buffer.take(step, [self.buffer.groups[g] for g in chosen])
            model.journal[step] = chosen
        _, groups = self.buffer.read_step(step)
        assert sorted(g.group_id for g in groups) == sorted(model.journal[step])
        for group in groups:
            read = self.buffer.load(group.samples)
            assert [list(s.response_ids) for s in read] == [model.ids[s.sample_id] for s in read]
            model.states[group.group_id] = GroupState.TRAINED
        model.done = step

    @rule(step=st.integers(0, 8))
    def take_out_of_turn(self, step: int) -> None:
        if step != max(self.now.journal, default=0) + 1:
            with pytest.raises(RunError, match="cannot take"):
                self.buffer.take(step, [])

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """To a checkpoint."""
        last = max(self.now.journal, default=0)
        step = data.draw(st.integers(0, last + 1))
        if not self.now.pruned <= step <= last:
            with pytest.raises(UserError):
                self.buffer.restore(step)
            return
        self.buffer.restore(step)
        self.now.done = step
        for taken_step, groups in self.now.journal.items():
            for number in groups:
                if taken_step > step:
                    self.now.states[number] = GroupState.READY

    @rule()
    def push(self) -> None:
        self.now.version += 1
        assert self.buffer.versions.new(self.now.done) == self.now.version

    @rule()
    def forget(self) -> None:
        self.buffer.prune(self.now.done)
        self.now.pruned = max(self.now.pruned, self.now.done)

    @rule()
    def commit(self) -> None:
        self.buffer.flush()
        self.committed = copy.deepcopy(self.now)

    @rule()
    def close(self) -> None:
        self.buffer.close()
        self.committed = copy.deepcopy(self.now)
        self.buffer = self._opened()

    @rule()
    def kill(self) -> None:
        abandon(self.buffer)
        self.now = copy.deepcopy(self.committed)
        self.buffer = self._opened()

    @invariant()
    def it_adds_up(self) -> None:
        self.buffer.check_counts()
        check_ledger(self.buffer.ledger())

    @invariant()
    def it_is_what_the_model_says(self) -> None:
        model = self.now
        assert self.buffer.next_group_id == len(model.states)
        assert [g.group_id for g in self.buffer.ready()] == model.order
        assert {g.group_id for g in self.buffer.active()} == set(self._with(GroupState.ACTIVE))
        for group in self.buffer.groups.values():
            assert [list(s.response_ids) for s in group.samples] == [
                model.ids[s.sample_id] for s in group.samples
            ]
        assert self.buffer.last_taken_step == max(model.journal, default=0)
        assert self.buffer.versions.newest == model.version


# -- the router ---------------------------------------------------------------------------------------------------


class RouterMachine(RuleBasedStateMachine):
    """Two engines, samples that come and go, and everything that can happen to an engine, in any order."""

    ENDS_AT = 40
    engines = Bundle("engines")

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.rig = Rig(ScriptedEngine(A), ScriptedEngine(B))
        self.samples: list[Sample] = []
        self.tasks: list[asyncio.Task[Sample]] = []
        self.watch = self.loop.create_task(self.rig.router.watch())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize(target=engines)
    def begin(self) -> Any:
        self._run(self.rig.push())
        return 0

    @initialize(target=engines)
    def second(self) -> Any:
        return 1

    @rule()
    def start(self) -> None:
        async def begin() -> None:
            number = len(self.samples)
            self.samples.append(sample(number, seed=3 + number))
            self.tasks.append(self.rig.start(self.samples[-1]))

        self._run(begin())

    @rule(seconds=st.floats(0.001, 0.5))
    def time_passes(self, seconds: float) -> None:
        self._run(asyncio.sleep(seconds))

    @rule()
    def interrupt(self) -> None:
        assert self._run(self.rig.settle())["in_flight"] == 0
        assert not any(s.status is Status.IN_FLIGHT for s in self.samples)

    @rule()
    def go_on(self) -> None:
        async def resume() -> None:
            self.rig.router.resume()

        self._run(resume())

    @rule()
    def push(self) -> None:
        if any(not e.dead for e in self.rig.engines):
            self._run(self.rig.push())

    @rule()
    def push_to_stale(self) -> None:
        if self.rig.router.stale_engines:
            self._run(self.rig.push(only_stale=True))

    @rule(which=engines)
    def die(self, which: int) -> None:
        self.rig.engines[which].die()

    @rule(which=engines)
    def restart(self, which: int) -> None:
        self.rig.engines[which].restart()

    @rule(which=engines)
    def preempt(self, which: int) -> None:
        self.rig.engines[which].preempt()

    @rule(which=engines)
    def strange_abort(self, which: int) -> None:
        self.rig.engines[which]._abort_request({"abort_all": True})

    @invariant()
    def tokens_are_those_of_their_versions(self) -> None:
        for s in self.samples:
            first = len(s.prompt_ids)
            for position, version in enumerate(s.versions()):
                if first + position != self.ENDS_AT:
                    assert s.response_ids[position] == token(s.seed, first + position, version)
                assert s.mu[position] == logprob(s.seed, first + position, version)

    @invariant()
    def a_sample_is_in_one_engine_at_a_time(self) -> None:
        for s in self.samples:
            holding = sum(
                any(r.rid.split("-")[1] == str(s.sample_id) and not r.aborted for r in e.requests.values())
                for e in self.rig.engines
                if not e.dead
            )
            assert holding <= 1

    def teardown(self) -> None:
        """All engines come back, and every sample ends as if nothing had happened."""
        try:
            self._run(self._finish())
        finally:
            for task in (self.watch, *self.tasks):
                task.cancel()
            self._run(asyncio.sleep(0))
            self.loop.close()

    async def _finish(self) -> None:
        for engine in self.rig.engines:
            engine.restart()
        for _ in range(3000):
            self.rig.router.resume()
            if self.rig.router.stale_engines or not self.rig.version:
                await self.rig.push(only_stale=bool(self.rig.version))
            if all(task.done() for task in self.tasks):
                break
            await asyncio.sleep(0.5)
        for task in self.tasks:
            task.result()
        for s in self.samples:
            check_response(s, versions=set(s.versions()), ends_at=self.ENDS_AT)
        assert (await self.rig.settle())["lost"] == 0


TestBuffer = pytest.mark.timeout(300)(BufferMachine.TestCase)
TestBuffer.settings = FEW
TestRouter = pytest.mark.timeout(300)(RouterMachine.TestCase)
TestRouter.settings = FEW
