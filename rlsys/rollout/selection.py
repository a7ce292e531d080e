"""Selection: which groups a step takes and when it may; what the config says about age and interruptions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import takewhile

from rlsys.config import Config
from rlsys.core.types import LogProbRequest, Sample, SampleGroup
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.rollout.schedule import choose, choose_in_time, too_old
from rlsys.worker.run_replay import ReplaySchedule


class Selection:
    """Holds no state: it reads the buffer's. `repeat`: the record that decides instead. `full`: see Streams.full."""

    def __init__(
        self,
        config: Config,
        buffer: RolloutBuffer,
        repeat: ReplaySchedule | None,
        full: Callable[[], list[str]],
    ) -> None:
        self._full = full
        self._rollout = config.rollout
        self._colocated = config.launch.placement == "colocated"
        self._keeps = config.router.interruption != "abort"
        self._buffer = buffer
        self._repeat = repeat

    def groups(self, trained_steps: int) -> list[SampleGroup] | None:
        """For the step after `trained_steps`; None while there are too few, or some must be waited for."""
        if self._repeat is not None:
            return self._repeat.groups(trained_steps)
        if self._colocated and self.must_go_on(trained_steps):  # a take interrupts
            return None
        ready, wanted = self._buffer.ready(), self._rollout.groups_per_step
        if self._rollout.staleness_policy != "wait":
            return choose(ready, wanted)
        limit = self._rollout.max_staleness
        return choose_in_time(
            ready,
            self._buffer.active(),
            wanted,
            lambda g: limit - self._buffer.versions.age(g, trained_steps),
        )

    def certain(self) -> list[SampleGroup]:
        """Groups that the next step will take, whoever finishes next. Only for the plain order of completion: not
        under the staleness policy `wait`, and not for a record."""
        return self._buffer.ready()[: self._rollout.groups_per_step]

    def must_go_on(self, trained_steps: int, members: Collection[str] | None = None) -> bool:
        """Whether a sample in an engine (one of these URLs) has been resumed as often as rollout.max_resumes allows,
        or the record has more tokens of these weights."""
        if self._repeat is not None:
            return self._repeat.is_behind(trained_steps)
        if self._keeps:  # engines that keep their samples interrupt nobody
            return False
        return any(members is None or url in members for url in self._full())

    def stays_young(self, sample: Sample, done_steps: int) -> bool:
        """Whether `too_old` will leave its group. A sample without tokens may get some before its engine pauses."""
        if self._rollout.staleness_policy == "mask":
            return True
        group = self._buffer.groups.get(sample.group_id)
        if group is None:  # outside the ledger: a judge's answer
            return True
        version = group.oldest_version or self._buffer.versions.newest
        return done_steps - self._buffer.versions.trained_steps(version) <= self._rollout.max_staleness

    def too_old(self, done_steps: int) -> list[SampleGroup]:
        """Groups that no step after `done_steps` may take."""
        if self._rollout.staleness_policy == "mask":
            return []
        limit = self._rollout.max_staleness
        return [g for g in self._buffer.groups.values() if self._buffer.versions.age(g, done_steps) > limit]

    def mask_old(self, groups: list[SampleGroup], trained_steps: int) -> int:
        """Under the policy `mask`: tokens of taken groups that are not trained are marked; how many."""
        if self._rollout.staleness_policy != "mask":
            return 0
        sequences = [q for g in groups for s in g.samples for q in s.trained_sequences]
        for sequence in sequences:
            sequence.masked = too_old(
                sequence,
                self._rollout.max_staleness,
                lambda v: trained_steps - self._buffer.versions.trained_steps(v),
            )
        return sum(span.end - span.start for q in sequences for span in q.masked)

    def unscored(self, trained_steps: int) -> list[LogProbRequest]:
        """Live sequences with tokens without a score that the weights after so many train steps sampled last."""
        live = [q for g in self._buffer.groups.values() for s in g.samples for q in s.trained_sequences]
        starts = {(q.sample_id, q.sequence): self._first_unscored(q, trained_steps) for q in live}
        wanted = {q.group_id: None for q in live if starts[q.sample_id, q.sequence] is not None}
        found = [q for g in self._buffer.read_groups(wanted) for s in g.samples for q in s.trained_sequences]
        return [
            LogProbRequest(replace(q, extra_sequences=[]), start)
            for q in found
            if (start := starts.get((q.sample_id, q.sequence))) is not None
        ]

    def _first_unscored(self, sample: Sample, trained_steps: int) -> int | None:
        """First response token without a score of the run of tokens that these weights sampled last."""
        if sample.trained_prompt is not None:  # other log-probs are wanted than those of its sampling
            return None
        if not sample.spans or self._buffer.versions.trained_steps(sample.spans[-1].version) != trained_steps:
            return None
        same = takewhile(
            lambda x: self._buffer.versions.trained_steps(x.version) == trained_steps, reversed(sample.spans)
        )
        start = max(min(span.start for span in same), len(sample.behaviour))
        return start if start < sample.tokens else None
