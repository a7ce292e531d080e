"""Sends spans by OTLP over HTTP, with the OpenTelemetry SDK, from a thread of its own.

Where to: OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else http://localhost:4318; the SDK's
other variables count too. A receiver that is gone costs spans, which are counted, and no step.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlsys.core.errors import UserError
from rlsys.obs.metrics import run_id_of
from rlsys.obs.spans import Span, SpanId

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
QUEUE = 2**16
"""Spans that wait to be sent; further ones are dropped by the SDK, with a line in the log."""
SEND_SECONDS = 5.0
"""For one attempt. What ends the process waits no longer for what is left."""
_NANO = 1_000_000_000


def check_spans(wanted: bool) -> None:
    """Raises UserError when the packages are missing."""
    if wanted and not sent_from_here():
        raise UserError(
            "run.spans = true: the package opentelemetry-sdk is not installed: pip install 'rlsys[otel]'"
        )


def sent_from_here() -> bool:
    """Whether the packages are installed."""
    try:
        return all(map(importlib.util.find_spec, PACKAGES))
    except ModuleNotFoundError:  # one of their parents
        return False


class SpanSender:
    """Owns the thread that sends. `service`: the process, as traces name it."""

    def __init__(self, run: Path, service: str) -> None:
        """Raises UserError when the packages are missing."""
        check_spans(True)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._run = run
        self._run_id: str | None = None
        self._resource = Resource.create(
            {"service.name": f"rlsys.{service}", "rlsys.run": run.resolve().name}
        )
        self._exporter = _Counting(OTLPSpanExporter(timeout=SEND_SECONDS))
        self._processor = BatchSpanProcessor(self._exporter, max_queue_size=QUEUE)
        self.made = 0
        """Spans, since the process started."""
        self.seconds = 0.0
        """Of the caller's time that they took."""

    @property
    def run_id(self) -> str:
        """A line of metrics must be there."""
        if self._run_id is None:
            self._run_id = run_id_of(self._run)
        return self._run_id

    @property
    def lost(self) -> int:
        """Spans that the receiver did not take."""
        return self._exporter.lost

    def send(self, spans: Iterable[Span]) -> None:
        """Returns at once."""
        begun = time.perf_counter()
        for span in spans:
            self._processor.on_end(self._readable(span))
            self.made += 1
        self.seconds += time.perf_counter() - begun

    def _readable(self, span: Span) -> object:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import Link, Status, StatusCode

        return ReadableSpan(
            span.name,
            context=_context(span.id),
            parent=None if span.parent is None else _context(span.parent),
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(name, attributes, round(at * _NANO)) for at, name, attributes in span.events],
            links=[Link(_context(link)) for link in span.links],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=round(span.start * _NANO),
            end_time=round(span.end * _NANO),
        )

    def close(self) -> None:
        """Send what is left, for at most SEND_SECONDS."""
        self._processor.force_flush(round(SEND_SECONDS * 1000))
        self._processor.shutdown()


class _Counting:
    """An exporter that counts what it could not send."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self.lost = 0

    def export(self, spans: Sequence[Any]) -> Any:
        result = self._exporter.export(spans)
        if result.name != "SUCCESS":
            self.lost += len(spans)
        return result

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _context(of: SpanId) -> object:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(of.trace, of.span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
