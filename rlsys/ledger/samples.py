"""Queries for pages of samples, for the commands and the dashboard that show samples to users."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from rlsys.core.errors import UserError
from rlsys.core.spans import Piece
from rlsys.core.types import GroupState, Sample, Status
from rlsys.ledger.store import blob_to_ids, sample_of_row, select, sequence_of_row
from rlsys.segments.records import SegmentReader

Order = Literal["newest", "worst", "best", "longest"]
ORDERS: tuple[str, ...] = get_args(Order)
_SQL_ORDERS = {
    "newest": "samples.sample_id DESC",
    "worst": "samples.reward, samples.sample_id DESC",
    "best": "samples.reward DESC, samples.sample_id DESC",
    "longest": "samples.tokens DESC, samples.sample_id DESC",
}


@dataclass(frozen=True)
class SampleQuery:
    """Conditions and order of a page of samples.

    The page contains samples that fulfil all conditions and have tokens or are censored. None and False are no
    condition.

    Attributes:
        sample: id of the only sample.
        group: id of the sample's group.
        step: train step that took the sample's group.
        status: status of the sample.
        resumed: whether the sample was interrupted and resumed.
        order: `worst` and `best` sort by reward, and exclude samples without a reward.
        skip: number of samples before the page.
        limit: maximum number of samples of the page.
    """

    sample: int | None = None
    group: int | None = None
    step: int | None = None
    status: str | None = None
    resumed: bool = False
    order: Order = "newest"
    skip: int = 0
    limit: int = 20


GROUP_OUTCOMES = {
    GroupState.ACTIVE: "not complete yet",
    GroupState.READY: "waits for a step",
    GroupState.FILTERED: "filtered: never trained",
    GroupState.EXPIRED: "too old: never trained",
    GroupState.CENSORED: "censored: never trained",
}
"""Description of a group that no step has taken."""


@dataclass(slots=True)
class SampleView:
    """A sample with the state of its group.

    Attributes:
        sample: the sample, with its tokens unless the ledger has deleted them.
        tokens: number of response tokens, also if they are deleted.
        prompt_index: index of the prompt in the prompt source.
        state: state of the group.
        train_step: train step that took the group; None: none yet.
        interrupts: (response tokens, weight version) at each interruption.
        trained_steps: weight version of tokens of the sample -> number of train steps in these weights.
        logp: log-prob (or NaN) of each response token under the trainer's weights before the step; empty: not logged.
        advantages: advantage of each response token; empty: not logged.
    """

    sample: Sample
    tokens: int
    prompt_index: int
    state: GroupState
    train_step: int | None
    interrupts: list[tuple[int, int]] = field(default_factory=list)
    trained_steps: dict[int, int] = field(default_factory=dict)
    logp: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """The train step that took the group, or the reason why no step has taken it, for users."""
        return GROUP_OUTCOMES[self.state] if self.train_step is None else f"step {self.train_step}"

    @property
    def has_tokens(self) -> bool:
        """Whether `sample` has its tokens."""
        return len(self.sample.response_ids) == self.tokens


def last_step(db: sqlite3.Connection) -> int:
    """Return the number of the last train step that took groups; 0 before the first step."""
    return int(db.execute("SELECT coalesce(max(train_step), 0) FROM takes").fetchone()[0])


def find_samples(db: sqlite3.Connection, segments: SegmentReader, query: SampleQuery) -> list[SampleView]:
    """Read one page of samples.

    Args:
        db: connection to the ledger.
        segments: reader of the run's segments.

    Raises:
        UserError: the sample, group or step of the query does not exist.
        RunError: stored tokens are damaged.
    """
    conditions, values = _conditions(db, query)
    columns = "samples.*, groups.prompt_ids AS group_prompt, prompt_index, state, train_step"
    rows = list(
        select(
            db,
            f"SELECT {columns} FROM samples JOIN groups USING (group_id) WHERE {' AND '.join(conditions)} "
            f"ORDER BY {_SQL_ORDERS[query.order]} LIMIT ? OFFSET ?",
            (*values, query.limit, query.skip),
        )
    )
    interrupts = _interrupts(db, [row["sample_id"] for row in rows])
    return [_view(db, segments, row, interrupts.get(row["sample_id"], [])) for row in rows]


def _interrupts(db: sqlite3.Connection, sample_ids: list[int]) -> dict[int, list[tuple[int, int]]]:
    """Return (response tokens, weight version) at each interruption of the samples' first sequences, by sample id."""
    placeholders = ", ".join("?" * len(sample_ids))
    interrupts: dict[int, list[tuple[int, int]]] = {}
    rows = db.execute(  # one query for all samples, because the table has no index
        "SELECT sample_id, tokens, weight_version FROM interrupts "
        f"WHERE sample_id IN ({placeholders}) AND NOT sequence AND tokens ORDER BY place",
        sample_ids,
    )
    for sample_id, tokens, version in rows:
        interrupts.setdefault(sample_id, []).append((tokens, version))
    return interrupts


