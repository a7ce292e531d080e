"""Metrics of a run for Prometheus. The supervisor serves them, because the roles' own ports are private.

    http://127.0.0.1:PORT/metrics
        rlsys_role_*          whether each process runs, and how often it was started
        rlsys_rollout_*       last status of the rollout process, the coordinator
        rlsys_engine_*        state of each engine in that status
        rlsys_trainer_*       last train step in metrics.jsonl
        rlsys_trainer_eval_*  last evaluation in metrics.jsonl
    RUN/../prometheus/NAME.json
        targets for Prometheus' file_sd_configs: this port, and the port of each engine

The supervisor polls the rollout process once a second, and reads metrics.jsonl as it grows. So a role that is dead or
hangs delays no scrape: its values become old, and the metrics `..._seconds` report their age.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from launch.backends import Backend
from launch.console import Display
from launch.plan import LaunchPlan
from launch.process import RoleStatus
from launch.rundir import RunDir
from launch.stops import StopSignals
from launch.supervisor import Supervisor
from rlsys.config import Config
from rlsys.core.folders import replace_file
from rlsys.http_server.connections import ServerLimits
from rlsys.http_server.server import guarded_app, serving_in_thread

HOST = "127.0.0.1"
LIMITS = ServerLimits(connections=64, body_bytes=0, head_seconds=10.0)
PAGE_SECONDS = 1.0
"""Seconds for which all scrapes get the same page. Rendering takes milliseconds, and clients need no key."""
TARGETS = "prometheus"
"""Folder beside the run folders with the targets of all runs, because file_sd_configs expects files in one folder."""
_NOT_ALLOWED = re.compile(r"[^a-zA-Z0-9_]")


class Exporter:
    """A display that stores the state for Prometheus, and forwards all calls to another display.

    Scrapes run in other threads, so this class never modifies data that they read, but replaces it.
    """

    def __init__(self, display: Display, clock: Callable[[], float] = time.time) -> None:
        """Create an exporter without data.

        Args:
            display: the other display.
            clock: returns seconds since the epoch.
        """
        self._display = display
        self._clock = clock
        self.roles: Callable[[], dict[str, RoleStatus]] = dict
        """Returns the state of each role; called at each scrape."""
        self._status: dict[str, Any] = {}
        self._status_time: float | None = None
        self._change_time = clock()
        self._lines: dict[str, dict[str, Any]] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._page, self._page_time = b"", 0.0

    def phase(self, text: str) -> None:
        self._display.phase(text)

    def entry(self, entry: dict[str, Any], *, live: bool) -> None:
        self._lines = {**self._lines, entry["kind"]: entry}
        self._change_time = self._clock()
        self._display.entry(entry, live=live)

    def status(self, status: dict[str, Any]) -> None:
        self._status_time = self._clock()
        if status != self._status:
            self._change_time = self._status_time
        self._status = status
        self._display.status(status)

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format. Scrapes within PAGE_SECONDS get the same page."""
        current_time = self._clock()
        if not self._page or not 0 <= current_time - self._page_time < PAGE_SECONDS:
            self._page, self._page_time = generate_latest(self._registry), current_time
        return self._page

    def describe(self) -> list[Metric]:
        """Return no metrics, because their names are not known in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        current_time, status, lines = self._clock(), self._status, self._lines
        yield _gauge(
            "rlsys_quiet_seconds",
            "Time since the last token, reward or line of metrics",
            current_time - self._change_time,
        )
        yield from _roles(self.roles())
        if self._status_time is not None:
            help_text = "Time since the last status of the rollout process"
            yield _gauge("rlsys_rollout_silent_seconds", help_text, current_time - self._status_time)
            for name, value in _numbers(status):
                yield _gauge(
                    f"rlsys_rollout_{name}", "Status of the rollout process, as in rlsys status", value
                )
            yield from _engines(status.get("engine_figures", {}))
        for kind, entry in lines.items():
            prefix = {"step": "rlsys_trainer_", "eval": "rlsys_trainer_eval_"}.get(kind)
            if prefix is None:
                continue
            yield _gauge(
                f"{prefix}line_seconds", "Time since this line was written", current_time - entry["time"]
            )
            for name, value in _numbers(entry):
                if name != "time":
                    yield _gauge(prefix + name, "Value in the last line of metrics.jsonl", value)


def _roles(roles: dict[str, RoleStatus]) -> Iterator[Metric]:
    """Yield the metrics of the roles' processes."""
    up = GaugeMetricFamily("rlsys_role_up", "Whether the process runs", labels=["role"])
    starts = CounterMetricFamily("rlsys_role_starts", "Number of starts", labels=["role"])
    for name, role in roles.items():
        up.add_metric([name], float(role.up))
        starts.add_metric([name], role.starts)
    yield up
    yield starts


