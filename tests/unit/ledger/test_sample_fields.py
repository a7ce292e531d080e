"""The table of fields: the columns of rollouts.sqlite, and what belongs to a sequence or to a sample."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from rlsys.core.types import Sample, TokenSequence
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.sample_fields import (
    EXTRA_SEQUENCE_FIELDS,
    IDENTITY_FIELDS,
    SAMPLE_FIELDS,
    SEQUENCE_FIELDS,
    SampleField,
    column_definitions,
)
from rlsys.ledger.store import FILE_NAME, open_readonly


def test_an_optional_field_is_a_column_that_may_be_null() -> None:
    fields = [
        SampleField("a", int),
        SampleField("b", float | None, "c"),
        SampleField("d", dict[str, int] | None),
    ]
    assert column_definitions(fields) == "a INTEGER NOT NULL, c REAL, d TEXT"


def test_the_tables_of_the_ledger_have_the_columns_of_the_fields(tmp_path: Path) -> None:
    RolloutBuffer(tmp_path / FILE_NAME, "run", 4).close()
    db = open_readonly(tmp_path / FILE_NAME)
    for table, table_fields, extra_columns in (
        ("samples", IDENTITY_FIELDS + SEQUENCE_FIELDS + SAMPLE_FIELDS, {"tokens", "prompt_ids"}),
        ("sequences", IDENTITY_FIELDS + EXTRA_SEQUENCE_FIELDS + SEQUENCE_FIELDS, {"prompt_ids"}),
    ):
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        assert len(columns) == len(set(columns))
        assert set(columns) == {f.column or f.name for f in table_fields} | extra_columns
    assert "USING INTEGER PRIMARY KEY" in str(
        db.execute("EXPLAIN QUERY PLAN SELECT * FROM samples WHERE sample_id = 1").fetchall()
    ), "the id is the row's number, without an index beside it"
    db.close()


def test_a_sequence_has_no_field_of_a_sample() -> None:
    of_sequence, of_sample = ({f.name for f in fields(kind)} for kind in (TokenSequence, Sample))
    assert {f.name for f in IDENTITY_FIELDS + EXTRA_SEQUENCE_FIELDS + SEQUENCE_FIELDS} <= of_sequence
    assert {f.name for f in SAMPLE_FIELDS} <= of_sample - of_sequence
