"""Check the ledger of a run against the logs of its engines and trainers. The checker imports nothing of rlsys.

Each engine logs its requests and the weights that computed each token. Each trainer logs its steps and their batches.
`check_history` reads the rollout file with its own SQL queries and reports contradictions of five kinds:

    lost       a missing group, sample or token; a step that no trainer trained
    duplicate  a group in two steps; two different versions of one step; a checkpoint of another history
    wrong      a token that no engine sampled, or that weights other than those of its version sampled
    torn       an inconsistent file
    poison     a sample that was resubmitted too often although engines died while they sampled it

An integer identifies a state of the weights. States are only compared for equality.
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

KINDS = ("lost", "duplicate", "wrong", "torn", "poison")
MAX_LISTED_FAULTS = 5
"""Number of faults of one kind that a report lists."""
RID = re.compile(r"(\w+)-(-?\d+)-\d+\.")
"""Request ID of the router: rollout process, sample, counter."""
MAX_CONSECUTIVE_DEATHS = 4
"""Engine deaths without a new token in between, after which a sample must not be resubmitted."""


@dataclass
class RequestRecord:
    """One request in one process of an engine. `output_ids`, `mu` and `weights` have one entry per sampled token."""

    engine: str
    """URL of the engine."""
    rid: str
    """Request ID."""
    input_ids: list[int]
    """Prompt and the response up to this request."""
    output_ids: list[int]
    mu: list[float]
    """Log-probs."""
    weights: list[int]
    """State of the weights that computed each token, independent of the version that the engine reports."""
    delivered: int
    """Number of tokens that the client has read for certain."""
    died: bool
    """Whether the request ended because the engine's process ended."""

    @property
    def session(self) -> str:
        """Return the ID of the rollout process that sent the request."""
        match = RID.fullmatch(self.rid)
        return match[1] if match else ""

    @property
    def sample(self) -> int:
        """Return the sample's number; -1 for requests of an evaluation or of a foreign client."""
        match = RID.fullmatch(self.rid)
        return int(match[2]) if match else -1


@dataclass
class StepRecord:
    """One train step of one trainer process."""

    launch: int
    """Epoch of the launch."""
    start: int
    """Start number of the trainer process within the launch."""
    step: int
    before: int
    """State of the weights before the step."""
    after: int
    """State of the weights after the step. Equal states result from equal steps on equal tokens."""
    groups: dict[int, dict[int, list[int]]]
    """Group -> sample -> response IDs."""


@dataclass
class CheckpointRecord:
    """A published checkpoint. The fields are those of `StepRecord`."""

    launch: int
    start: int
    step: int
    weights: int


@dataclass
class History:
    """The logs of all engines and trainers of a run."""

    initial: int
    """State of the weights before the first step."""
    requests: list[RequestRecord] = field(default_factory=list)
    trained_steps: list[StepRecord] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    unobserved_deaths: int = 0
    """Number of rollout processes that were killed. Each may have missed the death of one engine."""
    last_session: str = ""
    """ID of the last rollout process, which shut down cleanly."""


def to_line(record: RequestRecord | StepRecord | CheckpointRecord) -> str:
    return json.dumps({"kind": type(record).__name__, **asdict(record)})


def add_lines(history: History, lines: Iterable[str]) -> None:
    """Add the log lines of one process to `history`. An incomplete last line of a killed process is ignored."""
    for line in lines:
        if not line.endswith("\n"):
            return
        record = json.loads(line)
        kind = record.pop("kind")
        if kind == "RequestRecord":
            history.requests.append(RequestRecord(**record))
        elif kind == "StepRecord":
            groups = {
                int(g): {int(s): ids for s, ids in samples.items()} for g, samples in record["groups"].items()
            }
            history.trained_steps.append(StepRecord(**{**record, "groups": groups}))
        else:
            history.checkpoints.append(CheckpointRecord(**record))


@dataclass
class Verdict:
    """The result of a check: faults by kind, and the number of checked tokens and steps."""

    faults: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    tokens: int = 0
    """Number of tokens that an engine's log confirms."""
    steps: int = 0

    @property
    def clean(self) -> bool:
        return not any(self.faults.values())

    def __str__(self) -> str:
        lines = [
            f"{kind}: {text}" for kind, texts in self.faults.items() for text in texts[:MAX_LISTED_FAULTS]
        ]
        return "\n".join(lines) or f"no fault in {self.steps} steps and {self.tokens} tokens"


@dataclass
class _Sample:
    group: int
    prompt: list[int]
    """Prompt IDs."""
    tokens: int
    spans: list[tuple[int, int, int]]
    """Weight version, start and end (exclusive)."""
    observed: list[tuple[int, int]]
    """Start and end (exclusive) of tokens that come from a tool."""
    ids: list[int] = field(default_factory=list)
    mu: list[float] = field(default_factory=list)

    def version(self, position: int) -> int | None:
        return next((v for v, start, end in self.spans if start <= position < end), None)

    def is_observed(self, position: int) -> bool:
        return any(start <= position < end for start, end in self.observed)


