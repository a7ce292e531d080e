"""The ledger: what it counts, and that each way of not adding up is named with its numbers."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rlsys.core.errors import RunError, UserError
from rlsys.core.spans import VersionSpan
from rlsys.core.types import GroupState, Prompt, SampleGroup, Segment, Status
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import Ledger, check_ledger, read_ledger
from rlsys.ledger.reader import RunReader
from rlsys.ledger.store import FILE_NAME, open_readonly, read_groups


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Ten groups of two: 4 trained in two steps, 1 filtered, 1 expired, 1 censored, 1 ready, 2 active."""
    buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", 2)
    version = buffer.versions.new(0)
    groups = [buffer.issue(Prompt(i, "", [1], {}), [1, 2]) for i in range(10)]

    def end(group: SampleGroup, state: GroupState) -> None:
        for s in group.samples:
            s.append(Segment([7] * 3, [-0.5] * 3, [VersionSpan(version, 0, 3)], "stop"))
            s.status = Status.FINISHED
        buffer.finish(group, state)

    for i, state in enumerate(["ready"] * 4 + ["filtered", "expired", "censored", "ready"]):
        end(groups[i], GroupState(state))
    groups[8].samples[0].append(Segment([7] * 2, [-0.5] * 2, [VersionSpan(version, 0, 2)]))
    groups[8].samples[0].status = Status.IN_FLIGHT
    groups[9].samples[1].status = Status.FINISHED
    buffer.save([groups[8].samples[0], groups[9].samples[1]])
    buffer.take(1, buffer.ready()[:2])
    buffer.take(2, buffer.ready()[:2])
    buffer.flush()
    yield tmp_path  # read while the writer has it open
    buffer.close()


def test_figures_hand_counted(run_dir: Path) -> None:
    ledger = RunReader(run_dir).ledger()
    check_ledger(ledger)
    figures = ledger.figures()
    states = {"trained": 4, "filtered": 1, "expired": 1, "censored": 1, "ready": 1, "active": 2}
    assert {k: figures[k] for k in states} == states
    assert figures["issued"] == 10
    assert (figures["parked"], figures["in_flight"]) == (3, 0)
    assert (figures["lost"], figures["trained_twice"]) == (0, 0)
    assert figures["samples"] == {k: 2 * n for k, n in states.items()}
    assert figures["tokens"] == {**{k: 6 * n for k, n in states.items()}, "active": 2}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("DELETE FROM groups WHERE group_id = 7", "10 groups were issued, but .*ready 0"),
        (
            "DELETE FROM samples WHERE sample_id = 3",
            "the 4 groups in the state trained should have 8 samples, but have 7",
        ),
        ("UPDATE takes SET group_ids = '[0, 1, 2]' WHERE train_step = 1", "1 groups were trained in more"),
        (
            "UPDATE groups SET train_step = 2 WHERE group_id = 0",
            "train steps disagree for 1 groups: the journal has step 1 for group 0, the table of groups 2",
        ),
        ("UPDATE groups SET state = 'ready', train_step = NULL WHERE group_id = 3", "disagree"),
        ("UPDATE meta SET value = 9 WHERE key = 'lost'", "9 tokens that engines generated"),
    ],
)
def test_inconsistent_counts_are_reported(run_dir: Path, damage: str, message: str) -> None:
    db = sqlite3.connect(run_dir / FILE_NAME)
    with db:
        db.execute(damage)
    db.close()
    with pytest.raises(RunError, match=message):
        check_ledger(RunReader(run_dir).ledger())


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM meta WHERE key = 'issued'",
        "DROP TABLE takes",
        "UPDATE takes SET group_ids = '[1,'",
    ],
)
def test_a_ledger_with_a_missing_piece_is_a_one_line_error(run_dir: Path, damage: str) -> None:
    db = sqlite3.connect(run_dir / FILE_NAME)
    with db:
        db.execute(damage)
    db.close()
    with pytest.raises(UserError, match="not a usable ledger"):
        check_ledger(RunReader(run_dir).ledger())


def test_a_folder_without_rollouts_has_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file: the folder is not a run"):
        RunReader(tmp_path).ledger()


def test_reading_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"something else" * 100)
    with pytest.raises(UserError, match="not a usable ledger"):
        RunReader(tmp_path).ledger()


async def test_writes_continue_while_a_long_ledger_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty million samples take some fifteen seconds. What is committed meanwhile is not in the count."""
    buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", 2)
    buffer.issue(Prompt(0, "", [1], {}), [1, 2])
    buffer.flush()
    start_event, go_on = threading.Event(), threading.Event()

    def slow(db: sqlite3.Connection) -> Ledger:
        db.execute("SELECT count(*) FROM groups").fetchone()
        start_event.set()
        assert go_on.wait(60)
        return read_ledger(db)

    monkeypatch.setattr("rlsys.ledger.buffer.read_ledger", slow)
    counting = asyncio.ensure_future(buffer.committed_ledger())
    await asyncio.to_thread(start_event.wait, 60)
    buffer.issue(Prompt(1, "", [1], {}), [1, 2])
    buffer.flush()
    go_on.set()
    assert (await counting).issued_groups == 1
    check_ledger(await counting)
    assert buffer.ledger().issued_groups == 2
    buffer.close()


def test_a_step_query_uses_the_index_and_scans_no_table(run_dir: Path) -> None:
    """What a take asks of the file: by the step's index, however many groups there are."""
    with closing(open_readonly(run_dir / FILE_NAME)) as db:
        queries: list[str] = []
        db.set_trace_callback(queries.append)
        read_groups(db, "train_step = ?", 2)
        db.set_trace_callback(None)
        assert len(queries) == 4
        plans = [row[3] for query in queries for row in db.execute(f"EXPLAIN QUERY PLAN {query}")]
    assert any("groups_by_step" in plan for plan in plans)
    assert not [plan for plan in plans if plan.startswith("SCAN")]
