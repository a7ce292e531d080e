"""OTLP receiver on loopback for traces: HTTP with protobuf."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class ReceivedSpan:
    """A received span. Ids are hexadecimal, times are in nanoseconds."""

    name: str
    trace: str
    span: str
    parent: str
    service: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    links: list[tuple[str, str]]
    error: str


class Receiver:
    """Receiver of spans.

    Attributes:
        spans: All received spans.
        status: HTTP status of the next responses. The receiver drops the spans unless it is 200.
        url: Base URL.
    """

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.status = 200
        self.url = ""

    def named(self, name: str) -> list[ReceivedSpan]:
        return [s for s in self.spans if s.name == name]

    def add(self, body: bytes) -> None:
        """Add the spans of an ExportTraceServiceRequest."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource_spans in request.resource_spans:
            service = _values(resource_spans.resource.attributes)["service.name"]
            for scope in resource_spans.scope_spans:
                self.spans += [_received_span(span, service) for span in scope.spans]


def _received_span(span: Any, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        service=service,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events=[(e.name, e.time_unix_nano, _values(e.attributes)) for e in span.events],
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        error=span.status.message,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextlib.contextmanager
def running_receiver() -> Iterator[Receiver]:
    """Run a receiver in a thread."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/v1/traces" or self.headers["Content-Type"] != "application/x-protobuf":
                self.send_response(400)
            else:
                self.send_response(receiver.status)
                if receiver.status == 200:
                    receiver.add(
                        gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                    )
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
