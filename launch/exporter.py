"""What Prometheus reads of a run: the supervisor answers for all roles whose ports are not for strangers.

    http://127.0.0.1:PORT/metrics     rlsys_role_*      which processes run, and how often each was started
                                      rlsys_rollout_*   what the rollout process, the coordinator, said last
                                      rlsys_engine_*    of it: what each engine does
                                      rlsys_trainer_*   the last line of metrics.jsonl; rlsys_trainer_eval_* of the
                                                        last evaluation
    RUN/../prometheus/NAME.json       where to read, for Prometheus' file_sd_configs: this port, and each engine's own

The supervisor asks the rollout process once a second, and reads metrics.jsonl as it grows. So a role that is gone or
hangs costs no scrape its answer: its numbers grow old, and `..._seconds` say how old.
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
from prometheus_client.exposition import choose_encoder

from launch.backends import Backend
from launch.console import Display
from launch.plan import LaunchPlan
from launch.process import RoleTold
from launch.rundir import RunDir
from launch.stops import StopSignals
from launch.supervisor import Supervisor
from rlsys.config import Config
from rlsys.http_server.connections import ServerLimits
from rlsys.http_server.server import guarded_app, serving_in_thread
from rlsys.obs.coordinator import replace

HOST = "127.0.0.1"
LIMITS = ServerLimits(connections=64, body_bytes=0, head_seconds=10.0)
TARGETS = "prometheus"
"""Folder beside the runs: file_sd_configs finds all files of one folder, and not one file in each of many."""
_NOT_ALLOWED = re.compile(r"[^a-zA-Z0-9_]")


class Exporter:
    """A display that tells Prometheus what it hears, and its own display too.

    Scrapes come in other threads: what they read is replaced as a whole and never changed.
    """

    def __init__(self, display: Display, clock: Callable[[], float] = time.time) -> None:
        self._display = display
        self._clock = clock
        self.roles: Callable[[], dict[str, RoleTold]] = dict
        """Asked at each scrape."""
        self._status: dict[str, Any] = {}
        self._answered: float | None = None
        self._changed = clock()
        self._lines: dict[str, dict[str, Any]] = {}

    def phase(self, text: str) -> None:
        self._display.phase(text)

    def entry(self, entry: dict[str, Any], *, live: bool) -> None:
        self._lines = {**self._lines, entry["kind"]: entry}
        self._changed = self._clock()
        self._display.entry(entry, live=live)

    def status(self, status: dict[str, Any]) -> None:
        self._answered = self._clock()
        if status != self._status:
            self._changed = self._answered
        self._status = status
        self._display.status(status)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        now, status, lines = self._clock(), self._status, self._lines
        yield _gauge(
            "rlsys_quiet_seconds", "Since a token, a reward or a line of metrics", now - self._changed
        )
        yield from _roles(self.roles())
        if self._answered is not None:
            words = "Since the rollout process said something"
            yield _gauge("rlsys_rollout_silent_seconds", words, now - self._answered)
            for name, value in _numbers(status):
                yield _gauge(f"rlsys_rollout_{name}", "Of the rollout process, as rlsys status", value)
            yield from _engines(status.get("engine_figures", {}))
        for kind, entry in lines.items():
            before = {"step": "rlsys_trainer_", "eval": "rlsys_trainer_eval_"}.get(kind)
            if before is None:
                continue
            yield _gauge(f"{before}line_seconds", "Since this line was written", now - entry["time"])
            for name, value in _numbers(entry):
                if name != "time":
                    yield _gauge(before + name, "Of the last line of metrics.jsonl", value)


def _roles(roles: dict[str, RoleTold]) -> Iterator[Metric]:
    up = GaugeMetricFamily("rlsys_role_up", "Whether the process runs", labels=["role"])
    starts = CounterMetricFamily("rlsys_role_starts", "How often it was started", labels=["role"])
    for name, role in roles.items():
        up.add_metric([name], float(role.up))
        starts.add_metric([name], role.starts)
    yield up
    yield starts


def _engines(engines: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    """What the router knows of each."""
    serving = GaugeMetricFamily(
        "rlsys_engine_serving", "Whether it has the current weights and is not left out", labels=["engine"]
    )
    for url, told in engines.items():
        serving.add_metric([url], float(told["serving"]))
    yield serving
    for name in ("requests", "tokens", "weight_version", "deaths"):
        gauge = GaugeMetricFamily(
            f"rlsys_engine_{name}", "Of the engine, as the router knows it", labels=["engine"]
        )
        for url, told in engines.items():
            if told.get(name) is not None:
                gauge.add_metric([url], float(told[name]))
        yield gauge


def _numbers(told: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in told.items():
        if isinstance(value, int | float):
            yield _NOT_ALLOWED.sub("_", name), float(value)


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value)


def targets_of(run: Path) -> Path:
    return run.resolve().parent / TARGETS / f"{run.name}.json"


@contextlib.contextmanager
def exported(exporter: Exporter, port: int, run: Path, engines: Iterable[str]) -> Iterator[int]:
    """Answers scrapes until the block ends; gives the port. `engines`: URLs of health of those with a port of ours.

    Raises UserError for a port in use.
    """
    path = targets_of(run)
    registry = CollectorRegistry()
    registry.register(exporter)

    async def scrape(request: web.Request) -> web.Response:
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": kind})

    app = guarded_app([web.get("/", scrape), web.get("/metrics", scrape)], LIMITS)
    with serving_in_thread(app, HOST, port, "launch.metrics_port =") as address:
        port = urlsplit(address).port or 0
        targets = [{"targets": [f"{HOST}:{port}"], "labels": {"job": "rlsys", "run": run.name}}]
        for url in engines:
            place = urlsplit(url)
            labels = {"job": "sglang", "run": run.name}
            targets.append({"targets": [f"{place.hostname}:{place.port}"], "labels": labels})
        path.parent.mkdir(exist_ok=True)
        replace(path, json.dumps(targets, indent=1).encode())
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
    """With launch.metrics_port, under the eyes of Prometheus. `check`: the Supervisor's."""
    if config.launch.metrics_port is None:
        Supervisor(config, plan, backend, run_dir, display, stop, check).run()
        return
    exporter = Exporter(display)
    supervisor = Supervisor(config, plan, backend, run_dir, exporter, stop, check)
    exporter.roles = supervisor.roles
    engines = [role.ready_url for role in plan.pool() if role.ready_url]
    with exported(exporter, config.launch.metrics_port, run_dir.path, engines) as port:
        exporter.phase(
            f"Prometheus reads http://127.0.0.1:{port}/metrics, and {targets_of(run_dir.path)} says so"
        )
        supervisor.run()
