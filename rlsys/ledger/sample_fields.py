"""The stored fields of samples, and their conversion to rows of rollouts.sqlite and to messages of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple, get_args

import msgspec

from rlsys.core.spans import Fork, TokenSpan, TurnReward, VersionSpan
from rlsys.core.types import Status, TokenSequence


def _unchanged(value: Any) -> Any:
    return value


class SampleField(NamedTuple):
    """A stored field of a TokenSequence or Sample.

    Attributes:
        name: name of the attribute.
        type: type of the plain value, which messages contain; SQL columns contain lists and dicts as JSON.
        column: name of the SQL column; empty: `name`.
        to_plain: converts a value other than None to its plain value.
        from_plain: the inverse of `to_plain`.
    """

    name: str
    type: Any
    column: str = ""
    to_plain: Callable[[Any], Any] = _unchanged
    from_plain: Callable[[Any], Any] = _unchanged


IDENTITY_FIELDS = (
    SampleField("sample_id", int),
    SampleField("group_id", int),
    SampleField("index", int, "place"),  # INDEX is an SQL keyword
    SampleField("seed", int),
)
"""Fields of each sequence that do not change after its creation."""
EXTRA_SEQUENCE_FIELDS = (
    SampleField("sequence", int),
    SampleField("parent", int | None),
    SampleField("aside", bool, from_plain=bool),
)
"""Additional fields of the sequences of a sample after its first."""
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
    SampleField("last_turn", int),
)  # fmt: skip
"""Fields of each sequence that change while it is generated."""
SAMPLE_FIELDS = (
    SampleField("reward", float | None),
    SampleField("named_rewards", dict[str, float] | None),
    SampleField("plain_reward", float | None),
    SampleField("answer", str | None),
    SampleField("censor_reason", str | None),
    SampleField("inherited_tokens", int),
    SampleField("discarded", int),
    SampleField(
        "turn_rewards", list[tuple[float, bool]] | None,
        from_plain=lambda rewards: [TurnReward(*r) for r in rewards],
    ),
    SampleField("own_prompt", bool, from_plain=bool),
    SampleField("fork", list[int] | None, to_plain=list, from_plain=lambda origin: Fork(*origin)),
)  # fmt: skip
"""Fields of a sample, in addition to those of its first sequence."""
SequenceState = msgspec.defstruct(
    "SequenceState", [(f.name, f.type) for f in SEQUENCE_FIELDS], array_like=True
)
"""Message with the plain values of SEQUENCE_FIELDS."""


def sequence_state(sequence: TokenSequence) -> Any:
    """Return the SequenceState of a sequence."""
    return SequenceState(*(f.to_plain(getattr(sequence, f.name)) for f in SEQUENCE_FIELDS))


def apply_state(state: Any, sequence: TokenSequence) -> None:
    """Set SEQUENCE_FIELDS of a sequence from a SequenceState."""
    for field in SEQUENCE_FIELDS:
        setattr(sequence, field.name, field.from_plain(getattr(state, field.name)))


_SQL_TYPES = {int: "INTEGER", bool: "INTEGER", float: "REAL"}


def column_definitions(fields: Sequence[SampleField]) -> str:
    """Return the column definitions of `fields` for CREATE TABLE."""
    definitions = []
    for field in fields:
        optional = NoneType in get_args(field.type)
        plain_type = next(t for t in get_args(field.type) if t is not NoneType) if optional else field.type
        null = "" if optional else " NOT NULL"
        definitions.append(f"{field.column or field.name} {_SQL_TYPES.get(plain_type, 'TEXT')}{null}")
    return ", ".join(definitions)


def to_columns(sample: TokenSequence, fields: Sequence[SampleField]) -> dict[str, object]:
    """Return the value of each SQL column of `fields`.

    The status IN_FLIGHT becomes PARKED, because no request survives a restart.
    """
    columns: dict[str, object] = {}
    for field in fields:
        value = getattr(sample, field.name)
        if value is not None:
            value = field.to_plain(Status.PARKED if value is Status.IN_FLIGHT else value)
            value = msgspec.json.encode(value).decode() if isinstance(value, list | dict) else value
        columns[field.column or field.name] = value
    return columns


def from_columns(row: Mapping[str, Any], fields: Sequence[SampleField]) -> dict[str, Any]:
    """Return the values of `fields` in a row, by attribute: keyword arguments of TokenSequence or Sample."""
    arguments: dict[str, Any] = {}
    for field in fields:
        value = row[field.column or field.name]
        if value is not None:
            is_json = isinstance(value, str) and field.type not in (Status, str | None)
            value = field.from_plain(msgspec.json.decode(value) if is_json else value)
        arguments[field.name] = value
    return arguments
