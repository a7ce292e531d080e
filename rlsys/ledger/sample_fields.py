"""The stored fields of samples: one table for the rows of rollouts.sqlite and the messages of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rlsys.core.spans import TokenSpan, TurnReward, VersionSpan
from rlsys.core.types import Sample, Status


def _unchanged(value: Any) -> Any:
    return value


class SampleField(NamedTuple):
    """A field of Sample.

    Args:
        name: attribute of Sample.
        type: type of its plain value in a message. Lists and dicts are JSON in SQL.
        column: column in SQL, if its name differs.
        to_plain: converts a value that is not None.
        from_plain: the inverse.
    """

    name: str
    type: Any
    column: str = ""
    to_plain: Callable[[Any], Any] = _unchanged
    from_plain: Callable[[Any], Any] = _unchanged


SEQUENCE_FIELDS = (
    SampleField("status", Status, to_plain=lambda status: status.value, from_plain=Status),
    SampleField(
        "spans", list[tuple[int, int, int]], "", lambda spans: [(s.version, s.start, s.end) for s in spans],
        lambda spans: [VersionSpan(*s) for s in spans],
    ),
    SampleField(
        "observed", list[tuple[int, int]], "", lambda spans: [(s.start, s.end) for s in spans],
        lambda spans: [TokenSpan(*s) for s in spans],
    ),
    SampleField("mu_sum", float),
    SampleField("resumes", int),
    SampleField("deaths", int),
    SampleField("faults", int),
    SampleField("cached_tokens", int),
    SampleField("prefilled_tokens", int),
    SampleField("engine", str | None),
    SampleField("last_turn", int, "spoke"),
)  # fmt: skip
"""Fields of each sequence."""
SAMPLE_FIELDS = (
    SampleField("reward", float | None),
    SampleField("named_rewards", dict[str, float] | None),
    SampleField("plain_reward", float | None),
    SampleField("answer", str | None),
    SampleField("censor_reason", str | None),
    SampleField("inherited_tokens", int, "given"),
    SampleField("discarded", int),
    SampleField(
        "turn_rewards", list[tuple[float, bool]] | None, "turn_marks",
        from_plain=lambda marks: [TurnReward(*m) for m in marks],
    ),
)  # fmt: skip
"""Fields of a sample as a whole."""
SequenceState = msgspec.defstruct(
    "SequenceState", [(f.name, f.type) for f in SEQUENCE_FIELDS], array_like=True
)
"""Message with SEQUENCE_FIELDS."""


def sequence_state(sequence: Sample) -> Any:
    """Return a SequenceState."""
    return SequenceState(*(f.to_plain(getattr(sequence, f.name)) for f in SEQUENCE_FIELDS))


def apply_state(state: Any, sequence: Sample) -> None:
    """Set the fields of a sequence from a SequenceState."""
    for field in SEQUENCE_FIELDS:
        setattr(sequence, field.name, field.from_plain(getattr(state, field.name)))


def to_columns(sample: Sample, fields: Sequence[SampleField]) -> dict[str, object]:
    """Return the columns of these fields. In flight is stored as parked, the state after a restart."""
    columns: dict[str, object] = {}
    for field in fields:
        value = getattr(sample, field.name)
        if value is not None:
            value = field.to_plain(Status.PARKED if value is Status.IN_FLIGHT else value)
            value = msgspec.json.encode(value).decode() if isinstance(value, list | dict) else value
        columns[field.column or field.name] = value
    return columns


def from_columns(row: Mapping[str, Any], fields: Sequence[SampleField]) -> dict[str, Any]:
    """Return arguments of Sample for these fields."""
    arguments: dict[str, Any] = {}
    for field in fields:
        value = row[field.column or field.name]
        if value is not None:
            is_json = isinstance(value, str) and field.type not in (Status, str | None)
            value = field.from_plain(msgspec.json.decode(value) if is_json else value)
        arguments[field.name] = value
    return arguments
