"""Replay of a run (`rollout.repeat`): the record determines timing-dependent decisions, so all tokens are equal.

With over_provision 1 no result depends on timing. With a larger factor, timing determines four decisions, which
rollouts.sqlite records:

- when a group is admitted;
- at how many tokens a sample is interrupted;
- which weights sample which tokens;
- which groups a step takes.

Everything else follows from seeds, weights and order. NOT replayed: deadlines, rewards that time out, the order of an
agent's parallel requests, and plug-ins whose state depends on the order of rewards.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rlsys.config import Config, identity
from rlsys.core.errors import RunError, UserError
from rlsys.core.types import SampleGroup, Status, TokenSequence
from rlsys.generators.turns import GenerateTurn, limit_tokens
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.reader import RunReader
from rlsys.router.router import Router


class Stop(NamedTuple):
    """A number of tokens at which a sequence was interrupted, got other weights, or ended."""

    trained_steps: int
    """Number of train steps in the weights that sampled the last token before the stop."""
    end: int
    """Number of response tokens of the sequence at the stop."""
    last: bool
    """Whether the sequence ended at the stop."""


class RunRecord:
    """Recorded decisions of the run in `folder`.

    Args:
        config: config of the replaying run.

    Raises:
        UserError: the folder has no run, the run's config differs, or the run cannot be replayed.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        with RunReader(folder).database() as db:
            meta = dict(db.execute("SELECT key, value FROM meta"))
            if meta["identity"] != identity(config):
                raise UserError(
                    f"rollout.repeat = {folder}: the config of that run differs; expected equal values of all "
                    "fields that determine rollouts"
                )
            steps: dict[int, int] = dict(db.execute("SELECT weight_version, train_step FROM pushes"))
            self.largest_group = int(meta["largest_group"])
            self.admission_steps = _admission_steps(db, steps)
            """Group id -> number of train steps in the weights under which the group was admitted."""
            self.takes: dict[int, list[int]] = {
                step: json.loads(ids) for step, ids in db.execute("SELECT train_step, group_ids FROM takes")
            }
            """Train step -> ids of the groups that it took."""
            self.stops = _stops(db, steps)
            """(sample id, sequence) -> stops in order, for sequences with tokens."""
            terminal = ", ".join(f"'{s}'" for s in Status if s.terminal)
            terminal_rows = db.execute(f"SELECT sample_id FROM samples WHERE status IN ({terminal})")
            self.terminal_samples = {row[0] for row in terminal_rows}
        for (sample_id, _), stops in self.stops.items():
            if any(a.trained_steps > b.trained_steps for a, b in pairwise(stops)):
                raise UserError(
                    f"rollout.repeat = {folder}: its trainer went back to an earlier checkpoint while sample "
                    f"{sample_id} ran; such a run cannot be replayed"
                )


def _admission_steps(db: sqlite3.Connection, steps: dict[int, int]) -> dict[int, int]:
    """Return group id -> number of train steps in the weights under which the group was first admitted."""
    admission_steps: dict[int, int] = {}
    for group_id, version in db.execute("SELECT group_id, weight_version FROM admissions ORDER BY place"):
        admission_steps.setdefault(group_id, steps[version])
    return admission_steps


def _stops(db: sqlite3.Connection, steps: dict[int, int]) -> dict[tuple[int, int], list[Stop]]:
    """Return (sample id, sequence) -> stops in order, for sequences with tokens.

    Args:
        steps: weight version -> number of train steps in its weights.
    """
    interrupts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for sample_id, sequence, tokens in db.execute("SELECT sample_id, sequence, tokens FROM interrupts"):
        interrupts[sample_id, sequence].add(tokens)
    stops_by_sequence: dict[tuple[int, int], list[Stop]] = {}
    rows = db.execute(
        "SELECT sample_id, 0, samples.status, spans FROM samples UNION ALL "
        "SELECT sample_id, sequence, samples.status, sequences.spans FROM sequences JOIN samples USING (sample_id)"
    ).fetchall()
    multi_sequence = {sample_id for sample_id, sequence, *_ in rows if sequence}
    for sample_id, sequence, status, text in rows:
        spans: list[tuple[int, int, int]] = json.loads(text)
        if not spans:
            continue
        ends = {end for _, _, end in spans} | interrupts[sample_id, sequence]
        step_of = {i: steps[version] for version, start, end in spans for i in range(start + 1, end + 1)}
        stops = [Stop(step_of[end], end, False) for end in sorted(ends & step_of.keys())]
        # A sequence may have ended while its sample has not.
        sequence_ended = sample_id in multi_sequence and stops[-1].end not in interrupts[sample_id, sequence]
        if Status(status).terminal or sequence_ended:
            stops[-1] = stops[-1]._replace(last=True)
        stops_by_sequence[sample_id, sequence] = stops
    return stops_by_sequence


