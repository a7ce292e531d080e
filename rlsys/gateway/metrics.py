"""Metrics of a stand-alone router, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from rlsys.gateway.fleet import Fleet


class Metrics:
    """Counters of requests, and the state of the fleet, which is read at each scrape.

    Args:
        fleet: the engines.
        samples: returns the number of samples in engines or waiting.

    Attributes:
        connections: cause -> number of connections that the server refused or closed.
    """

    def __init__(self, fleet: Fleet, samples: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rlsys_router_requests", "Answered HTTP requests", ["path", "code"], registry=self._registry
        )
        self._seconds = Histogram(
            "rlsys_router_request_seconds",
            "Seconds until the end of an answer",
            ["path"],
            registry=self._registry,
        )
        self.refusals = Counter(
            "rlsys_router_refused", "Requests that were refused as invalid", registry=self._registry
        )
        self.connections: Mapping[str, int] = {}
        self._registry.register(_State(fleet, samples, self))

    def observe(self, path: str, code: int, seconds: float) -> None:
        """Count an answered request, its HTTP status and the time until its end in seconds."""
        self._requests.labels(path, str(code)).inc()
        self._seconds.labels(path).observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """Return the body and the content type of the response to a scrape."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _State:
    """Collector of the state of the fleet and its engines at a scrape."""

    def __init__(self, fleet: Fleet, samples: Callable[[], int], metrics: Metrics) -> None:
        self._fleet = fleet
        self._samples = samples
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        """Return no metrics, so that the pool, which belongs to an event loop, is not read before a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        pool, dispatcher = self._fleet.pool, self._fleet.dispatcher
        serving = {e.url for e in pool.serving()}
        gauge, count = GaugeMetricFamily, CounterMetricFamily
        yield gauge("rlsys_router_samples", "Samples in engines or waiting", self._samples())
        yield gauge("rlsys_router_waiting", "Requests that wait for an engine", dispatcher.waiting)
        yield gauge("rlsys_router_weight_version", "Weight version that engines should have", pool.version)
        yield count(
            "rlsys_router_interrupts", "Times at which all requests were interrupted", dispatcher.interrupts
        )
        for name, value in self._metrics.connections.items():
            yield count(
                f"rlsys_router_connections_{name}",
                f"Connections that the server refused or closed: {name}",
                value,
            )
        stats = self._fleet.router.stats()
        yield count(
            "rlsys_router_resumes", "Responses that continued after an interruption", stats["resumes"]
        )
        yield count("rlsys_router_received_tokens", "Tokens of responses", stats["received_tokens"])
        yield count(
            "rlsys_router_poisonous",
            "Requests refused because engines died or failed on them",
            stats["poisonous"],
        )
        per_engine = [
            (gauge, "up", "1 if the engine may get requests", lambda e: e.url in serving),
            (gauge, "in_flight", "Requests in the engine", lambda e: e.load),
            (gauge, "tokens", "Tokens of the requests in the engine", lambda e: e.tokens),
            (count, "deaths", "Deaths of the engine", lambda e: e.deaths),
        ]
        for family, name, text, value_of in per_engine:
            metric = family(f"rlsys_router_engine_{name}", text, labels=["engine"])
            for engine in pool.engines:
                metric.add_metric([engine.url], float(value_of(engine)))
            yield metric