@dataclass
class _File:
    """The content of the rollout file."""

    meta: dict[str, Any]
    groups: dict[int, tuple[str, int | None, int]]
    """Group -> state, train step, size."""
    samples: dict[int, _Sample]
    takes: dict[int, list[int]]
    """Train step -> groups."""
    pushes: dict[int, int]
    """Weight version -> train step."""
    damage: list[str]
    """Descriptions of corrupt parts."""


def check_history(path: Path, history: History, steps: int) -> Verdict:
    """Check a finished run of `steps` steps, whose rollout file is at `path`."""
    verdict = Verdict()
    file = _read(path)
    verdict.faults["torn"] += file.damage
    states = _check_steps(file, history, steps, verdict)
    _check_rows(file, verdict)
    _check_tokens(file, history, states, verdict)
    _check_delivered(file, history, states, verdict)
    _check_poison(history, verdict)
    return verdict


def _read(path: Path) -> _File:
    with closing(sqlite3.connect(path.absolute().as_uri() + "?mode=ro", uri=True)) as db:
        damage = [row[0] for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        meta = dict(db.execute("SELECT key, value FROM meta"))
        rows = db.execute("SELECT group_id, state, train_step, size, prompt_ids FROM groups").fetchall()
        prompts = {row[0]: _unpack_int32(row[4]) for row in rows}
        columns = "sample_id, group_id, tokens, spans, observed, prompt_ids"
        samples = {
            sample: _Sample(
                group,
                prompts.get(group, []) if drawn is None else _unpack_int32(drawn),
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
                damage.append(f"sample {sample}: no complete record at offset {start} of {name}")
            else:
                samples[sample].ids += record[1]
                samples[sample].mu += record[2]
        takes = {s: json.loads(ids) for s, ids in db.execute("SELECT train_step, group_ids FROM takes")}
        pushes = dict(db.execute("SELECT weight_version, train_step FROM pushes"))
    return _File(meta, {row[0]: (row[1], row[2], row[3]) for row in rows}, samples, takes, pushes, damage)


def _record(data: bytes) -> tuple[int, list[int], list[float]] | None:
    """Return sample, IDs and log-probs of a token record, or None if the record is incomplete.

    The parser is independent of the product's code.
    """
    if len(data) < 44 or data[:4] != b"rlsg" or zlib.crc32(data[8:]) != int.from_bytes(data[4:8], "little"):
        return None
    sample, tokens = int.from_bytes(data[12:20], "little"), int.from_bytes(data[32:36], "little")
    if data[8] != 1:
        return sample, [], []
    ids, mu = data[44 : 44 + 4 * tokens], data[44 + 4 * tokens : 44 + 12 * tokens]
    return sample, _unpack_int32(ids), [x for (x,) in struct.iter_unpack("<d", mu)]


def _unpack_int32(blob: bytes) -> list[int]:
    return [x for (x,) in struct.iter_unpack("<i", blob)]


def _check_steps(file: _File, history: History, steps: int, verdict: Verdict) -> dict[int, int]:
    """Check that the last checkpoint descends from each step exactly once. Return the state after each step."""
    faults = verdict.faults
    steps_by_result = {t.after: t for t in history.trained_steps}
    final = max(history.checkpoints, key=lambda s: (s.step, s.launch, s.start), default=None)
    states, lineage = {0: history.initial}, list[StepRecord]()
    state = history.initial if final is None else final.weights
    while state != history.initial:
        if state not in steps_by_result or len(lineage) > steps:
            faults["lost"].append(
                f"no trainer logged the step that led to the state of step {steps - len(lineage)}"
            )
            break
        lineage.append(steps_by_result[state])
        states[lineage[-1].step] = state
        state = lineage[-1].before
    lineage.reverse()
    verdict.steps = len(lineage)
    if [t.step for t in lineage] != list(range(1, steps + 1)):
        faults["lost"].append(
            f"steps in the last checkpoint: {[t.step for t in lineage]}, expected 1 to {steps}"
        )
    counts = Counter(g for t in lineage for g in t.groups)
    faults["duplicate"] += [
        f"group {g} is in {n} steps of the last checkpoint" for g, n in counts.items() if n > 1
    ]
    journal = Counter(g for ids in file.takes.values() for g in ids)
    faults["duplicate"] += [f"group {g} is in {n} steps of the journal" for g, n in journal.items() if n > 1]
    for step in range(1, steps + 1):
        if step not in file.takes:
            faults["lost"].append(f"step {step} is not in the journal")
    for t in history.trained_steps:
        step_label = f"step {t.step} of launch {t.launch}, start {t.start}"
        if sorted(t.groups) != sorted(file.takes.get(t.step, [])):
            faults["duplicate"].append(
                f"{step_label} trained groups {sorted(t.groups)}, the journal has others"
            )
        trained_ids = {s: ids for samples in t.groups.values() for s, ids in samples.items()}
        first = next((x for x in lineage if x.step == t.step), t)
        if trained_ids != {s: ids for samples in first.groups.values() for s, ids in samples.items()}:
            faults["duplicate"].append(
                f"{step_label} trained other tokens than the same step of the last checkpoint's history"
            )
    for s in history.checkpoints:
        if states.get(s.step) != s.weights:
            faults["duplicate"].append(
                f"the checkpoint of step {s.step} by launch {s.launch}, start {s.start} is of another history"
            )
    return states


def _check_rows(file: _File, verdict: Verdict) -> None:
    """Check that each issued group exists with all its samples, and that the groups agree with the journal."""
    issued = int(file.meta["issued"])
    if sorted(file.groups) != list(range(issued)):
        verdict.faults["lost"].append(f"{issued} groups were issued, the file has {len(file.groups)}")
    members = Counter(s.group for s in file.samples.values())
    for group, (state, _, size) in file.groups.items():
        if members[group] != size:
            verdict.faults["lost"].append(f"group {group} ({state}) has {members[group]} of {size} samples")
    in_step = {g: step for g, (_, step, _) in file.groups.items() if step is not None}
    if in_step != {g: step for step, ids in file.takes.items() for g in ids}:
        verdict.faults["torn"].append("journal and groups disagree on the train steps of groups")
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
        verdict.faults["lost"].append(f"{file.meta['lost']} tokens according to the run's own counter")


def _check_tokens(file: _File, history: History, states: dict[int, int], verdict: Verdict) -> None:
    """Check that an engine with the weights of its version sampled each token at its position."""
    log = _by_sample(history)
    trained_ids: dict[int, list[int]] = {}
    for training in history.trained_steps:
        for samples in training.groups.values():
            trained_ids |= samples
    for number, sample in file.samples.items():
        ids = sample.ids or trained_ids.get(number, [])
        for position, token in enumerate(ids):
            if sample.is_observed(position):
                continue
            step = file.pushes.get(version) if (version := sample.version(position)) is not None else None
            state = None if step is None else states.get(step)
            mu = sample.mu[position] if position < len(sample.mu) else None
            matches = [e for e, _ in _matching_requests(log[number], sample.prompt, ids, position, token, mu)]
            if not matches:
                verdict.faults["wrong"].append(
                    f"sample {number}, token {position}: no engine sampled it there"
                )
                break
            if state not in {e.weights[position - len(e.input_ids) + len(sample.prompt)] for e in matches}:
                verdict.faults["wrong"].append(
                    f"sample {number}, token {position}: not sampled by version {version} (step {step})"
                )
                break
            verdict.tokens += 1


def _by_sample(history: History) -> dict[int, list[RequestRecord]]:
    log = defaultdict[int, list[RequestRecord]](list)
    for emission in history.requests:
        log[emission.sample].append(emission)
    return log


def _matching_requests(
    log: list[RequestRecord], prompt: list[int], ids: list[int], position: int, token: int, mu: float | None
) -> Iterable[tuple[RequestRecord, int]]:
    """Yield the requests that continued the same prefix and sampled this token with this log-prob at this position.

    Each comes with the offset of the token in its output.
    """
    for e in log:
        start = len(e.input_ids) - len(prompt)
        offset = position - start
        is_match = (
            0 <= offset < len(e.output_ids)
            and e.output_ids[offset] == token
            and (mu is None or e.mu[offset] == mu)
        )
        if is_match and e.input_ids == prompt + ids[:start]:
            yield e, offset


def _check_delivered(file: _File, history: History, states: dict[int, int], verdict: Verdict) -> None:
    """Check that the file has each token of correct weights that the last rollout process read.

    That process shut down cleanly and must have committed them.
    """
    valid_states = set(states.values())
    for e in history.requests:
        sample = file.samples.get(e.sample)
        if e.session != history.last_session or sample is None or not sample.ids:
            continue
        start = len(e.input_ids) - len(sample.prompt)
        read = e.output_ids[: e.delivered]
        if set(e.weights[: e.delivered]) <= valid_states and sample.ids[start : start + len(read)] != read:
            verdict.faults["lost"].append(
                f"sample {e.sample}: {e.engine} delivered {len(read)} tokens at {start}, the file has "
                f"{len(sample.ids)}"
            )


def _check_poison(history: History, verdict: Verdict) -> None:
    limit = MAX_CONSECUTIVE_DEATHS + history.unobserved_deaths
    for number, log in _by_sample(history).items():
        consecutive = longest = 0
        for e in log:
            consecutive = consecutive + 1 if e.died and not e.delivered else 0
            longest = max(longest, consecutive)
        if number >= 0 and longest > limit:
            verdict.faults["poison"].append(f"sample {number}: {longest} consecutive engine deaths")
