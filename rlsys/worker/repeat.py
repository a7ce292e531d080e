"""Repeating a run (`rollout.repeat`): what its clock decided comes from its record, and so every token is the same.

With over_provision 1 nothing depends on the clock. With more, it decides which groups are let in when, after how many
tokens a sample is interrupted, hence which weights sample what, and which groups a step takes. Those four are in
rollouts.sqlite; everything else follows from seeds, weights and order.

NOT repeated: deadlines, rewards that time out, which of an agent's parallel questions comes first, and plug-ins whose
state depends on the order of rewards.
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
from rlsys.core.types import Sample, SampleGroup, Status
from rlsys.generators.turns import Speak, within
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.reader import RunReader
from rlsys.router.router import Router


class Stop(NamedTuple):
    """The weights of `trained_steps` sampled up to token `end`, where the sample was interrupted, or had ended."""

    trained_steps: int
    end: int
    last: bool
    """Nobody interrupted it there."""


class Record:
    """Of the run in `folder`. Raises UserError: there is none, of another config, or not repeatable."""

    def __init__(self, folder: Path, config: Config) -> None:
        with RunReader(folder).database() as db:
            meta = dict(db.execute("SELECT key, value FROM meta"))
            if meta["identity"] != identity(config):
                raise UserError(f"rollout.repeat = {folder}: a run of another config")
            steps: dict[int, int] = dict(db.execute("SELECT weight_version, train_step FROM pushes"))
            self.largest_group = int(meta["largest_group"])
            self.admitted = _admitted(db, steps)
            """Group id -> train steps that the weights contained under which it was let in."""
            self.takes: dict[int, list[int]] = {
                step: json.loads(ids) for step, ids in db.execute("SELECT train_step, group_ids FROM takes")
            }
            self.stops = _stops(db, steps)
            """Of each (sample, sequence) that got a token, in order."""
            terminal = ", ".join(f"'{s}'" for s in Status if s.terminal)
            ended = db.execute(f"SELECT sample_id FROM samples WHERE status IN ({terminal})")
            self.ended = {row[0] for row in ended}
        for (sample_id, _), stops in self.stops.items():
            if any(a.trained_steps > b.trained_steps for a, b in pairwise(stops)):
                raise UserError(
                    f"rollout.repeat = {folder}: its trainer went back to a step before tokens of sample {sample_id}"
                )


def _admitted(db: sqlite3.Connection, steps: dict[int, int]) -> dict[int, int]:
    out: dict[int, int] = {}
    for group_id, version in db.execute("SELECT group_id, weight_version FROM admissions ORDER BY place"):
        out.setdefault(group_id, steps[version])
    return out


def _stops(db: sqlite3.Connection, steps: dict[int, int]) -> dict[tuple[int, int], list[Stop]]:
    interrupts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for sample_id, sequence, tokens in db.execute("SELECT sample_id, sequence, tokens FROM interrupts"):
        interrupts[sample_id, sequence].add(tokens)
    out: dict[tuple[int, int], list[Stop]] = {}
    rows = db.execute(
        "SELECT sample_id, 0, samples.status, spans FROM samples UNION ALL "
        "SELECT sample_id, sequence, samples.status, sequences.spans FROM sequences JOIN samples USING (sample_id)"
    ).fetchall()
    several = {sample_id for sample_id, sequence, *_ in rows if sequence}
    for sample_id, sequence, status, text in rows:
        spans: list[tuple[int, int, int]] = json.loads(text)
        if not spans:
            continue
        ends = {end for _, _, end in spans} | interrupts[sample_id, sequence]
        step_of = {i: steps[version] for version, start, end in spans for i in range(start + 1, end + 1)}
        stops = [Stop(step_of[end], end, False) for end in sorted(ends & step_of.keys())]
        # Of several sequences some have ended while their sample has not.
        ended = sample_id in several and stops[-1].end not in interrupts[sample_id, sequence]
        if Status(status).terminal or ended:
            stops[-1] = stops[-1]._replace(last=True)
        out[sample_id, sequence] = stops
    return out


def record_of(config: Config) -> Record | None:
    """What rollout.repeat names."""
    folder = config.rollout.repeat
    return None if folder is None else Record(folder, config)


class Stops:
    """Holds the samples that run in this process to the record. Owns how far they may go: up to the weights of so
    many train steps. `reached` is told of each that waits for further ones."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._trained_steps = -1
        self._moved = asyncio.Event()
        self.reached: Callable[[Sample], None] = lambda sample: None

    def go(self, trained_steps: int) -> None:
        """Engines have weights of so many train steps."""
        self._trained_steps = trained_steps
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def next_stop(self, sample: Sample) -> Stop:
        """Once its weights are there; never, where the record of the sample ends."""
        stops = self._record.stops.get((sample.sample_id, sample.sequence), [])
        stop = next((s for s in stops if s.end > sample.tokens), None)
        while stop is None or stop.trained_steps > self._trained_steps:
            await self._moved.wait()
        return stop

    def turns(self, router: Router, config: Config) -> Speak:
        """Turns of the model, as turns.sampling_turns."""
        r = config.rollout

        async def speak(sample: Sample, *, most: int | None = None, stop_texts: Sequence[str] = ()) -> None:
            budget = within(r.max_response_tokens, most)
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
                    self.reached(sample)

        return speak


