"""What happened in a run, as those who did it wrote it down, held against its ledger. Imports nothing of rlsys.

Engines and trainers each keep a log of their own: an engine every request and the weights behind each token, a
trainer every step and what it was given. `judge` reads the rollout file with its own queries, and says what
contradicts:

    lost     a group, a sample or a token that is gone; a step that nobody trained
    twice    a group in two steps; two trainings of one step that differ; a checkpoint beside the one history
    wrong    a token that no engine made, or that other weights made than those of its version
    torn     a file that does not add up
    poison   a sample that was sent again and again although engines died of it

Weights are compared as equal or not, whatever they are: a number stands for the state that a trainer was in.
"""

from __future__ import annotations

import json
import re
import sqlite3
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("lost", "twice", "wrong", "torn", "poison")
FEW = 5
"""Contradictions of a kind that are told."""
RID = re.compile(r"(\w+)-(-?\d+)-\d+\.")
"""How the router names a request: its process, the sample, a number."""
DEATHS_IN_A_ROW = 4
"""Engine deaths without a token in between, after which a sample may not be sent again."""


@dataclass
class Emission:
    """One request in one process of an engine. Lists are of equal length, one entry a token that it made."""

    engine: str
    rid: str
    ids: list[int]
    """What it was asked with: prompt and the response so far."""
    made: list[int]
    mu: list[float]
    weights: list[int]
    """The state that computed each token, whatever it was called."""
    delivered: int
    """Tokens that the client is known to have read."""
    died: bool
    """It ended because the engine's process did."""

    @property
    def session(self) -> str:
        """The process that asked."""
        match = RID.fullmatch(self.rid)
        return match[1] if match else ""

    @property
    def sample(self) -> int:
        """-1: of an evaluation, or nobody's."""
        match = RID.fullmatch(self.rid)
        return int(match[2]) if match else -1


@dataclass
class Training:
    """A step as a trainer did it. `groups`: group -> sample -> response ids."""

    launch: int
    start: int
    step: int
    before: int
    after: int
    """States: equal ones were reached by the same steps on the same tokens."""
    groups: dict[int, dict[int, list[int]]]


@dataclass
class Saved:
    """A checkpoint that was published."""

    launch: int
    start: int
    step: int
    weights: int


@dataclass
class History:
    """`deaths_unseen`: rollout processes that ended without warning; each may have missed the death of an engine."""

    initial: int
    emissions: list[Emission] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    deaths_unseen: int = 0
    last_session: str = ""
    """The rollout process that ended in order, after everything."""


def to_line(record: Emission | Training | Saved) -> str:
    return json.dumps({"kind": type(record).__name__, **asdict(record)})


def add_lines(history: History, lines: Iterable[str]) -> None:
    """What one process wrote; a last line that its end cut short is left out."""
    for line in lines:
        if not line.endswith("\n"):
            return
        record = json.loads(line)
        kind = record.pop("kind")
        if kind == "Emission":
            history.emissions.append(Emission(**record))
        elif kind == "Training":
            groups = {
                int(g): {int(s): ids for s, ids in samples.items()} for g, samples in record["groups"].items()
            }
            history.trainings.append(Training(**{**record, "groups": groups}))
        else:
            history.saved.append(Saved(**record))


@dataclass
class Verdict:
    """What contradicts, by kind; and how much was looked at."""

    faults: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    tokens: int = 0
    """Each found in an engine's log."""
    steps: int = 0

    @property
    def clean(self) -> bool:
        return not any(self.faults.values())

    def __str__(self) -> str:
        lines = [f"{kind}: {text}" for kind, texts in self.faults.items() for text in texts[:FEW]]
        return (
            "\n".join(lines) or f"nothing lost, twice or wrong in {self.steps} steps and {self.tokens} tokens"
        )


@dataclass
class _Sample:
    group: int
    prompt: list[int]
    """What it was drawn from."""
    tokens: int
    spans: list[tuple[int, int, int]]
    observed: list[tuple[int, int]]
    ids: list[int] = field(default_factory=list)
    mu: list[float] = field(default_factory=list)

    def version(self, place: int) -> int | None:
        return next((v for v, start, end in self.spans if start <= place < end), None)

    def from_tool(self, place: int) -> bool:
        return any(start <= place < end for start, end in self.observed)


@dataclass
class _File:
    """The rollout file, read once."""

    meta: dict[str, Any]
    groups: dict[int, tuple[str, int | None, int]]
    """State, train step, size."""
    samples: dict[int, _Sample]
    takes: dict[int, list[int]]
    pushes: dict[int, int]
    damage: list[str]


