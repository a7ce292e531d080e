"""Spans of samples and train steps (`run.spans`), as OpenTelemetry means them; rlsys/obs/otlp.py sends them.

    trace of a sample   `sample`, from its start to its reward, with the events first_token, weights, interrupt,
                        resume, reward; `sample, until a stop` for what an earlier process did of it
    trace of a step     `step` with the children rollout, train (with score) and push, and links to the samples that
                        it trained

The ids of a trace, and that of a sample's own span, follow from the run and the number of the sample or step. So all
spans of a sample are in one trace, whatever was stopped and resumed, and a step's links need no word from the rollout
process. A step that is trained again has a second `step` in its trace. Texts are never sent.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsys.core.types import Sample

Value = str | int | float | bool | Sequence[int]


@dataclass(frozen=True)
class SpanId:
    """`trace`: 128 bits; `span`: 64 bits."""

    trace: int
    span: int


@dataclass
class Span:
    """Times are unix seconds. `error`: why it came to nothing."""

    name: str
    id: SpanId
    start: float
    end: float
    parent: SpanId | None = None
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[tuple[float, str, dict[str, Value]]] = field(default_factory=list)
    """(time, name, attributes)."""
    links: list[SpanId] = field(default_factory=list)
    error: str | None = None


def sample_span(run_id: str, sample_id: int) -> SpanId:
    """Of the span `sample`."""
    return SpanId(_number(16, run_id, "sample", sample_id), _number(8, run_id, "sample", sample_id))


def child_of(parent: SpanId) -> SpanId:
    """One more span of that trace."""
    return SpanId(parent.trace, int.from_bytes(secrets.token_bytes(8), "big") or 1)


def _number(size: int, *of: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:size], "big") or 1


def step_spans(run_id: str, entry: dict[str, Any], samples: Sequence[Sample]) -> Iterator[Span]:
    """Of a line of metrics of the kind `step`, whose `time` is the step's end, and the samples that it trained."""
    step = int(entry["step"])
    root = child_of(SpanId(_number(16, run_id, "step", step), 0))
    begun = entry["time"] - entry["time_step"]
    taken = begun + entry["time_rollout"]
    trained = taken + entry["time_train"]
    attributes: dict[str, Value] = {
        f"rlsys.{name}": value
        for name, value in entry.items()
        if isinstance(value, int | float) and not name.startswith("time")
    }
    links = [sample_span(run_id, s.sample_id) for s in samples]
    yield Span("step", root, begun, entry["time"], attributes=attributes, links=links)
    yield Span("rollout", child_of(root), begun, taken, parent=root)
    train = child_of(root)
    yield Span("train", train, taken, trained, parent=root)
    if "time_score" in entry:
        yield Span("score", child_of(train), taken, taken + entry["time_score"], parent=train)
    yield Span("push", child_of(root), trained, trained + entry["time_sync"], parent=root)