def _conditions(db: sqlite3.Connection, query: SampleQuery) -> tuple[list[str], list[object]]:
    """Return the SQL conditions of a query, and the values of their placeholders.

    Raises:
        UserError: the sample, group or step of the query does not exist.
    """
    conditions = ["(samples.tokens > 0 OR samples.censor_reason IS NOT NULL)"]
    values: list[object] = []
    if query.sample is not None:
        conditions, values = ["samples.sample_id = ?"], [query.sample]
        if not db.execute("SELECT 1 FROM samples WHERE sample_id = ?", values).fetchone():
            raise UserError(f"sample {query.sample}: no such sample in the run")
    if query.group is not None:
        issued = db.execute("SELECT count(*) FROM groups").fetchone()[0]
        if not 0 <= query.group < issued:
            existing = f"groups 0 to {issued - 1}" if issued else "no group yet"
            raise UserError(f"group {query.group}: no such group; the run has {existing}")
        conditions.append("samples.group_id = ?")
        values.append(query.group)
    if query.step is not None:
        row = db.execute("SELECT group_ids FROM takes WHERE train_step = ?", (query.step,)).fetchone()
        if row is None:
            existing = f"steps 1 to {last}" if (last := last_step(db)) else "no step yet"
            raise UserError(f"step {query.step}: no such train step; the run has {existing}")
        ids = json.loads(row[0])
        conditions.append(f"samples.group_id IN ({', '.join('?' * len(ids))})")
        values += ids
    if query.status is not None:
        conditions.append("samples.status = ?")
        values.append(query.status)
    if query.resumed:
        conditions.append("samples.resumes > 0")
    if query.order in ("worst", "best"):
        conditions.append("samples.reward IS NOT NULL")
    return conditions, values


def _view(
    db: sqlite3.Connection,
    segments: SegmentReader,
    row: Mapping[str, Any],
    interrupts: list[tuple[int, int]],
) -> SampleView:
    sample_id = row["sample_id"]
    query = (
        "SELECT sequence, name, start, pieces.length FROM pieces JOIN segments USING (segment) "
        "WHERE sample_id = ? ORDER BY piece"
    )
    pieces: dict[int, list[Piece]] = {}
    for sequence, *location in db.execute(query, (sample_id,)):
        pieces.setdefault(sequence, []).append(Piece(*location))
    sample = sample_of_row(row, blob_to_ids(row["group_prompt"]), pieces.get(0, []))
    sequences = select(db, "SELECT * FROM sequences WHERE sample_id = ? ORDER BY sequence", (sample_id,))
    for sequence_row in sequences:
        sequence = sequence_of_row(sequence_row, pieces.get(sequence_row["sequence"], []))
        sample.extra_sequences.append(sequence)
    if pieces:
        # Routes and the teacher's log-probs are large, and are not shown.
        sample = replace(segments.load(sample), routes=[], teacher_logprobs=b"")
        for sequence in sample.extra_sequences:
            sequence.routes, sequence.teacher_logprobs = [], b""
    versions = sorted({span.version for span in sample.spans})
    placeholders = ", ".join("?" * len(versions))
    steps = f"SELECT weight_version, train_step FROM pushes WHERE weight_version IN ({placeholders})"
    return SampleView(
        sample, sample.tokens, row["prompt_index"], GroupState(row["state"]), row["train_step"],
        interrupts, dict(db.execute(steps, versions).fetchall()),
    )  # fmt: skip


def check_query(query: SampleQuery) -> None:
    """Validate the values of a query.

    Raises:
        UserError: a value is out of range.
    """
    statuses = [s.value for s in Status if s is not Status.IN_FLIGHT]
    if query.status is not None and query.status not in statuses:
        raise UserError(f"status {query.status}: expected one of {', '.join(statuses)}")
    if query.order not in ORDERS:
        raise UserError(f"order {query.order}: expected one of {', '.join(ORDERS)}")
    for name in ("sample", "group", "step", "skip"):
        value = getattr(query, name)
        if value is not None and not 0 <= value <= MAX_INTEGER:
            raise UserError(f"{name} {value}: expected 0 to {MAX_INTEGER}")
    if not 1 <= query.limit <= MAX_PAGE_SAMPLES:
        raise UserError(f"limit {query.limit}: expected 1 to {MAX_PAGE_SAMPLES}")


MAX_PAGE_SAMPLES = 256
"""Maximum number of samples of a page."""
MAX_INTEGER = 2**63 - 1
"""Maximum integer of SQLite."""


@dataclass
class SamplesAnswer:
    """The coordinator's response to a SampleQuery: a page of samples, or an error message for the user."""

    samples: list[SampleView] = field(default_factory=list)
    error: str = ""
