"""RolloutBuffer: every group that was ever issued, and its state. The one owner of both.

    ACTIVE --finish--> READY --take--> TRAINED --restore (only what a lost trainer took)--> READY, reserved
       |                 |
       |                 +--expire--> EXPIRED
       +--finish--> FILTERED | CENSORED | EXPIRED

Invariants, true after every method and therefore at every commit:
- every group issued is in exactly one state, and has all its samples (3);
- a group is in the journal (`takes`) of at most one train step; once there, only that step can take it (4);
- a weight version is handed out once, whatever crashes (versions.py).

Methods write into one open transaction; `flush` commits it. Whoever tells another process about a change
flushes first, so a crash takes back only what nobody has heard of. NOT guaranteed: tokens that the router
appended to a sample since its last `save`, at most rollout.flush_tokens of all samples together (the runner sees
to that); a restart samples them again, with the same seed.
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
from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.core.forks import fork
from rlsys.core.owner import Owner
from rlsys.core.types import GroupState, LogProbResult, Prompt, Sample, SampleGroup
from rlsys.ledger.clock_record import ClockRecord
from rlsys.ledger.ledger import Ledger, count
from rlsys.ledger.sample_rows import SavedSamples, Told
from rlsys.ledger.samples import SampleQuery, Seen
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
    """Opens `path`, or creates it. Raises UserError: the file is in use, damaged, foreign or another run's.

    `groups` holds the live ones by id: ACTIVE, and READY that no step has taken yet. A trained group leaves
    memory; `taken` reads its rows back, and `load` the tokens.
    """

    def __init__(
        self, path: Path, identity: str, largest_group: int, owner: Owner | None = None, in_hand: bool = True
    ) -> None:
        """`owner`: see StoreWriter. `in_hand`: whether live samples have their tokens here; else workers will."""
        self._path = path
        self._largest_group, self._in_hand = largest_group, in_hand
        self._file = StoreWriter(path, identity, largest_group, owner)
        self._db = self._file.db
        self.groups: dict[int, SampleGroup] = {}
        self.counts: Counter[GroupState] = Counter()
        """Groups in each state."""
        self._ready: list[int] = []  # ids in the order of completion; reserved ones are not in it
        self._saved = SavedSamples(self._file)
        try:
            self.versions = WeightVersions(self._file)
            self.clock = ClockRecord(self._file, self.versions)
            self._load()
        except RlsysError:
            self._file.close()
            raise

    def _load(self) -> None:
        with sqlite_errors(self._path):
            live = "state = 'active' OR (state = 'ready' AND train_step IS NULL)"
            self.groups = {g.group_id: g for g in read_groups(self._db, live)}
            for group in self.groups.values():
                whole = self.load(group.samples)
                if self._in_hand:
                    group.samples = whole
                for sample, own in zip(group.samples, whole, strict=True):
                    for sequence, loaded in zip(sample.sequences, own.sequences, strict=True):
                        sequence.behaviour = loaded.behaviour
                        sequence.taught, sequence.teacher_logprobs = bool(loaded.teacher_logprobs), b""
                for sample in group.samples:
                    self._saved.know(sample)
            for name, groups in self._db.execute("SELECT state, count(*) FROM groups GROUP BY state"):
                self.counts[GroupState(name)] = groups
            ready = "SELECT group_id FROM groups WHERE state = 'ready' AND train_step IS NULL"
            self._ready = [row[0] for row in self._db.execute(f"{ready} ORDER BY ready_order")]
            (self._last_taken,) = self._db.execute(
                "SELECT coalesce(max(train_step), 0) FROM takes"
            ).fetchone()
        self._issued, self._completed, self._pruned_to, self._lost = (
            self._file.counter(key) for key in ("issued", "completed", "pruned_to", "lost")
        )

    # Samples and groups

    @property
    def next_group_id(self) -> int:
        """Ids count up from 0, so this is also the data position."""
        return self._issued

    def issue(self, prompt: Prompt, seeds: Sequence[int]) -> SampleGroup:
        """A new ACTIVE group of this prompt, one sample a seed."""
        group_id = self._issued
        group = SampleGroup(group_id, prompt.index, [])
        samples = self._new_samples(group, prompt.ids, seeds)
        with self._file.writing():
            blob, size = ids_to_blob(prompt.ids), len(samples)
            row = (group_id, prompt.index, group.state.value, None, None, blob, size)
            self._db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._saved.write(samples)
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
        drawn_from: Sequence[int] | None = None,
        prefixes: Sequence[Prefix] = (),
    ) -> list[Sample]:
        """Further samples of an ACTIVE group, one a seed; what it has is written with them.

        `drawn_from`: their prompt, where it is not the group's; they are trained on the group's. `prefixes`: what
        each begins with.
        """
        own = next((s.prompt_ids for s in group.samples if not s.own_prompt), group.samples[0].prompt_ids)
        samples = self._new_samples(group, own if drawn_from is None else list(drawn_from), seeds)
        if drawn_from is not None:
            for sample in samples:
                sample.trained_prompt = own
        for sample, (place, at, ids) in zip(samples, map(astuple, prefixes), strict=False):
            (source,) = self.load([group.samples[place]])
            fork(source, at, sample, inserted=ids)
        size = len(group.samples) + len(samples)
        with self._file.writing():
            self._saved.write(group.samples)
            (self._saved.write if self._in_hand else self._saved.write_for_workers)(samples)
            self._db.execute("UPDATE groups SET size = ? WHERE group_id = ?", (size, group.group_id))
        group.samples.extend(samples)
        return samples

    def _new_samples(self, group: SampleGroup, prompt_ids: list[int], seeds: Sequence[int]) -> list[Sample]:
        """Ids leave room for the largest group there can be."""
        have = len(group.samples)
        if not 0 < len(seeds) <= self._largest_group - have:
            raise ValueError(
                f"{len(seeds)} seeds for a group that has {have} of at most {self._largest_group} samples"
            )
        first = group.group_id * self._largest_group
        return [Sample(first + i, group.group_id, i, prompt_ids, seed) for i, seed in enumerate(seeds, have)]

    def save(self, samples: Iterable[Sample]) -> None:
        """Make the tokens and the status of samples of ACTIVE groups durable (with the next flush)."""
        with self._file.writing():
            self._saved.write(self._active(samples))

    def save_told(self, told: Iterable[Told]) -> None:
        """The same for samples of workers, which have written their tokens out."""
        with self._file.writing():
            self._saved.write_told((self._active([sample])[0], sequences) for sample, sequences in told)

    def _active(self, samples: Iterable[Sample]) -> list[Sample]:
        """The same. Raises RunError for one of a group that is not active."""
        found = list(samples)
        for sample in found:
            group = self.groups.get(sample.group_id)
            if group is None or group.state is not GroupState.ACTIVE:
                raise RunError(f"sample {sample.sample_id} of group {sample.group_id}: not an active one")
        return found

    def unsaved(self, sample: Sample) -> bool:
        """Whether it has tokens that `save` has not seen."""
        return self._saved.unsaved(sample)

    @property
    def added_tokens(self) -> int:
        """Tokens that a model sampled, saved since the file was opened."""
        return self._saved.added_tokens

    def store_scores(self, scores: Iterable[LogProbResult]) -> None:
        """What the trainer says about tokens of live samples. Raises RunError for a sample that is not live."""
        with self._file.writing():
            for found in scores:
                group = self.groups.get(found.sample_id // self._largest_group)
                if group is None:
                    raise RunError(f"sample {found.sample_id}: scored, but not in a live group")
                sample = group.samples[found.sample_id % self._largest_group]
                self._saved.write_scores(sample.sequences[found.sequence], found)

    def finish(self, group: SampleGroup, state: GroupState) -> None:
        """ACTIVE -> READY, FILTERED, CENSORED or EXPIRED; READY -> EXPIRED. READY needs terminal samples."""
        if state is GroupState.READY and not group.done:
            raise RunError(f"group {group.group_id}: not all of its samples are done")
        with self._file.writing():
            if group.state is GroupState.ACTIVE:
                self._saved.write(group.samples)
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
        """READY groups that no step has taken yet, in the order of completion."""
        return [self.groups[g] for g in self._ready]

    def active(self) -> list[SampleGroup]:
        """Oldest first."""
        return [g for g in self.groups.values() if g.state is GroupState.ACTIVE]

    def note(self, key: str) -> str | None:
        """What `set_note` stored last; None before."""
        row = self.read(
            lambda db: db.execute("SELECT value FROM meta WHERE key = ?", (f"note.{key}",)).fetchone()
        )
        return None if row is None else str(row[0])

    def set_note(self, key: str, value: str) -> None:
        """State of somebody else, committed together with what was decided by it."""
        with self._file.writing():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"note.{key}", value))

    # Train steps

    def take(
        self, train_step: int, groups: Sequence[SampleGroup], parts: Sequence[Sequence[int]] = ()
    ) -> None:
        """READY -> TRAINED, written to the journal. Steps take in order, each once, else RunError.

        `parts`: ids of those of the groups that the trainer had been given before, portion by portion.
        """
        if train_step != self._last_taken + 1:
            raise RunError(f"train step {train_step} cannot take: the last that did was {self._last_taken}")
        ids = [g.group_id for g in groups]
        if missing := {i for part in parts for i in part} - set(ids):
            raise RunError(f"train step {train_step} leaves out groups that are in training: {missing}")
        with self._file.writing():
            row = (train_step, self.versions.newest, json.dumps(ids), json.dumps(parts))
            self._db.execute("INSERT INTO takes VALUES (?, ?, ?, ?)", row)
            for group in groups:
                self._move(group, GroupState.TRAINED, train_step)
                self._drop(group)
        self._last_taken = train_step

    def taken(self, train_step: int) -> tuple[int, list[SampleGroup]]:
        """Weight version and groups, by id, of a step in the journal; those given back are trained again.

        Without their tokens, see `load`. Whoever tells another process where these lie flushes first.
        """
        query = "SELECT weight_version, group_ids FROM takes WHERE train_step = ?"
        with self._file.writing():
            version, ids = self._db.execute(query, (train_step,)).fetchone()
            groups = read_groups(self._db, "train_step = ?", train_step)
            if [g.group_id for g in groups] != sorted(json.loads(ids)):
                raise RunError(f"train step {train_step}: journal and groups disagree: {ids}")
            for group in groups:
                if group.state is GroupState.READY:
                    self._move(group, GroupState.TRAINED, train_step)
        return version, groups

    def load(self, samples: Iterable[Sample]) -> list[Sample]:
        """The same with their tokens in hand. Raises RunError: `prune` has forgotten them, or a file is damaged."""
        return self._file.load(samples)

    def unloaded(self, group_ids: Iterable[int]) -> list[SampleGroup]:
        """Groups as `taken` gives them, by id; of their samples, what is saved."""
        ids = ", ".join(map(str, group_ids))
        return self.read(lambda db: read_groups(db, f"group_id IN ({ids})"))

    def parts(self, train_step: int) -> list[list[int]]:
        """Group ids of the portions in which a step of the journal began."""
        query = "SELECT parts FROM takes WHERE train_step = ?"
        row = self.read(lambda db: db.execute(query, (train_step,)).fetchone())
        return [list(part) for part in json.loads(row[0])]

    def restore(self, train_step: int) -> None:
        """The trainer goes on from a checkpoint of this many steps: later ones take again what they took.

        Raises UserError when the checkpoint and this file are not of one run.
        """
        if train_step > self._last_taken:
            raise UserError(
                f"{self._path}: knows {self._last_taken} train steps, but the checkpoint has {train_step}; "
                "one of them is from elsewhere"
            )
        if train_step < self._pruned_to:
            raise UserError(
                f"{self._path}: the checkpoint of step {train_step} is too old; rollouts are kept from step "
                f"{self._pruned_to + 1} on"
            )
        with self._file.writing():
            back = f"UPDATE groups SET state = '{GroupState.READY}' WHERE state = ? AND train_step > ?"
            given_back = self._db.execute(back, (GroupState.TRAINED, train_step)).rowcount
        self.counts[GroupState.TRAINED] -= given_back
        self.counts[GroupState.READY] += given_back

    @property
    def last_taken_step(self) -> int:
        """The last step in the journal; 0 before the first. Steps up to it take what they took."""
        return self._last_taken

    def prune(self, train_step: int) -> None:
        """Forget the arrays of groups that this step or an earlier one took: no checkpoint can want them."""
        if train_step <= self._pruned_to:
            return
        with self._file.writing():
            self._saved.prune(self._pruned_to, train_step)
            self._file.set_counter("pruned_to", train_step)
        self._pruned_to = train_step

    # The file

    def check_counts(self) -> None:
        """Conservation of groups (invariant 3), cheaply: the issue counter, memory and file agree, else RunError."""
        rows = dict(
            self.read(lambda db: db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())
        )
        memory = {state.value: n for state, n in self.counts.items() if n}
        if rows != memory or sum(memory.values()) != self._issued:
            raise RunError(f"ledger: {self._issued} groups issued; in memory {memory}, in the file {rows}")

    def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """What a query finds in the file, what is not flushed included."""
        return self._file.read(query)

    def samples(self, query: SampleQuery) -> list[Seen]:
        """What is not flushed included. Raises UserError for a step, group or sample that is not there."""
        return self._file.samples(query)

    def ledger(self) -> Ledger:
        return self.read(count)

    async def committed_ledger(self) -> Ledger:
        """As of the last commit. Counting a long run takes seconds, and others go on meanwhile."""
        return await self._file.read_committed(count)

    @property
    def lost(self) -> int:
        """Tokens lost so far, see `add_lost`."""
        return self._lost

    def add_lost(self, tokens: int) -> None:
        """Tokens that engines generated and no sample got; the file keeps the sum over all sessions."""
        if tokens:
            with self._file.writing():
                self._file.set_counter("lost", self._lost + tokens)
            self._lost += tokens

    def new_writer(self) -> str:
        """A name for a worker that will write segments. On disk when this returns: a worker may write before the next
        commit, and nobody after a crash may get its name."""
        name = self._file.new_writer()
        self.flush()
        return name

    def retire(self, writer: str) -> None:
        """A worker is gone: what it had not told is cut off and counted."""
        self._file.retire(writer)

    def flush(self) -> None:
        """Commit: on disk when this returns."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _move(self, group: SampleGroup, state: GroupState, train_step: int | None = None) -> None:
        if state not in _LEGAL.get(group.state, ()):
            raise RunError(f"group {group.group_id} cannot go from {group.state} to {state}")
        row = (state.value, train_step, group.group_id)
        self._db.execute("UPDATE groups SET state = ?, train_step = ? WHERE group_id = ?", row)
        self.counts[group.state] -= 1
        self.counts[state] += 1
        group.state, group.train_step = state, train_step

    def _drop(self, group: SampleGroup) -> None:
        """Out of memory; the arrays of a group that nobody will train leave the file too."""
        del self.groups[group.group_id]
        if group.group_id in self._ready:
            self._ready.remove(group.group_id)
        self._saved.forget(group.samples)
        if group.state in DEAD:
            self._saved.drop_tokens(group.samples)
