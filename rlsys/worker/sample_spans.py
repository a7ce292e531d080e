"""SampleSpans: tracing spans of samples (rlsys/obs/spans.py).

Timelines are in memory only. A process that is killed loses the events of unfinished samples. A process that
stops normally sends the events of parked samples as partial spans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rlsys.core.types import Sample, TokenSequence
from rlsys.obs.otlp import SpanSender
from rlsys.obs.spans import Span, Value, child_of, sample_span


@dataclass
class SampleTimeline:
    """Events of a sample in this process.

    Attributes:
        start: time at which the sample began to wait for an engine, in seconds since the epoch.
        version: weight version of the sample's last token; None: it has no token.
        parked: whether the sample has tokens, but none since its last interrupt or restart.
        events: time, name and attributes of each event.
    """

    start: float
    version: int | None
    parked: bool
    events: list[tuple[float, str, dict[str, Value]]] = field(default_factory=list)


class SampleSpans:
    """Records and sends spans of samples. Owns the timelines of samples that have no reward yet.

    Args:
        sender: sends the spans; None: record nothing.
        clock: returns the time in seconds since the epoch.
    """

    def __init__(self, sender: SpanSender | None, clock: Callable[[], float] = time.time) -> None:
        self._sender = sender
        self._clock = clock
        self._timelines: dict[int, SampleTimeline] = {}

    def begin(self, sample: Sample) -> None:
        """Start the timeline of a sample that waits for an engine, unless the sample has a timeline."""
        if self._sender is not None and sample.sample_id not in self._timelines:
            version = sample.spans[-1].version if sample.spans else None
            self._timelines[sample.sample_id] = SampleTimeline(
                self._clock(), version, parked=bool(sample.tokens)
            )

    def on_tokens(self, sample: TokenSequence) -> None:
        """Record new tokens of a sample."""
        if (timeline := self._timelines.get(sample.sample_id)) is None:
            return
        version = sample.spans[-1].version
        if timeline.version is None:
            self._note(timeline, "first_token", {"rlsys.weight_version": version})
        elif timeline.parked:
            self._note(
                timeline, "resume", {"rlsys.weight_version": version, "rlsys.engine": sample.engine or ""}
            )
        if timeline.version not in (None, version):
            self._note(timeline, "weights", {"rlsys.weight_version": version})
        timeline.version, timeline.parked = version, False

    def on_interrupt(self, samples: Iterable[TokenSequence]) -> None:
        """Record that these samples were interrupted."""
        for sample in samples:
            if (timeline := self._timelines.get(sample.sample_id)) is not None:
                self._note(timeline, "interrupt", {"rlsys.tokens": sample.tokens})
                timeline.parked = True

    def _note(self, timeline: SampleTimeline, name: str, attributes: dict[str, Value]) -> None:
        timeline.events.append((self._clock(), name, attributes))

    def end(self, sample: Sample, reason: str | None = None) -> None:
        """Send the span of a sample that has its reward or was censored.

        Args:
            reason: why the sample was censored; None: it was not.
        """
        if (timeline := self._timelines.pop(sample.sample_id, None)) is None:
            return
        if sample.reward is not None:
            self._note(timeline, "reward", {"rlsys.reward": sample.reward})
        self._send(sample, timeline, error=reason)

    def stop(self, samples: Iterable[Sample]) -> None:
        """Send the events of unfinished samples as partial spans, because the process ends."""
        for sample in samples:
            if (timeline := self._timelines.pop(sample.sample_id, None)) is not None:
                self._send(sample, timeline, part=True)
        if self._sender is not None:
            self._sender.close()

    def _send(
        self, sample: Sample, timeline: SampleTimeline, *, error: str | None = None, part: bool = False
    ) -> None:
        assert self._sender is not None
        span_id = sample_span(self._sender.run_id, sample.sample_id)
        attributes: dict[str, Value] = {
            "rlsys.sample": sample.sample_id,
            "rlsys.group": sample.group_id,
            "rlsys.status": sample.status.value,
            "rlsys.tokens": sample.tokens,
            "rlsys.resumes": sample.resumes,
            "rlsys.weight_versions": sorted({s.version for s in sample.spans}),
        }
        if sample.reward is not None:
            attributes["rlsys.reward"] = sample.reward
        span = Span(
            name="sample, until a stop" if part else "sample",
            id=child_of(span_id) if part else span_id,
            start=timeline.start,
            end=self._clock(),
            parent=span_id if part else None,
            attributes=attributes,
            events=timeline.events,
            error=error,
        )
        self._sender.send([span])

    def metrics(self) -> dict[str, float]:
        """Return the number of sent and lost spans, and the seconds spent on them, since this process started."""
        if self._sender is None:
            return {}
        counts = {"spans": self._sender.span_count, "spans_lost": self._sender.dropped}
        return {**counts, "time_spans": self._sender.seconds}
