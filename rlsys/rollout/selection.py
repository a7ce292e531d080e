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
    """Chooses groups of the buffer. Has no state of its own.

    Args:
        replay: the schedule of a replayed run, which then chooses the groups; None: the run is no replay.
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
        self._engines_keep_samples = config.router.interruption != "abort"
        self._buffer = buffer
        self._replay = replay

    def groups(self, trained_steps: int) -> list[SampleGroup] | None:
        """Return the groups for the step after `trained_steps`; None if the step must wait."""
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

        The result is wrong with the staleness policy `wait` and in a replay, because steps then do not take groups
        in the order of completion.
        """
        return self._buffer.ready()[: self._rollout.groups_per_step]

    def has_protected_samples(self, trained_steps: int, members: Collection[str] | None = None) -> bool:
        """Return whether a sample in an engine must not be interrupted.

        These are the samples that were resumed rollout.max_resumes times. In a replay, they are instead the samples
        for which the record has more tokens of the current weights.

        Args:
            trained_steps: number of train steps in the engines' weights.
            members: URLs of the engines whose samples count; None: all.
        """
        if self._replay is not None:
            return self._replay.is_behind(trained_steps)
        if self._engines_keep_samples:  # they pause without an interruption
            return False
        return any(members is None or url in members for url in self._at_max_resumes())

    def stays_young(self, sample: TokenSequence, done_steps: int) -> bool:
        """Return whether the sample's group will not be too old after `done_steps` train steps.

        A group without tokens has the age of the newest version, because it may get tokens before its engine pauses.
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
        """Mask old tokens of taken groups if the staleness policy is `mask`.

        Returns:
            the number of masked tokens.
        """
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
        starts: dict[tuple[int, int], int] = {}
        group_ids: dict[int, None] = {}
        for group in self._buffer.groups.values():
            for sequence in (q for s in group.samples for q in s.trained_sequences):
                start = self._first_unscored(sequence, trained_steps)
                if start is not None:
                    starts[sequence.sample_id, sequence.sequence] = start
                    group_ids[sequence.group_id] = None
        sequences = [
            q for g in self._buffer.read_groups(group_ids) for s in g.samples for q in s.trained_sequences
        ]
        return [
            LogProbRequest(_as_sequence(q), starts[q.sample_id, q.sequence])
            for q in sequences
            if (q.sample_id, q.sequence) in starts
        ]

    def _first_unscored(self, sample: TokenSequence, trained_steps: int) -> int | None:
        """Return the index of the sequence's first token without a log-prob under the weights that sampled its end.

        None if the sequence has no such token, or if its last tokens were not sampled after `trained_steps` steps.
        """
        if (
            sample.trained_prompt is not None
        ):  # trained under another prompt than the tokens were sampled under
            return None
        if not sample.spans or self._buffer.versions.trained_steps(sample.spans[-1].version) != trained_steps:
            return None
        same_weights = takewhile(
            lambda x: self._buffer.versions.trained_steps(x.version) == trained_steps, reversed(sample.spans)
        )
        start = max(min(span.start for span in same_weights), len(sample.behaviour))
        return start if start < sample.tokens else None


def _as_sequence(sequence: TokenSequence) -> TokenSequence:
    """Return a plain TokenSequence with the fields of `sequence`, which may be a Sample."""
    return TokenSequence(**{f.name: getattr(sequence, f.name) for f in fields(TokenSequence)})