class Repeat:
    """Lets groups in, and gives them to train steps, as the record says. Owns how many train steps the engines'
    weights contain."""

    def __init__(self, record: Record, buffer: RolloutBuffer) -> None:
        self._record = record
        self._buffer = buffer
        self._trained_steps = -1
        self._sequences: dict[int, dict[int, list[Stop]]] = defaultdict(dict)  # of each sample
        for (sample_id, sequence), stops in record.stops.items():
            self._sequences[sample_id][sequence] = stops

    def go(self, trained_steps: int) -> None:
        """Engines have weights of so many train steps."""
        self._trained_steps = trained_steps

    def admits(self, group_id: int) -> bool:
        return self._record.admitted.get(group_id, self._trained_steps + 1) <= self._trained_steps

    def lacks_tokens(self, trained_steps: int) -> bool:
        """Whether a sample still lacks tokens that the weights after so many train steps gave it."""
        return any(self._lacks(i, sequences, trained_steps) for i, sequences in self._sequences.items())

    def _lacks(self, sample_id: int, sequences: Mapping[int, list[Stop]], trained_steps: int) -> bool:
        due = {k: [s for s in stops if s.trained_steps <= trained_steps] for k, stops in sequences.items()}
        group_id, place = divmod(sample_id, self._record.largest_group)
        if not any(due.values()) or (
            group_id not in self._buffer.groups and group_id < self._buffer.next_group_id
        ):
            return False
        group = self._buffer.groups.get(group_id)
        if group is None or place >= len(group.samples):
            return True
        sample = group.samples[place]
        if sample.status.terminal:
            return False
        if sample_id in self._record.ended and all(len(due[k]) == len(sequences[k]) for k in due):
            return True
        have = {q.sequence: q.tokens for q in sample.sequences}
        return any(stops and have.get(k, 0) < stops[-1].end for k, stops in due.items())

    def groups(self, trained_steps: int) -> list[SampleGroup] | None:
        """Those that the step after `trained_steps` took; None while they are not ready, or others lack tokens."""
        train_step = trained_steps + 1
        if train_step not in self._record.takes:
            raise RunError(
                f"rollout.repeat: the record ends with train step {max(self._record.takes, default=0)}"
            )
        ready = {g.group_id: g for g in self._buffer.ready()}
        wanted = self._record.takes[train_step]
        if self.lacks_tokens(trained_steps) or not ready.keys() >= set(wanted):
            return None
        return [ready[g] for g in wanted]
