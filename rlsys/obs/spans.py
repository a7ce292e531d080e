"""OpenTelemetry spans of samples and train steps (`run.spans`), which rlsys/obs/otlp.py exports.

    trace of a sample   `sample`, from its start to its reward, with the events first_token, weights, interrupt,
                        resume, reward; `sample, until a stop` for the part in an earlier process
    trace of a step     `step` with the children rollout, train (with score) and push, and links to its samples

The id of a trace, and of a span `sample`, is derived from the run's id and the number of the sample or step. So all
spans of a sample are in one trace, also after restarts, and the trainer can link a step to samples without a message
from the rollout process. A repeated step has a second span `step` in its trace. Spans contain no texts of samples.
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
    """Id of a span.

    Attributes:
        trace: id of the trace, 128 bits.
        span: id of the span in the trace, 64 bits.
    """

    trace: int
    span: int


@dataclass
class Span:
    """A span of OpenTelemetry. Times are in seconds since the Unix epoch.

    Attributes:
        parent: the span that contains this one; None: none.
        events: (time, name, attributes) of each event.
        links: spans of other traces that belong to this one.
        error: reason of a failure; None: none.
    """

    name: str
    id: SpanId
    start: float
    end: float
    parent: SpanId | None = None
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[tuple[float, str, dict[str, Value]]] = field(default_factory=list)
    links: list[SpanId] = field(default_factory=list)
    error: str | None = None


def sample_span(run_id: str, sample_id: int) -> SpanId:
    """Return the id of the span `sample` of a sample."""
    return SpanId(_number(16, run_id, "sample", sample_id), _number(8, run_id, "sample", sample_id))


def child_of(parent: SpanId) -> SpanId:
    """Return a new random id in the trace of `parent`."""
    return SpanId(parent.trace, int.from_bytes(secrets.token_bytes(8), "big") or 1)


def _number(size: int, *parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:size], "big") or 1


def step_spans(run_id: str, entry: dict[str, Any], samples: Sequence[Sample]) -> Iterator[Span]:
    """Yield the spans of a train step.

    Args:
        run_id: id of the run.
        entry: the `step` line of metrics.jsonl. Its `time` is the end of the step.
        samples: samples that the step trained.
    """
    step = int(entry["step"])
    root = child_of(SpanId(_number(16, run_id, "step", step), 0))
    start = entry["time"] - entry["time_step"]
    rollout_end = start + entry["time_rollout"]
    train_end = rollout_end + entry["time_train"]
    attributes: dict[str, Value] = {
        f"rlsys.{name}": value
        for name, value in entry.items()
        if isinstance(value, int | float) and not name.startswith("time")
    }
    links = [sample_span(run_id, s.sample_id) for s in samples]
    yield Span("step", root, start, entry["time"], attributes=attributes, links=links)
    yield Span("rollout", child_of(root), start, rollout_end, parent=root)
    train = child_of(root)
    yield Span("train", train, rollout_end, train_end, parent=root)
    if "time_score" in entry:
        yield Span("score", child_of(train), rollout_end, rollout_end + entry["time_score"], parent=train)
    yield Span("push", child_of(root), train_end, train_end + entry["time_sync"], parent=root)