def _engines(engines: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    """Yield the router's metrics of each engine."""
    serving = GaugeMetricFamily(
        "rlsys_engine_serving", "Whether the engine has the current weights and is in use", labels=["engine"]
    )
    for url, engine_metrics in engines.items():
        serving.add_metric([url], float(engine_metrics["serving"]))
    yield serving
    for name in ("requests", "tokens", "weight_version", "deaths"):
        gauge = GaugeMetricFamily(
            f"rlsys_engine_{name}", "Value that the router has of the engine", labels=["engine"]
        )
        for url, engine_metrics in engines.items():
            if engine_metrics.get(name) is not None:
                gauge.add_metric([url], float(engine_metrics[name]))
        yield gauge


def _numbers(fields: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numeric fields, with names that Prometheus allows."""
    for name, value in fields.items():
        if isinstance(value, int | float):
            yield _NOT_ALLOWED.sub("_", name), float(value)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value)


def targets_path(run: Path) -> Path:
    """Return the targets file of a run."""
    return run.resolve().parent / TARGETS / f"{run.name}.json"


@contextlib.contextmanager
def serve_metrics(exporter: Exporter, port: int, run: Path, engines: Iterable[str]) -> Iterator[int]:
    """Serve scrapes and write the targets file until the context ends; yield the port.

    Args:
        exporter: source of the metrics.
        port: port to listen on; 0 chooses one.
        run: the run folder.
        engines: URLs of the run's engines, for the targets file.

    Raises:
        UserError: the port is in use.
    """
    path = targets_path(run)

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=exporter.page(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    app = guarded_app([web.get("/", scrape), web.get("/metrics", scrape)], LIMITS)
    with serving_in_thread(app, HOST, port, "launch.metrics_port =") as address:
        port = urlsplit(address).port or 0
        targets = [{"targets": [f"{HOST}:{port}"], "labels": {"job": "rlsys", "run": run.name}}]
        for url in engines:
            engine = urlsplit(url)
            labels = {"job": "sglang", "run": run.name}
            targets.append({"targets": [f"{engine.hostname}:{engine.port}"], "labels": labels})
        path.parent.mkdir(exist_ok=True)
        replace_file(path, json.dumps(targets, indent=1).encode())
        try:
            yield port
        finally:
            path.unlink(missing_ok=True)


def run_plan(
    config: Config,
    plan: LaunchPlan,
    backend: Backend,
    run_dir: RunDir,
    display: Display,
    stop: StopSignals,
    check: Callable[[], None],
) -> None:
    """Run a plan, with an exporter if launch.metrics_port is set. The other arguments are those of Supervisor."""
    if config.launch.metrics_port is None:
        Supervisor(config, plan, backend, run_dir, display, stop, check).run()
        return
    exporter = Exporter(display)
    supervisor = Supervisor(config, plan, backend, run_dir, exporter, stop, check)
    exporter.roles = supervisor.roles
    engines = [role.ready_url for role in plan.router_engines() if role.ready_url]
    with serve_metrics(exporter, config.launch.metrics_port, run_dir.path, engines) as port:
        exporter.phase(
            f"metrics for Prometheus: http://127.0.0.1:{port}/metrics (targets file: {targets_path(run_dir.path)})"
        )
        supervisor.run()
