"""Measure the load of the rollout process: CPU time per token, delay of its event loop, cost of a take, and memory.

    python bench/scale.py --json [--quick] [--engines 256] [--samples 5000] [--mean 512] [--routes]
                          [--workers 4] [--history 1000] [--tree OTHER]

Scripted engines in separate processes serve SGLang's API on real sockets, and answer at once. So the rollout process
(manager, router, buffer and ledger; no GPU, no trainer) is the bottleneck, and the figure is its CPU time by
getrusage. With `--routes` each token has experts in DeepSeek-V3's shape, 58 layers times 8. Engines write the experts
into the run's folder if the rollout process requests it; otherwise the responses contain them, as SGLang's do.
`--tree` names another checkout of rlsys, whose rollout process runs first on the same engines, in the same rounds.

One core can receive 1e6 / `rollout_us_per_token` tokens per second. With `--workers` this figure is the CPU time of
the rollout process and its workers; `coordinator_us_per_token` is the part that more workers do not reduce, and
`streams_lag_p99_ms` the delay of the event loops that read the streams.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from measure import machine, say

from tests.helpers.python_path import python_path

ROOT = Path(__file__).resolve().parents[1]
STAGE = Path(__file__).with_name("scale_stage.py")
MOST_STREAMS = 12_000
"""Largest number of connections of one engine process. Each needs a file descriptor, often limited to 20,000."""
LAYERS, TOPK = 58, 8
"""DeepSeek-V3's layers with experts, and experts of a token in each layer."""


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive ports that are free now.

    Raises:
        SystemExit: there are no such ports.
    """
    for first in range(20_000, 60_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    sys.exit(
        f"--engines {count}: found no {count} consecutive free ports from 20000 to 60000; use fewer engines"
    )


def rollout(tree: Path, common: list[str], args: argparse.Namespace) -> dict[str, float]:
    """Run a rollout process of a checkout of rlsys on the running engines.

    Args:
        tree: the checkout.
        common: arguments of scale_stage.py that engines and rollout share.
        args: arguments of this bench.

    Returns:
        the figures that scale_stage.py prints.

    Raises:
        SystemExit: the rollout process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(STAGE), "--coordinator", *common, "--folder", folder]
        command += ["--samples", str(args.samples), "--steps", str(args.steps)]
        if (tree / "rlsys/worker/workers.py").is_file():  # older checkouts have no workers
            command += ["--workers", str(args.workers)]
        if args.history:
            command += ["--history", str(args.history)]
        env = os.environ | {"PYTHONPATH": python_path(tree)}
        process = subprocess.run(command, env=env, cwd=tree, capture_output=True, text=True)
        if process.returncode:
            sys.exit(
                f"{tree}: the rollout process ended with exit code {process.returncode}; expected 0\n"
                f"{process.stderr[-3000:]}"
            )
        figures: dict[str, float] = json.loads(process.stdout)
        return figures


def engine_commands(args: argparse.Namespace, port: int, shape: list[str]) -> list[list[str]]:
    """Return the commands of the engine processes, each with at most about MOST_STREAMS connections.

    Args:
        args: arguments of this bench.
        port: port of the first engine.
        shape: arguments of scale_stage.py that describe responses and routes.
    """
    engines_per_process = -(-args.engines // -(-args.samples // MOST_STREAMS))
    return [
        [sys.executable, str(STAGE), "--engines", str(min(engines_per_process, args.engines - first)),
         "--port", str(port + first), *shape]
        for first in range(0, args.engines, engines_per_process)
    ]  # fmt: skip


@contextlib.contextmanager
def running_engines(command: list[str]) -> Iterator[None]:
    """Start a process with engines, and wait until they listen. End it after the context."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON at the end")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, one round: checks only that the bench runs"
    )
    parser.add_argument("--engines", type=int, default=256, help="number of engines")
    parser.add_argument("--samples", type=int, default=5000, help="number of samples in flight")
    parser.add_argument("--mean", type=int, default=512, help="mean number of tokens of a response")
    parser.add_argument("--steps", type=int, default=3, help="number of train steps of a round")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; figures are medians")
    parser.add_argument("--routes", action="store_true", help="return the experts of each token")
    parser.add_argument("--workers", type=int, default=1, help="number of rollout workers of this checkout")
    parser.add_argument(
        "--history", type=int, default=0, help="number of train steps that the ledger has at the start"
    )
    parser.add_argument("--tree", type=Path, help="another checkout, measured in the same rounds")
    args = parser.parse_args()
    if args.quick:
        args.engines, args.samples, args.mean, args.steps, args.rounds = 4, 64, 128, 2, 1
    port = free_ports(args.engines)
    layers = LAYERS if args.routes else 0
    shape = [
        word
        for name, value in (("mean", args.mean), ("layers", layers), ("topk", TOPK))
        for word in (f"--{name}", str(value))
    ]
    common = ["--engines", str(args.engines), "--port", str(port), *shape]
    trees = {**({"other": args.tree.resolve()} if args.tree else {}), "this": ROOT}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    with contextlib.ExitStack() as stack:
        for command in engine_commands(args, port, shape):
            stack.enter_context(running_engines(command))
        for n in range(args.rounds):
            for name, tree in trees.items():
                results = rollout(tree, common, args)
                rounds[name].append(results)
                say(f"round {n + 1}, {name}: {results['rollout_us_per_token']:.2f} us of CPU time per token")
    figures: dict[str, Any] = {
        name: {key: median(r[key] for r in results) for key in results[0]} for name, results in rounds.items()
    }
    for name, results in figures.items():
        for key, value in results.items():
            say(f"{name:>6} {key:<24} {value:,.3f}")
    if args.json:
        print(
            json.dumps(
                {"machine": machine(), "sizes": vars(args) | {"tree": str(args.tree or "")}, **figures}
            )
        )


if __name__ == "__main__":
    main()
