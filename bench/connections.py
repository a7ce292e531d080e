"""Measure requests per second and latency of each HTTP server of rlsys beside idle and slow connections.

    python bench/connections.py --json [--servers router ...] [--connections 1100] [--rate 20] [--seconds 8] [--quick]

In each case the bench sends requests at a fixed rate, each on a new connection, also while others are unanswered:

    quiet         no other connections
    idle          other connections send nothing
    slow_heads    other connections send a request head byte by byte
    slow_bodies   other connections send a request body byte by byte

The other connections are opened again when the server closes them, at most 100 per second. (A server that answers
before it has read the body, for example with a refusal, closes the connection.) Each server is a process with the
real server and its limits, and gets cheap requests. `router` is `rlsys router` in front of an engine that answers at
once. `environment` and `commands` (of the rollout process) listen on Unix sockets, to which only processes of the
run's user can connect. A request without an answer within TIMEOUT_SECONDS counts as failed. Rounds of the four cases
are interleaved; a ratio compares a case with `quiet` in the same round, and is the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import machine, running, say

from launch.ports import free_ports
from rlsys.core.descriptors import raise_soft_limit

STAGE = Path(__file__).with_name("connections_stage.py")
ROUTER_STAGE = Path(__file__).with_name("router_stage.py")
PATHS = {
    "agents": "/x/v1/models",
    "commands": "/status",
    "dashboard": "/",
    "environment": "/health",
    "exporter": "/metrics",
    "meeting": "/",
    "router": "/health",
    "tinker": "/api/v1/healthz",
}
"""Path of a cheap request, by server."""
CASES = ("quiet", "idle", "slow_heads", "slow_bodies")
TIMEOUT_SECONDS = 20.0
"""Time limit of a request."""


@dataclass(frozen=True)
class Served:
    """The requests of one case.

    Attributes:
        starts: start time of each request in seconds.
        seconds: duration of each request; None if it failed.
    """

    starts: list[float]
    seconds: list[float | None]

    @property
    def latencies(self) -> list[float]:
        """Return the durations of the answered requests, sorted."""
        return sorted(s for s in self.seconds if s is not None)

    def figures(self) -> dict[str, float]:
        """Return answered requests per second, percentiles of the latency in milliseconds, and the failed share."""
        if not (latencies := self.latencies):
            return {
                "requests_per_second": 0.0,
                "p50_ms": TIMEOUT_SECONDS * 1e3,
                "p99_ms": TIMEOUT_SECONDS * 1e3,
                "failed": 1.0,
            }
        ends = [start + s for start, s in zip(self.starts, self.seconds, strict=True) if s is not None]
        return {
            "requests_per_second": len(latencies) / (max(ends) - self.starts[0]),
            "p50_ms": 1e3 * latencies[len(latencies) // 2],
            "p99_ms": 1e3 * latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))],
            "failed": 1 - len(latencies) / len(self.seconds),
        }


# Servers


@contextlib.contextmanager
def server(name: str, folder: Path) -> Iterator[str]:
    """Start a server, and yield its address: `HOST:PORT`, or the path of a Unix socket. End it after the context."""
    if name != "router":
        command = [sys.executable, str(STAGE), name, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline().strip()
            finally:
                process.terminate()
        return
    engine, port = free_ports("127.0.0.1", 2)
    instant = [sys.executable, str(ROUTER_STAGE), "--instant", "--port", str(engine)]
    router = [sys.executable, "-m", "rlsys.cli.main", "router", "--port", str(port), "--vocab-size", "128"]
    router += ["--engine", f"http://127.0.0.1:{engine}"]
    address = f"127.0.0.1:{port}"
    with (
        running(instant, folder / "engine.log", lambda: answers(f"127.0.0.1:{engine}", "/health")),
        running(router, folder / "router.log", lambda: answers(address, "/ready")),
    ):
        yield address


def answers(address: str, path: str) -> bool:
    """Return whether a request gets an answer other than a server error."""
    return asyncio.run(request(address, path)) is not None


async def request(address: str, path: str) -> float | None:
    """Send one request on a new connection.

    Returns:
        the seconds until the whole answer has arrived; None without an answer, or with a server error (5xx).
    """
    start = time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            if address.startswith("/"):
                reader, writer = await asyncio.open_unix_connection(address)
            else:
                host, _, port = address.rpartition(":")
                reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                answer = await reader.read(16)
                while await reader.read(2**16):
                    pass
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    served = answer.startswith(b"HTTP/") and not answer.startswith(b"HTTP/1.1 5")
    return time.monotonic() - start if served else None


# Cases


async def send_at_rate(address: str, path: str, rate: float, seconds: float) -> Served:
    """Send `rate` requests per second for `seconds`, without waiting for earlier ones. Wait for all answers."""
    tasks, starts, begin = [], [], time.monotonic()
    for number in range(max(1, round(rate * seconds))):
        await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))
        starts.append(time.monotonic())
        tasks.append(asyncio.create_task(request(address, path)))
    return Served(starts, await asyncio.gather(*tasks))


@contextlib.contextmanager
def held_connections(address: str, case: str, connections: int) -> Iterator[None]:
    """Hold `connections` connections open from another process during the context; in the case `quiet` none."""
    if case == "quiet":
        yield
        return
    command = [sys.executable, str(STAGE), "hold", address, case, str(connections)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "ready\n"
            yield
        finally:
            holder.kill()


def measure_server(name: str, args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Measure rounds of all cases on one server. Return the summary of each case."""
    rounds: list[dict[str, dict[str, float]]] = []
    with server(name, folder) as address:
        for number in range(args.rounds):
            figures = {}
            for case in (*CASES[number % len(CASES) :], *CASES[: number % len(CASES)]):
                with held_connections(address, case, args.connections):
                    served = asyncio.run(send_at_rate(address, PATHS[name], args.rate, args.seconds))
                figures[case] = served.figures()
            rounds.append(figures)
    return {case: summary_of(rounds, case) for case in CASES}


