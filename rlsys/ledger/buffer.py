"""RolloutBuffer: owns the state of every group of a run.

    ACTIVE --finish--> READY --take--> TRAINED --restore (the trainer lost the step)--> READY, reserved for the step
       |                 |
       |                 +--finish--> EXPIRED
       +--finish--> FILTERED | CENSORED | EXPIRED

Invariants, true after every method and therefore at every commit:
- every issued group is in exactly one state, and has all its samples (3);
- a group is in the journal (`takes`) of at most one train step; then only this step can take it again (4);
- a weight version is issued once, also after crashes (versions.py).

Methods write into one open transaction; `flush` commits it. A caller that reports a change to another process
flushes first, so a crash undoes only changes that no other process knows. Not guaranteed: a crash loses the tokens
that the router appended to a sample since its last `save`, at most rollout.flush_tokens over all samples (the runner
enforces this limit). After a restart they are sampled again with the same seed.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TypeVar

from rlsys.algo.planners import Prefix
from rlsys.core.arrays import token_ids
from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.core.forks import fork
from rlsys.core.owner import Owner
from rlsys.core.types import AnySequence, GroupState, LogProbResult, Prompt, Sample, SampleGroup
from rlsys.ledger.ledger import Ledger, read_ledger
from rlsys.ledger.replay_log import ReplayLog
from rlsys.ledger.sample_rows import SampleRows, WorkerUpdate
from rlsys.ledger.samples import SampleQuery, SampleView
from rlsys.ledger.store import ids_to_blob, read_groups, sqlite_errors
from rlsys.ledger.versions import WeightVersions
from rlsys.ledger.writer import StoreWriter

_LEGAL = {
    GroupState.ACTIVE: {GroupState.READY, GroupState.FILTERED, GroupState.CENSORED, GroupState.EXPIRED},
    GroupState.READY: {GroupState.TRAINED, GroupState.EXPIRED},
    GroupState.TRAINED: {GroupState.READY},
}
DEAD = (GroupState.FILTERED, GroupState.EXPIRED, GroupState.CENSORED)

T = TypeVar("T")


class RolloutBuffer:
    """The durable state of all groups and samples of a run.

    Memory holds the live groups only: ACTIVE groups, and READY groups that no step has taken. `read_step` reads the
    rows of taken groups from the file, and `load` reads tokens.

    Attributes:
        groups: the live groups, by id.
        counts: number of groups in each state, including those that are not live.
        versions: the weight versions.
        replay_log: the record of timing-dependent decisions.
    """

    def __init__(
        self,
        path: Path,
        identity: str,
        largest_group: int,
        owner: Owner | None = None,
        holds_tokens: bool = True,
    ) -> None:
        """Open the ledger, or create it.

        Args:
            path: the ledger's file.
            identity: hash of the config fields that determine rollouts; a file with another identity is refused.
            largest_group: maximum number of samples of a group.
            owner: the launch that writes; None if no other process can know the file.
            holds_tokens: whether this process keeps the tokens of live samples in memory; otherwise workers do.

        Raises:
            UserError: the file is in use, damaged, not one of rlsys, or belongs to another run.
        """
        self._path = path
        self._largest_group, self._holds_tokens = largest_group, holds_tokens
        self._file = StoreWriter(path, identity, largest_group, owner)
        self._db = self._file.db
        self.groups: dict[int, SampleGroup] = {}
        self.counts: Counter[GroupState] = Counter()
        self._ready: list[int] = []
        """Ids of the READY groups that no step has taken, in the order of completion."""
        self._sample_rows = SampleRows(self._file)
        try:
            self.versions = WeightVersions(self._file)
            self.replay_log = ReplayLog(self._file, self.versions)
            self._load()
        except RlsysError:
            self._file.close()
            raise

    def _load(self) -> None:
        with sqlite_errors(self._path):
            live = "state = 'active' OR (state = 'ready' AND train_step IS NULL)"
            self.groups = {g.group_id: g for g in read_groups(self._db, live)}
            for group in self.groups.values():
                self._load_samples(group)
            for name, groups in self._db.execute("SELECT state, count(*) FROM groups GROUP BY state"):
                self.counts[GroupState(name)] = groups
            ready = "SELECT group_id FROM groups WHERE state = 'ready' AND train_step IS NULL"
            self._ready = [row[0] for row in self._db.execute(f"{ready} ORDER BY ready_order")]
            (self._last_taken,) = self._db.execute(
                "SELECT coalesce(max(train_step), 0) FROM takes"
            ).fetchone()
        self._issued, self._completed, self._pruned_to, self._lost_tokens = (
            self._file.counter(key) for key in ("issued", "completed", "pruned_to", "lost")
        )

    def _load_samples(self, group: SampleGroup) -> None:
        """Load the stored arrays of a live group's samples; their tokens only if this process holds them."""
        loaded = self.load(group.samples)
        if self._holds_tokens:
            group.samples = loaded
        for sample, loaded_sample in zip(group.samples, loaded, strict=True):
            for sequence, loaded_sequence in zip(sample.sequences, loaded_sample.sequences, strict=True):
                sequence.behaviour = loaded_sequence.behaviour
                sequence.taught = bool(loaded_sequence.teacher_logprobs)
                sequence.teacher_logprobs = b""
            self._sample_rows.register(sample)

    # Samples and groups

    @property
    def next_group_id(self) -> int:
        """Id of the next group. Ids count up from 0, so this is also the number of issued groups."""
        return self._issued

    def issue(self, prompt: Prompt, seeds: Sequence[int]) -> SampleGroup:
        """Create an ACTIVE group for a prompt, with one sample for each seed."""
        group_id = self._issued
        group = SampleGroup(group_id, prompt.index, [])
        samples = self._new_samples(group, prompt.ids, seeds)
        with self._file.writing():
            blob, size = ids_to_blob(prompt.ids), len(samples)
            row = (group_id, prompt.index, group.state.value, None, None, blob, size)
            self._db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._sample_rows.write(samples)
            self._file.set_counter("issued", group_id + 1)
        self._issued += 1
        group.samples = samples
        self.groups[group_id] = group
        self.counts[group.state] += 1
        return group

    def grow(
        self,
        group: SampleGroup,
        seeds: Sequence[int],
        prompt_ids: Sequence[int] | None = None,
        prefixes: Sequence[Prefix] = (),
    ) -> list[Sample]:
        """Add samples to an ACTIVE group, and save its other samples.

        Args:
            group: the group.
            seeds: seed of each new sample.
            prompt_ids: prompt from which the new samples are generated; they are trained under the group's prompt.
                None: the group's prompt.
            prefixes: tokens with which each new sample starts; samples beyond these start empty.

        Returns:
            the new samples.
        """
        group_prompt = next(
            (s.prompt_ids for s in group.samples if not s.own_prompt), group.samples[0].prompt_ids
        )
        own_prompt = group_prompt if prompt_ids is None else token_ids(prompt_ids).tolist()
        samples = self._new_samples(group, own_prompt, seeds)
        if prompt_ids is not None:
            for sample in samples:
                sample.trained_prompt = group_prompt
        for sample, (index, length, ids) in zip(samples, map(astuple, prefixes), strict=False):
            (source,) = self.load([group.samples[index]])
            fork(source, length, sample, inserted=ids)
        size = len(group.samples) + len(samples)
        with self._file.writing():
            self._sample_rows.write(group.samples)
            if self._holds_tokens:
                self._sample_rows.write(samples)
            else:
                self._sample_rows.write_for_workers(samples)
            self._db.execute("UPDATE groups SET size = ? WHERE group_id = ?", (size, group.group_id))
        group.samples.extend(samples)
        return samples

    def _new_samples(self, group: SampleGroup, prompt_ids: list[int], seeds: Sequence[int]) -> list[Sample]:
        """Create samples for a group, without adding them.

        Each group has a range of `largest_group` sample ids.

        Raises:
            ValueError: there is no seed, or the group would get too large.
        """
        existing = len(group.samples)
        if not 0 < len(seeds) <= self._largest_group - existing:
            raise ValueError(
                f"group {group.group_id} has {existing} samples and gets {len(seeds)} seeds; expected 1 to "
                f"{self._largest_group - existing} seeds"
            )
        first_id = group.group_id * self._largest_group
        return [
            Sample(first_id + i, group.group_id, i, prompt_ids, seed)
            for i, seed in enumerate(seeds, existing)
        ]

    def save(self, samples: Iterable[Sample]) -> None:
        """Write tokens and status of samples of ACTIVE groups into the open transaction.

        Raises:
            RunError: a sample belongs to a group that is not ACTIVE.
        """
        with self._file.writing():
            self._sample_rows.write(self._active(samples))

    def save_from_workers(self, updates: Iterable[WorkerUpdate]) -> None:
        """Write the status of samples of ACTIVE groups, and references to the tokens that workers wrote to segments.

        Raises:
            RunError: a sample belongs to a group that is not ACTIVE.
        """
        with self._file.writing():
            self._sample_rows.write_from_workers(
                (self._active([sample])[0], sequences) for sample, sequences in updates
            )

    def _active(self, samples: Iterable[Sample]) -> list[Sample]:
        """Return the samples as a list.

        Raises:
            RunError: a sample belongs to a group that is not ACTIVE.
        """
        active = list(samples)
        for sample in active:
            group = self.groups.get(sample.group_id)
            if group is None or group.state is not GroupState.ACTIVE:
                state = "not live" if group is None else group.state
                raise RunError(
                    f"cannot save sample {sample.sample_id}: its group {sample.group_id} is {state}; expected active"
                )
        return active

    def unsaved(self, sample: Sample) -> bool:
        """Return whether the sample has tokens that are not saved."""
        return self._sample_rows.unsaved(sample)

    @property
    def added_tokens(self) -> int:
        """Number of sampled tokens that were saved since the file was opened."""
        return self._sample_rows.added_tokens

    def store_scores(self, scores: Iterable[LogProbResult]) -> None:
        """Store log-probs that the trainer computed for tokens of live samples.

        Raises:
            RunError: a sample is not live, has fewer tokens, or already has log-probs of these tokens.
        """
        with self._file.writing():
            for scored in scores:
                group = self.groups.get(scored.sample_id // self._largest_group)
                if group is None:
                    raise RunError(
                        f"the trainer sent log-probs of sample {scored.sample_id}, whose group is no longer live"
                    )
                sample = group.samples[scored.sample_id % self._largest_group]
                self._sample_rows.write_scores(sample.sequences[scored.sequence], scored)

    def finish(self, group: SampleGroup, state: GroupState) -> None:
        """Move an ACTIVE group to READY, FILTERED, CENSORED or EXPIRED, or a READY group to EXPIRED.

        Raises:
            RunError: the transition is not allowed, or the state is READY while the group has unfinished samples.
        """
        if state is GroupState.READY and not group.done:
            unfinished = sum(not sample.status.terminal for sample in group.samples)
            raise RunError(
                f"group {group.group_id} has {unfinished} unfinished samples; expected none in the state ready"
            )
        with self._file.writing():
            if group.state is GroupState.ACTIVE:
                self._sample_rows.write(group.samples)
            self._move(group, state)
            if state is GroupState.READY:
                self._db.execute(
                    "UPDATE groups SET ready_order = ? WHERE group_id = ?", (self._completed, group.group_id)
                )
                self._completed += 1
                self._file.set_counter("completed", self._completed)
                self._ready.append(group.group_id)
            else:
                self._drop(group)

    def ready(self) -> list[SampleGroup]:
        """Return the READY groups that no step has taken, in the order of completion."""
        return [self.groups[g] for g in self._ready]

    def active(self) -> list[SampleGroup]:
        """Return the ACTIVE groups, oldest first."""
        return [g for g in self.groups.values() if g.state is GroupState.ACTIVE]

    def note(self, key: str) -> str | None:
        """Return the value that `set_note` stored under `key`; None if it stored none."""
        row = self.read(
            lambda db: db.execute("SELECT value FROM meta WHERE key = ?", (f"note.{key}",)).fetchone()
        )
        return None if row is None else str(row[0])

    def set_note(self, key: str, value: str) -> None:
        """Store a value under `key` in the open transaction, so that it is committed together with other changes.

        Components outside of the ledger, such as planners, store their state this way.
        """
        with self._file.writing():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"note.{key}", value))

    # Train steps

    def take(
        self, train_step: int, groups: Sequence[SampleGroup], parts: Sequence[Sequence[int]] = ()
    ) -> None:
        """Record in the journal that a train step takes READY groups, and move them to TRAINED.

        Args:
            train_step: number of the step; the last one that took groups, plus 1.
            groups: all groups of the step.
            parts: portions of the groups that the trainer has already received, each as group ids.

        Raises:
            RunError: the step is not the next one, or `groups` lacks a group of `parts`.
        """
        if train_step != self._last_taken + 1:
            raise RunError(
                f"train step {train_step} cannot take groups: expected step {self._last_taken + 1}"
            )
        ids = [g.group_id for g in groups]
        if missing := {i for part in parts for i in part} - set(ids):
            raise RunError(
                f"train step {train_step} takes the groups {ids}; expected also {sorted(missing)}, which the trainer "
                "has already received"
            )
        with self._file.writing():
            row = (train_step, self.versions.newest, json.dumps(ids), json.dumps(parts))
            self._db.execute("INSERT INTO takes VALUES (?, ?, ?, ?)", row)
            for group in groups:
                self._move(group, GroupState.TRAINED, train_step)
                self._drop(group)
        self._last_taken = train_step

    def read_step(self, train_step: int) -> tuple[int, list[SampleGroup]]:
        """Read the groups of a step from the journal, and move those that `restore` returned to READY to TRAINED.

        The caller flushes before it passes the groups to another process.

        Returns:
            the newest weight version when the step took the groups, and the groups by id, without tokens (`load`
            reads them).

        Raises:
            RunError: the journal and the table of groups differ.
        """
        query = "SELECT weight_version, group_ids FROM takes WHERE train_step = ?"
        with self._file.writing():
            version, ids = self._db.execute(query, (train_step,)).fetchone()
            groups = read_groups(self._db, "train_step = ?", train_step)
            if [g.group_id for g in groups] != sorted(json.loads(ids)):
                raise RunError(
                    f"train step {train_step}: the journal has the groups {ids}, but the table of groups has others"
                )
            for group in groups:
                if group.state is GroupState.READY:
                    self._move(group, GroupState.TRAINED, train_step)
        return version, groups

    def load(self, samples: Iterable[AnySequence]) -> list[AnySequence]:
        """Return copies of samples or sequences that hold their tokens.

        Raises:
            RunError: `prune` has deleted the tokens, or a file is damaged.
        """
        return self._file.load(samples)

    def read_groups(self, group_ids: Iterable[int]) -> list[SampleGroup]:
        """Read the saved state of groups, by id, without their tokens."""
        ids = ", ".join(map(str, group_ids))
        return self.read(lambda db: read_groups(db, f"group_id IN ({ids})"))

    def parts(self, train_step: int) -> list[list[int]]:
        """Return the `parts` that `take` recorded for a step: portions of group ids."""
        query = "SELECT parts FROM takes WHERE train_step = ?"
        row = self.read(lambda db: db.execute(query, (train_step,)).fetchone())
        return [list(part) for part in json.loads(row[0])]

    def restore(self, train_step: int) -> None:
        """Return the groups that later steps took to READY, when the trainer resumes from a checkpoint.

        The groups stay reserved for their steps.

        Args:
            train_step: number of train steps in the checkpoint.

        Raises:
            UserError: the checkpoint is newer than this file, or the tokens of later steps are deleted.
        """
        if train_step > self._last_taken:
            raise UserError(
                f"{self._path}: has {self._last_taken} train steps, but the checkpoint has {train_step}; "
                "expected a checkpoint of the same run"
            )
        if train_step < self._pruned_to:
            raise UserError(
                f"{self._path}: the checkpoint is of step {train_step}; expected step {self._pruned_to} or later, "
                "because the tokens of earlier steps are deleted"
            )
        with self._file.writing():
            query = f"UPDATE groups SET state = '{GroupState.READY}' WHERE state = ? AND train_step > ?"
            restored = self._db.execute(query, (GroupState.TRAINED, train_step)).rowcount
        self.counts[GroupState.TRAINED] -= restored
        self.counts[GroupState.READY] += restored

    @property
    def last_taken_step(self) -> int:
        """Number of the last step in the journal; 0 before the first step."""
        return self._last_taken

    def prune(self, train_step: int) -> None:
        """Delete the tokens of the groups that steps up to `train_step` took."""
        if train_step <= self._pruned_to:
            return
        with self._file.writing():
            self._sample_rows.prune(self._pruned_to, train_step)
            self._file.set_counter("pruned_to", train_step)
        self._pruned_to = train_step

    # The file

    def check_counts(self) -> None:
        """Check that the counts of groups in memory and in the file agree with the counter of issued groups.

        Raises:
            RunError: two counts differ; the message has all counts.
        """
        rows = dict(
            self.read(lambda db: db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())
        )
        memory = {state.value: n for state, n in self.counts.items() if n}
        if rows != memory or sum(memory.values()) != self._issued:
            raise RunError(
                f"ledger: counts of groups differ: issued {self._issued}, in memory {memory}, in the file {rows}"
            )

    def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run a query on the file, including changes that are not flushed."""
        return self._file.read(query)

    def samples(self, query: SampleQuery) -> list[SampleView]:
        """Return one page of samples, including changes that are not flushed.

        Raises:
            UserError: the step, group or sample of the query does not exist.
        """
        return self._file.samples(query)

    def ledger(self) -> Ledger:
        """Return the counts of the ledger, including changes that are not flushed."""
        return self.read(read_ledger)

    async def committed_ledger(self) -> Ledger:
        """Return the counts of the ledger as of the last commit.

        The query takes seconds for a long run, and does not block the event loop. On a shared file system, it blocks
        the event loop and includes changes that are not flushed.
        """
        return await self._file.read_committed(read_ledger)

    @property
    def lost_tokens(self) -> int:
        """Number of tokens that engines generated but no sample received, over all launches."""
        return self._lost_tokens

    def add_lost_tokens(self, tokens: int) -> None:
        """Add to `lost_tokens`."""
        if tokens:
            with self._file.writing():
                self._file.set_counter("lost", self._lost_tokens + tokens)
            self._lost_tokens += tokens

    def new_writer(self) -> str:
        """Return a unique name for a worker that writes segments, and commit it."""
        name = self._file.new_writer()
        self.flush()  # the worker may write before the next commit, and no other worker may get its name
        return name

    def retire(self, writer: str) -> None:
        """Remove the bytes that an exited worker wrote but did not report from its segments; count them as torn."""
        self._file.retire(writer)

    def flush(self) -> None:
        """Commit the open transaction to disk."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _move(self, group: SampleGroup, state: GroupState, train_step: int | None = None) -> None:
        """Change the state of a group, and the step that took it.

        Raises:
            RunError: the transition is not allowed.
        """
        if state not in _LEGAL.get(group.state, ()):
            raise RunError(f"group {group.group_id}: state {state} cannot follow {group.state}")
        row = (state.value, train_step, group.group_id)
        self._db.execute("UPDATE groups SET state = ?, train_step = ? WHERE group_id = ?", row)
        self.counts[group.state] -= 1
        self.counts[state] += 1
        group.state, group.train_step = state, train_step

    def _drop(self, group: SampleGroup) -> None:
        """Remove a group from memory, and delete its tokens if it will never be trained."""
        del self.groups[group.group_id]
        if group.group_id in self._ready:
            self._ready.remove(group.group_id)
        self._sample_rows.forget(group.samples)
        if group.state in DEAD:
            self._sample_rows.drop_tokens(group.samples)
