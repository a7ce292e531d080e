"""Measure the cost of the router, compared with no router and with sglang-router, on the same engine.

    python bench/router.py --json [--quick] [--repeats 9] [--sglang-router FOLDER]

    throughput   tokens/s of CONCURRENT /generate requests to a real SGLang server, with whole answers and streams:
                 direct, through `rlsys router`, and through sglang-router, in short rounds
    latency      median of the milliseconds that a router adds to single short requests
    capacity     requests/s and CPU time of the routers in front of a server that answers at once; and seconds and
                 memory of `rlsys.router` with many samples in flight, then parked

The machine's speed varies. Therefore every figure of a router is compared with that of `direct` in the same round,
the order within a round rotates, and medians are over rounds.

If sglang-router is not installed, FOLDER is an unpacked wheel of it; without both the bench omits sglang-router.
Client, routers and engine share this machine's cores, so a router takes CPU time from a CPU engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from measure import machine, running, running_engine, say, spread, write_random_moe
from router_stage import PROMPT, VOCAB

from launch.ports import free_ports
from rlsys.config import Config
from rlsys.engine.wire import make_session
from tests.helpers.python_path import python_path

CONCURRENT = 64
"""Number of concurrent requests."""
LATENCY_TOKENS = 4
"""Response tokens of a request whose latency is measured."""
WARM_UP = 5
"""Unmeasured rounds of single requests."""
HELD_REPEATS = 3
STAGE = Path(__file__).with_name("router_stage.py")


# Processes


@contextlib.contextmanager
def serving(
    argv: list[str], log: Path, env: dict[str, str] | None = None
) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server, and yield its URL and its keeper once it answers /generate. End it after the context.

    Args:
        argv: arguments of Python, without the server's `--port`.
        log: file of the output.
        env: additional environment variables.
    """
    port = free_ports("127.0.0.1", 1)[0]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, *argv, "--port", str(port)]
    with running(command, log, lambda: generates(url), {**os.environ, **(env or {})}) as keeper:
        yield url, psutil.Process(keeper)


def generates(url: str) -> bool:
    """Return whether the server answers /generate."""
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(request_body(0, 1)).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def routers_before(
    engine: str, folder: Path, unpacked: Path | None, stack: contextlib.ExitStack
) -> dict[str, tuple[str, psutil.Process]]:
    """Start every available router in front of an engine.

    Args:
        engine: URL of the engine.
        folder: folder of the logs, which must not exist.
        unpacked: unpacked wheel of sglang-router, or None.
        stack: ends the routers.

    Returns:
        URL and keeper process of each router, by name.
    """
    folder.mkdir()
    rlsys_command = ["-m", "rlsys.cli.main", "router", "--engine", engine, "--vocab-size", str(VOCAB)]
    routers = {"rlsys": stack.enter_context(serving(rlsys_command, folder / "rlsys.log"))}
    if unpacked or importlib.util.find_spec("sglang_router"):
        sglang_command = ["-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--worker-urls", engine]
        env = {"PYTHONPATH": python_path(unpacked)} if unpacked else None
        routers["sglang_router"] = stack.enter_context(
            serving(sglang_command, folder / "sglang-router.log", env)
        )
    return routers


def cpu_seconds(keeper: psutil.Process) -> float:
    """Return the CPU seconds of a keeper's descendants."""
    return sum(sum(p.cpu_times()[:2]) for p in keeper.children(recursive=True))


def resident_mib(keeper: psutil.Process) -> float:
    """Return the resident memory of a keeper's descendants in MiB."""
    return sum(p.memory_info().rss for p in keeper.children(recursive=True)) / 2**20


# Load