def judge(path: Path, history: History, steps: int) -> Verdict:
    """Of a run that was to train so many steps and has ended, its rollout file at `path`."""
    verdict = Verdict()
    file = _read(path)
    verdict.faults["torn"] += file.damage
    states = _judge_steps(file, history, steps, verdict)
    _judge_rows(file, verdict)
    _judge_tokens(file, history, states, verdict)
    _judge_delivered(file, history, states, verdict)
    _judge_poison(history, verdict)
    return verdict


def _read(path: Path) -> _File:
    with closing(sqlite3.connect(path.absolute().as_uri() + "?mode=ro", uri=True)) as db:
        damage = [row[0] for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        meta = dict(db.execute("SELECT key, value FROM meta"))
        rows = db.execute("SELECT group_id, state, train_step, size, prompt_ids FROM groups").fetchall()
        prompts = {row[0]: _ints(row[4]) for row in rows}
        columns = "sample_id, group_id, tokens, spans, observed, prompt_ids"
        samples = {
            sample: _Sample(
                group,
                prompts.get(group, []) if drawn is None else _ints(drawn),
                tokens,
                [(v, a, b) for v, a, b in json.loads(spans)],
                [(a, b) for a, b in json.loads(observed)],
            )
            for sample, group, tokens, spans, observed, drawn in db.execute(f"SELECT {columns} FROM samples")
        }
        pieces = "SELECT sample_id, name, start, pieces.length FROM pieces JOIN segments USING (segment)"
        for sample, name, start, length in db.execute(f"{pieces} ORDER BY piece"):
            with (path.parent / "segments" / name).open("rb") as file:
                file.seek(start)
                record = _record(file.read(length))
            if record is None or record[0] != sample:
                damage.append(f"sample {sample}: no whole record at {start} of {name}")
            else:
                samples[sample].ids += record[1]
                samples[sample].mu += record[2]
        takes = {s: json.loads(ids) for s, ids in db.execute("SELECT train_step, group_ids FROM takes")}
        pushes = dict(db.execute("SELECT weight_version, train_step FROM pushes"))
    return _File(meta, {row[0]: (row[1], row[2], row[3]) for row in rows}, samples, takes, pushes, damage)


def _record(data: bytes) -> tuple[int, list[int], list[float]] | None:
    """Sample, ids and log-probs of a record of tokens, read without the product's code; None: it is not whole."""
    if len(data) < 44 or data[:4] != b"rlsg" or zlib.crc32(data[8:]) != int.from_bytes(data[4:8], "little"):
        return None
    sample, tokens = int.from_bytes(data[12:20], "little"), int.from_bytes(data[32:36], "little")
    if data[8] != 1:
        return sample, [], []
    ids, mu = data[44 : 44 + 4 * tokens], data[44 + 4 * tokens : 44 + 12 * tokens]
    return sample, _ints(ids), [x for (x,) in struct.iter_unpack("<d", mu)]


def _ints(blob: bytes) -> list[int]:
    return [x for (x,) in struct.iter_unpack("<i", blob)]


def _judge_steps(file: _File, history: History, steps: int, verdict: Verdict) -> dict[int, int]:
    """Every step once, in one line of descent that ends in the last checkpoint. The state after each step."""
    faults = verdict.faults
    by_result = {t.after: t for t in history.trainings}
    final = max(history.saved, key=lambda s: (s.step, s.launch, s.start), default=None)
    states, line = {0: history.initial}, list[Training]()
    state = history.initial if final is None else final.weights
    while state != history.initial:
        if state not in by_result or len(line) > steps:
            faults["lost"].append(f"no trainer says how it came to the state of step {steps - len(line)}")
            break
        line.append(by_result[state])
        states[line[-1].step] = state
        state = line[-1].before
    line.reverse()
    verdict.steps = len(line)
    if [t.step for t in line] != list(range(1, steps + 1)):
        faults["lost"].append(f"steps in the last checkpoint: {[t.step for t in line]}, not 1 to {steps}")
    counts = Counter(g for t in line for g in t.groups)
    faults["twice"] += [
        f"group {g} is in {n} steps of the last checkpoint" for g, n in counts.items() if n > 1
    ]
    journal = Counter(g for ids in file.takes.values() for g in ids)
    faults["twice"] += [f"group {g} is in {n} steps of the journal" for g, n in journal.items() if n > 1]
    for step in range(1, steps + 1):
        if step not in file.takes:
            faults["lost"].append(f"step {step} is not in the journal")
    for t in history.trainings:
        step_label = f"step {t.step} of launch {t.launch}, start {t.start}"
        if sorted(t.groups) != sorted(file.takes.get(t.step, [])):
            faults["twice"].append(f"{step_label} trained groups {sorted(t.groups)}, the journal has others")
        trained_ids = {s: ids for samples in t.groups.values() for s, ids in samples.items()}
        first = next((x for x in line if x.step == t.step), t)
        if trained_ids != {s: ids for samples in first.groups.values() for s, ids in samples.items()}:
            faults["twice"].append(f"{step_label} trained other tokens than the step that counts")
    for s in history.saved:
        if states.get(s.step) != s.weights:
            faults["twice"].append(
                f"the checkpoint of step {s.step} by launch {s.launch}, start {s.start} is of another history"
            )
    return states


def _judge_rows(file: _File, verdict: Verdict) -> None:
    """Every group issued is there with all its samples, in one state, and the journal and it agree."""
    issued = int(file.meta["issued"])
    if sorted(file.groups) != list(range(issued)):
        verdict.faults["lost"].append(f"{issued} groups were issued, {len(file.groups)} are there")
    members = Counter(s.group for s in file.samples.values())
    for group, (state, _, size) in file.groups.items():
        if members[group] != size:
            verdict.faults["lost"].append(f"group {group} ({state}) has {members[group]} of {size} samples")
    in_step = {g: step for g, (_, step, _) in file.groups.items() if step is not None}
    if in_step != {g: step for step, ids in file.takes.items() for g in ids}:
        verdict.faults["torn"].append("journal and groups disagree on who was trained when")
    pruned = int(file.meta["pruned_to"])
    for number, sample in file.samples.items():
        state, step, _ = file.groups.get(sample.group, ("missing", None, 0))
        dropped = state in ("filtered", "expired", "censored") or (step is not None and step <= pruned)
        if not (len(sample.ids) == len(sample.mu) == sample.tokens) and not (dropped and not sample.ids):
            verdict.faults["torn"].append(
                f"sample {number} ({state}): {sample.tokens} tokens in its row, {len(sample.ids)} ids, "
                f"{len(sample.mu)} log-probs"
            )
    if file.meta["lost"]:
        verdict.faults["lost"].append(f"{file.meta['lost']} tokens by the run's own count")


def _judge_tokens(file: _File, history: History, states: dict[int, int], verdict: Verdict) -> None:
    """Each token of a sample, at its place, was made there by an engine that held the weights of its version."""
    log = _by_sample(history)
    trained_ids: dict[int, list[int]] = {}
    for training in history.trainings:
        for samples in training.groups.values():
            trained_ids |= samples
    for number, sample in file.samples.items():
        ids = sample.ids or trained_ids.get(number, [])
        for position, token in enumerate(ids):
            if sample.from_tool(position):
                continue
            step = file.pushes.get(version) if (version := sample.version(position)) is not None else None
            state = None if step is None else states.get(step)
            mu = sample.mu[position] if position < len(sample.mu) else None
            makers = [e for e, offset in _makers(log[number], sample.prompt, ids, position, token, mu)]
            if not makers:
                verdict.faults["wrong"].append(f"sample {number}, token {position}: no engine made it there")
                break
            if state not in {e.weights[position - len(e.ids) + len(sample.prompt)] for e in makers}:
                verdict.faults["wrong"].append(
                    f"sample {number}, token {position}: version {version}, of step {step}, and other weights made it"
                )
                break
            verdict.tokens += 1


def _by_sample(history: History) -> dict[int, list[Emission]]:
    log = defaultdict[int, list[Emission]](list)
    for emission in history.emissions:
        log[emission.sample].append(emission)
    return log


def _makers(
    log: list[Emission], prompt: list[int], ids: list[int], place: int, token: int, mu: float | None
) -> Iterable[tuple[Emission, int]]:
    """Requests that went on from what precedes, and made this token with this log-prob at this place."""
    for e in log:
        start = len(e.ids) - len(prompt)
        offset = place - start
        made_it = 0 <= offset < len(e.made) and e.made[offset] == token and (mu is None or e.mu[offset] == mu)
        if made_it and e.ids == prompt + ids[:start]:
            yield e, offset


def _judge_delivered(file: _File, history: History, states: dict[int, int], verdict: Verdict) -> None:
    """What the last rollout process read of the right weights is in the file, for it ended in order."""
    right = set(states.values())
    for e in history.emissions:
        sample = file.samples.get(e.sample)
        if e.session != history.last_session or sample is None or not sample.ids:
            continue
        start = len(e.ids) - len(sample.prompt)
        read = e.made[: e.delivered]
        if set(e.weights[: e.delivered]) <= right and sample.ids[start : start + len(read)] != read:
            verdict.faults["lost"].append(
                f"sample {e.sample}: {len(read)} tokens came from {e.engine} at {start}, the file has "
                f"{len(sample.ids)}"
            )


def _judge_poison(history: History, verdict: Verdict) -> None:
    limit = DEATHS_IN_A_ROW + history.deaths_unseen
    for number, log in _by_sample(history).items():
        in_row = longest = 0
        for e in log:
            in_row = in_row + 1 if e.died and not e.delivered else 0
            longest = max(longest, in_row)
        if number >= 0 and longest > limit:
            verdict.faults["poison"].append(f"sample {number}: {longest} engines died of it in a row")
