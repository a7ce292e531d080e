"""What Prometheus reads from a stand-alone router."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from rlsys.gateway.fleet import Fleet


class Metrics:
    """Counts as requests end; everything else is looked up when it is asked for."""

    def __init__(self, fleet: Fleet, inside: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rlsys_router_requests", "HTTP requests answered", ["path", "code"], registry=self._registry
        )
        self._seconds = Histogram(
            "rlsys_router_request_seconds", "Time to the end of an answer", ["path"], registry=self._registry
        )
        self.refused = Counter(
            "rlsys_router_refused", "Requests that no engine may see", registry=self._registry
        )
        self.connections: Mapping[str, int] = {}
        """Of the server: connections that were refused or closed, by cause."""
        self._registry.register(_State(fleet, inside, self))

    def observe(self, path: str, code: int, seconds: float) -> None:
        self._requests.labels(path, str(code)).inc()
        self._seconds.labels(path).observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """Body and content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _State:
    """Of fleet and engines, at the moment of a scrape."""

    def __init__(self, fleet: Fleet, inside: Callable[[], int], metrics: Metrics) -> None:
        self._fleet = fleet
        self._inside = inside
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        """Nothing is looked up before the first scrape: the pool belongs to an event loop."""
        return []

    def collect(self) -> Iterator[Metric]:
        pool, dispatcher = self._fleet.pool, self._fleet.dispatcher
        serving = {e.url for e in pool.serving()}
        gauge, count = GaugeMetricFamily, CounterMetricFamily
        yield gauge("rlsys_router_inside", "Samples here, in engines or waiting", self._inside())
        yield gauge("rlsys_router_waiting", "Requests that wait for an engine", dispatcher.waiting)
        yield gauge("rlsys_router_weight_version", "What engines should have", pool.version)
        yield count(
            "rlsys_router_interrupts", "Times that all requests were asked back", dispatcher.interrupts
        )
        for name, value in self._metrics.connections.items():
            yield count(f"rlsys_router_connections_{name}", f"Connections: {name}", value)
        for name, value in self._fleet.proxy.counts.items():
            yield count(f"rlsys_router_{name}", f"Interrupted requests {name}", value)
        yield count(
            "rlsys_router_poisonous", "Requests refused: engines died of them", self._fleet.proxy.poisonous
        )
        per_engine = [
            (gauge, "up", "Whether it may get requests", lambda e: e.url in serving),
            (gauge, "in_flight", "Requests in it", lambda e: e.load),
            (gauge, "tokens", "Tokens of the requests in it, estimated", lambda e: e.tokens),
            (count, "deaths", "Times that it was gone", lambda e: e.deaths),
        ]
        for family, name, text, value_of in per_engine:
            metric = family(f"rlsys_router_engine_{name}", text, labels=["engine"])
            for engine in pool.engines:
                metric.add_metric([engine.url], float(value_of(engine)))
            yield metric