def request_body(i: int, tokens: int, *, stream: bool = False) -> dict[str, Any]:
    """Return the body of request `i` for /generate. Requests have different prompts, so they share no prefix."""
    ids = [3 + (i * 37 + j * (1 + i // 120)) % (VOCAB - 8) for j in range(PROMPT)]
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "sampling_seed": i + 1, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, "stream": stream}


async def send(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    """Send a request, and return the number of tokens of its response."""
    async with session.post(f"{url}/generate", json=body) as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
    if body["stream"]:
        raw = [e for e in raw.split(b"\n\n") if e.startswith(b"data: {")][-1].removeprefix(b"data: ")
    return int(json.loads(raw)["meta_info"]["completion_tokens"])


async def send_many(url: str, requests: int, tokens: int, *, stream: bool = False) -> tuple[float, int]:
    """Send requests, CONCURRENT at a time. Return the seconds, and the number of received tokens.

    Args:
        url: the target.
        requests: number of requests.
        tokens: response tokens of a request.
        stream: whether to request streams.
    """
    received, indices = 0, iter(range(requests))

    async def worker(session: aiohttp.ClientSession) -> None:
        nonlocal received
        for i in indices:
            response_tokens = await send(session, url, request_body(i, tokens, stream=stream))
            received += response_tokens  # a separate line, because other workers add during the await

    async with make_session() as session:
        start = time.monotonic()
        await asyncio.gather(*(worker(session) for _ in range(CONCURRENT)))
        return time.monotonic() - start, received


async def alone(urls: dict[str, str], requests: int) -> dict[str, list[float]]:
    """Return the milliseconds of single requests, by target: one request to each target in each round.

    Args:
        urls: URL of each target, by name.
        requests: number of rounds.
    """
    milliseconds: dict[str, list[float]] = {name: [] for name in urls}
    async with make_session() as session:
        for i in range(-WARM_UP, requests):
            for name in turns(urls, i):
                start = time.monotonic()
                await send(session, urls[name], request_body(i % requests, LATENCY_TOKENS))
                if i >= 0:
                    milliseconds[name].append((time.monotonic() - start) * 1000)
    return milliseconds


def turns(urls: dict[str, str], rounds_before: int) -> list[str]:
    """Return the order of the targets in a round. Orders rotate and reverse, so that no target is always first.

    Args:
        urls: URL of each target, by name.
        rounds_before: number of earlier rounds.
    """
    names = list(urls)
    first = rounds_before % len(names)
    rotated = names[first:] + names[:first]
    return rotated if rounds_before // len(names) % 2 == 0 else rotated[::-1]


# The bench


def throughput(urls: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens/s and ratios to `direct`, for whole answers and for streams, after a warm-up round."""
    requests, tokens, repeats = (64, 8, 1) if args.quick else (128, 64, args.repeats)
    results = {}
    for kind in ("whole", "streamed"):
        rates: dict[str, list[float]] = {name: [] for name in urls}
        for repeat in range(-1, repeats):
            for name in turns(urls, repeat):
                seconds, tokens_received = asyncio.run(
                    send_many(urls[name], requests, tokens, stream=kind == "streamed")
                )
                assert tokens_received == requests * tokens, (
                    f"{name}: received {tokens_received} tokens; expected {requests * tokens}"
                )
                say(f"{kind}, {name}: {tokens_received / seconds:.0f} tokens/s")
                if repeat >= 0:
                    rates[name].append(tokens_received / seconds)
        results[kind] = {"tokens_per_s": spreads(rates), "ratio_to_direct": spreads(ratios(rates))}
    return results


def added(latency: dict[str, list[float]], name: str) -> list[float]:
    """Return the milliseconds that a router added to `direct`, in each round."""
    return [a - b for a, b in zip(latency[name], latency["direct"], strict=True)]


def ratios(rates: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the ratio of each target's rate to that of `direct`, in each round."""
    return {
        name: [a / b for a, b in zip(values, rates["direct"], strict=True)] for name, values in rates.items()
    }


def spreads(values: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return median, smallest and largest value of each entry."""
    return {name: spread(v) for name, v in values.items()}


def real(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure throughput and latency in front of a real engine."""
    model = write_random_moe(folder / "model", vocab_size=VOCAB)
    engine = {
        "max_running_requests": CONCURRENT,
        "max_total_tokens": 32768,
        "deterministic": False,
        "extra_args": ["--disable-radix-cache"],  # every target sends the same prompts
    }
    config = Config.model_validate({"model": {"path": model}, "engine": engine})
    with contextlib.ExitStack() as stack:
        say("starting an engine and the routers")
        url = stack.enter_context(running_engine(config, folder, start_seconds=600))
        routers = routers_before(url, folder / "real", args.sglang_router, stack)
        urls = {"direct": url, **{name: address for name, (address, _) in routers.items()}}
        latency = asyncio.run(alone(urls, 10 if args.quick else 200))
        return {
            "throughput": throughput(urls, args),
            "p50_ms": {name: statistics.median(values) for name, values in latency.items()},
            "p90_ms": {name: statistics.quantiles(values, n=10)[8] for name, values in latency.items()},
            "added_p50_ms": {name: statistics.median(added(latency, name)) for name in routers},
        }


def capacity(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the routers in front of a server that answers at once, and samples that `rlsys.router` holds."""
    requests, repeats = (500, 1) if args.quick else (2000, args.repeats)
    with contextlib.ExitStack() as stack:
        url, _ = stack.enter_context(serving([str(STAGE), "--instant"], folder / "instant.log"))
        routers = routers_before(url, folder / "instant", args.sglang_router, stack)
        urls = {"direct": url, **{name: address for name, (address, _) in routers.items()}}
        rates: dict[str, list[float]] = {name: [] for name in urls}
        cpu: dict[str, list[float]] = {name: [] for name in routers}
        for repeat in range(repeats):
            for name in turns(urls, repeat):
                cpu_before = cpu_seconds(routers[name][1]) if name in routers else 0.0
                seconds, _ = asyncio.run(send_many(urls[name], requests, 1))
                rates[name].append(requests / seconds)
                say(f"{name}: {requests / seconds:.0f} requests/s")
                if name in routers:
                    cpu[name].append((cpu_seconds(routers[name][1]) - cpu_before) / requests * 1000)
        resident = {name: resident_mib(keeper) for name, (_, keeper) in routers.items()}
    samples, repeats = (1000, 1) if args.quick else (10_000, HELD_REPEATS)
    held_figures = [held_samples(samples) for _ in range(repeats)]
    return {
        "requests_per_s": spreads(rates),
        "cpu_ms_per_request": spreads(cpu),
        "process_mib": resident,
        "held": spreads({key: [h[key] for h in held_figures] for key in held_figures[0]}),
    }


def held_samples(samples: int) -> dict[str, float]:
    """Return the figures of router_stage.hold in a new process, in which no freed memory hides allocations."""
    say(f"{samples} samples in flight and parked")
    process = subprocess.run(
        [sys.executable, STAGE, "--held", str(samples)], capture_output=True, text=True, check=True
    )
    figures: dict[str, float] = json.loads(process.stdout)
    return figures


def summary(real: dict[str, Any], capacity: dict[str, Any]) -> dict[str, float | None]:
    """Return the figures of docs/performance.md."""
    return {
        "throughput_ratio_to_direct": real["throughput"]["whole"]["ratio_to_direct"]["rlsys"]["median"],
        "added_p50_ms": real["added_p50_ms"]["rlsys"],
        "sglang_router_added_p50_ms": real["added_p50_ms"].get("sglang_router"),
        "requests_per_second": capacity["requests_per_s"]["rlsys"]["median"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--repeats", type=int, default=9, help="number of rounds, with each target once")
    parser.add_argument("--quick", action="store_true", help="checks only that the bench runs")
    parser.add_argument(
        "--sglang-router", type=Path, metavar="FOLDER", help="unpacked wheel of sglang-router"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        result: dict[str, Any] = {
            "machine": machine(), "capacity": capacity(args, folder), "real": real(args, folder)
        }  # fmt: skip
    result["summary"] = summary(result["real"], result["capacity"])
    print(json.dumps(result if args.json else result["summary"], indent=2))


if __name__ == "__main__":
    main()