def load_record(config: Config) -> RunRecord | None:
    """Load the record of the run in rollout.repeat; None if the field is unset."""
    folder = config.rollout.repeat
    return None if folder is None else RunRecord(folder, config)


class ReplayStops:
    """Interrupts the samples of this process at their recorded token counts.

    Resumes each one under its recorded weights. Owns the number of train steps in the engines' weights.
    """

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._trained_steps = -1
        self._advanced = asyncio.Event()
        self.on_stop: Callable[[TokenSequence], None] = lambda sample: None
        """Called with each sequence that waits for later weights."""

    def advance(self, trained_steps: int) -> None:
        """Report that the engines have weights of this many train steps."""
        self._trained_steps = trained_steps
        advanced, self._advanced = self._advanced, asyncio.Event()
        advanced.set()

    async def next_stop(self, sample: TokenSequence) -> Stop:
        """Wait for the weights of the sample's next stop, and return the stop. After the last stop, wait forever."""
        stops = self._record.stops.get((sample.sample_id, sample.sequence), [])
        stop = next((s for s in stops if s.end > sample.tokens), None)
        while stop is None or stop.trained_steps > self._trained_steps:
            await self._advanced.wait()
        return stop

    def turns(self, router: Router, config: Config) -> GenerateTurn:
        """Return a function that generates turns up to their stops, instead of that of turns.sampling_turns."""
        r = config.rollout

        async def generate_turn(
            sample: TokenSequence, *, max_tokens: int | None = None, stop_texts: Sequence[str] = ()
        ) -> None:
            budget = limit_tokens(r.max_response_tokens, max_tokens)
            while not sample.status.terminal:
                stop = await self.next_stop(sample)
                limit = budget if stop.last else min(budget, stop.end)
                await router.generate(
                    sample,
                    max_response_tokens=limit,
                    temperature=r.temperature,
                    truncation=r.truncation,
                    stop_texts=stop_texts,
                )
                if sample.status is Status.TRUNCATED and not stop.last and sample.tokens < budget:
                    sample.status = Status.PARKED
                if not sample.status.terminal:
                    self.on_stop(sample)

        return generate_turn


class ReplaySchedule:
    """Admits groups and assigns them to train steps as recorded.

    Owns the number of train steps in the engines' weights.
    """

    def __init__(self, record: RunRecord, buffer: RolloutBuffer) -> None:
        self._record = record
        self._buffer = buffer
        self._trained_steps = -1
        self._sequences: dict[int, dict[int, list[Stop]]] = defaultdict(dict)
        """Sample id -> number of the sequence -> stops in order."""
        for (sample_id, sequence), stops in record.stops.items():
            self._sequences[sample_id][sequence] = stops

    def advance(self, trained_steps: int) -> None:
        """Report that the engines have weights of this many train steps."""
        self._trained_steps = trained_steps

    def admits(self, group_id: int) -> bool:
        """Return whether the record admits the group under the current or earlier weights."""
        return self._record.admission_steps.get(group_id, self._trained_steps + 1) <= self._trained_steps

    def is_behind(self, trained_steps: int) -> bool:
        """Return whether a sample lacks tokens that the record has.

        Args:
            trained_steps: only tokens count that weights with at most this number of train steps sampled.
        """
        return any(self._is_behind(i, sequences, trained_steps) for i, sequences in self._sequences.items())

    def _is_behind(self, sample_id: int, sequences: Mapping[int, list[Stop]], trained_steps: int) -> bool:
        due = {k: [s for s in stops if s.trained_steps <= trained_steps] for k, stops in sequences.items()}
        if not any(due.values()):
            return False
        group_id, index = divmod(sample_id, self._record.largest_group)
        group = self._buffer.groups.get(group_id)
        if group is None:  # either concluded, or not admitted yet
            return group_id >= self._buffer.next_group_id
        if index >= len(group.samples):
            return True
        sample = group.samples[index]
        if sample.status.terminal:
            return False
        if sample_id in self._record.terminal_samples and all(len(due[k]) == len(sequences[k]) for k in due):
            return True
        tokens = {q.sequence: q.tokens for q in sample.sequences}
        return any(stops and tokens.get(k, 0) < stops[-1].end for k, stops in due.items())

    def groups(self, trained_steps: int) -> list[SampleGroup] | None:
        """Return the groups that the step after `trained_steps` took in the record.

        Returns:
            None while one of the groups is not ready, or a sample is behind the record (`is_behind`).

        Raises:
            RunError: the record has no such step.
        """
        train_step = trained_steps + 1
        if train_step not in self._record.takes:
            raise RunError(
                f"rollout.repeat: no record of train step {train_step}; the record ends with train step "
                f"{max(self._record.takes, default=0)}"
            )
        ready = {g.group_id: g for g in self._buffer.ready()}
        group_ids = self._record.takes[train_step]
        if self.is_behind(trained_steps) or not ready.keys() >= set(group_ids):
            return None
        return [ready[g] for g in group_ids]
