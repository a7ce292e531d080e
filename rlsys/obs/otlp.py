"""Export of spans by OTLP over HTTP with the OpenTelemetry SDK, in a background thread.

The environment variables of the SDK apply. The endpoint is OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or
OTEL_EXPORTER_OTLP_ENDPOINT, by default http://localhost:4318. If the receiver is unreachable, spans are dropped and
counted, and the run continues.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlsys.core.errors import UserError
from rlsys.obs.metrics import read_run_id
from rlsys.obs.spans import Span, SpanId

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
QUEUE = 2**16
"""Maximum number of queued spans; the SDK drops further ones with a warning."""
SEND_SECONDS = 5.0
"""Time limit in seconds of one attempt to send spans, and of the export at the end of the process."""
_NANO = 1_000_000_000


def check_spans(enabled: bool) -> None:
    """Check that PACKAGES are installed if spans are enabled.

    Args:
        enabled: run.spans.

    Raises:
        UserError: a package is missing.
    """
    if enabled and not is_available():
        raise UserError(
            "run.spans = true: the package opentelemetry-sdk is not installed: pip install 'rlsys[otel]'"
        )


def is_available() -> bool:
    """Return whether PACKAGES are installed."""
    try:
        return all(map(importlib.util.find_spec, PACKAGES))
    except ModuleNotFoundError:  # a parent package is missing
        return False


class SpanSender:
    """Owner of the thread that exports spans."""

    def __init__(self, run: Path, service: str) -> None:
        """Start the thread.

        Args:
            run: the run folder.
            service: name of this process in traces.

        Raises:
            UserError: a package is missing.
        """
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
        self.span_count = 0
        """Number of spans that were queued."""
        self.seconds = 0.0
        """Total duration of the calls of `send` in seconds."""

    @property
    def run_id(self) -> str:
        """Id of the run, whose metrics.jsonl must have a line."""
        if self._run_id is None:
            self._run_id = read_run_id(self._run)
        return self._run_id

    @property
    def dropped(self) -> int:
        """Number of spans that could not be exported."""
        return self._exporter.dropped

    def send(self, spans: Iterable[Span]) -> None:
        """Queue spans for export."""
        start = time.perf_counter()
        for span in spans:
            self._processor.on_end(self._readable(span))
            self.span_count += 1
        self.seconds += time.perf_counter() - start

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
        """Export the remaining spans, for at most SEND_SECONDS."""
        self._processor.force_flush(round(SEND_SECONDS * 1000))
        self._processor.shutdown()


class _Counting:
    """Exporter that counts the spans that another exporter could not send."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self.dropped = 0

    def export(self, spans: Sequence[Any]) -> Any:
        result = self._exporter.export(spans)
        if result.name != "SUCCESS":
            self.dropped += len(spans)
        return result

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _context(span_id: SpanId) -> object:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(
        span_id.trace, span_id.span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )
