"""Selection: chooses the groups of a train step within the config's limits on age and interruptions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from itertools import takewhile

from rlsys.config import Config
from rlsys.core.types import LogProbRequest, SampleGroup, TokenSequence
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.rollout.schedule import choose, choose_in_time, too_old
from rlsys.worker.run_replay import ReplaySchedule


class Selection:
    """Stateless: reads the buffer.

    Args:
        replay: the schedule of a replayed run, which decides instead.
        at_max_resumes: see Streams.at_max_resumes.
    """

    def __init__(
        self,
        config: Config,
        buffer: RolloutBuffer,
        replay: ReplaySchedule | None,
        at_max_resumes: Callable[[], list[str]],
    ) -> None:
        self._at_max_resumes = at_max_resumes
        self._rollout = config.rollout
        self._colocated = config.launch.placement == "colocated"
        self._keeps = config.router.interruption != "abort"
        self._buffer = buffer
        self._replay = replay

    def groups(self, trained_steps: int) -> list[SampleGroup] | None:
        """Return the groups for the step after `trained_steps`; None if the step must wait for others."""
        if self._replay is not None:
            return self._replay.groups(trained_steps)
        if self._colocated and self.has_protected_samples(trained_steps):  # a take interrupts
            return None
        ready, count = self._buffer.ready(), self._rollout.groups_per_step
        if self._rollout.staleness_policy != "wait":
            return choose(ready, count)
        limit = self._rollout.max_staleness
        return choose_in_time(
            ready,
            self._buffer.active(),
            count,
            lambda g: limit - self._buffer.versions.age(g, trained_steps),
        )

    def certain(self) -> list[SampleGroup]:
        """Return the ready groups that the next step will take, regardless of which groups finish next.

        Valid only where steps take groups in the order of completion: not with the staleness policy `wait`, and not
        in a replay.
        """
        return self._buffer.ready()[: self._rollout.groups_per_step]

    def has_protected_samples(self, trained_steps: int, members: Collection[str] | None = None) -> bool:
        """Return whether a sample in an engine must not be interrupted.

        Protected are samples that were resumed rollout.max_resumes times and, in a replay, samples of which the
        record has more tokens of these weights.

        Args:
            trained_steps: train steps contained in the engines' weights.
            members: URLs of the engines to check; None: all.
        """
        if self._replay is not None:
            return self._replay.is_behind(trained_steps)
        if self._keeps:  # engines that keep their samples interrupt none
            return False
        return any(members is None or url in members for url in self._at_max_resumes())

    def stays_young(self, sample: TokenSequence, done_steps: int) -> bool:
        """Return whether the sample's group will not be too old after `done_steps` train steps.

        A sample without tokens counts as having tokens of the newest version: it may get some before its engine
        pauses.
        """
        if self._rollout.staleness_policy == "mask":
            return True
        group = self._buffer.groups.get(sample.group_id)
        if group is None:  # outside the ledger: a judge's answer
            return True
        version = group.oldest_version or self._buffer.versions.newest
        return done_steps - self._buffer.versions.trained_steps(version) <= self._rollout.max_staleness

    def too_old(self, done_steps: int) -> list[SampleGroup]:
        """Return the groups that no step after `done_steps` may take."""
        if self._rollout.staleness_policy == "mask":
            return []
        limit = self._rollout.max_staleness
        return [g for g in self._buffer.groups.values() if self._buffer.versions.age(g, done_steps) > limit]

    def mask_old(self, groups: list[SampleGroup], trained_steps: int) -> int:
        """Mask old tokens of taken groups if the staleness policy is `mask`. Returns the number of masked tokens."""
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
        """Return live sequences whose last tokens lack log-probs and were sampled after `trained_steps` steps."""
        live = [q for g in self._buffer.groups.values() for s in g.samples for q in s.trained_sequences]
        starts = {(q.sample_id, q.sequence): self._first_unscored(q, trained_steps) for q in live}
        group_ids = {q.group_id: None for q in live if starts[q.sample_id, q.sequence] is not None}
        sequences = [
            q for g in self._buffer.read_groups(group_ids) for s in g.samples for q in s.trained_sequences
        ]
        return [
            LogProbRequest(
                TokenSequence(**{f.name: getattr(q, f.name) for f in fields(TokenSequence)}), start
            )
            for q in sequences
            if (start := starts.get((q.sample_id, q.sequence))) is not None
        ]

    def _first_unscored(self, sample: TokenSequence, trained_steps: int) -> int | None:
        """Return the first token without log-probs among the last tokens, if these weights sampled them."""
        if sample.trained_prompt is not None:  # it is trained under another prompt than it was sampled under
            return None
        if not sample.spans or self._buffer.versions.trained_steps(sample.spans[-1].version) != trained_steps:
            return None
        same_weights = takewhile(
            lambda x: self._buffer.versions.trained_steps(x.version) == trained_steps, reversed(sample.spans)
        )
        start = max(min(span.start for span in same_weights), len(sample.behaviour))
        return start if start < sample.tokens else None