def summary_of(rounds: list[dict[str, dict[str, float]]], case: str) -> dict[str, Any]:
    """Return the medians of a case's figures, and of their ratios to the case `quiet` of the same round."""

    def median(name: str, base: str | None = None) -> float:
        return statistics.median(r[case][name] / (r[base][name] if base else 1.0) for r in rounds)

    figures = {name: median(name) for name in rounds[0][case]}
    ratios = {f"{name}_ratio": median(name, "quiet") for name in ("requests_per_second", "p50_ms", "p99_ms")}
    return {**figures, **ratios}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen servers one after the other. Return the result of the bench."""
    results = {}
    for name in args.servers:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure_server(name, args, Path(folder))
        for case, figures in results[name].items():
            rate, latency = figures["requests_per_second_ratio"], figures["p50_ms_ratio"]
            say(
                f"{name}, {case}, relative to quiet: {rate:.2f} x requests per second, {latency:.1f} x median latency"
            )
    busy = [figures for cases in results.values() for case, figures in cases.items() if case != "quiet"]
    return {
        "bench": "connections", "machine": machine(), "connections": args.connections, "rate": args.rate,
        "servers": results,
        "summary": {
            "lowest_requests_per_second_ratio": min(f["requests_per_second_ratio"] for f in busy),
            "highest_p50_ms_ratio": max(f["p50_ms_ratio"] for f in busy),
            "highest_p99_ms_ratio": max(f["p99_ms_ratio"] for f in busy),
            "highest_failed": max(f["failed"] for f in busy),
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument(
        "--servers", nargs="+", choices=sorted(PATHS), default=sorted(PATHS), help="servers (default: all)"
    )
    parser.add_argument("--connections", type=int, default=1100, help="number of connections to hold")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of a case")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds of all cases")
    parser.add_argument(
        "--quick", action="store_true", help="few, short cases: checks only that the bench runs"
    )
    args = parser.parse_args()
    if args.quick:
        args.connections, args.seconds, args.rounds = 50, 1.0, 1
    raise_soft_limit()
    result = measure(args)
    print(json.dumps(result if args.json else result["summary"], indent=2))


if __name__ == "__main__":
    main()
