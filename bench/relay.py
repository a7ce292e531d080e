"""Measure a weight push over a slow link by the number of receivers, with and without relays.

    python bench/relay.py --json [--megabytes 32] [--rate 16] [--receivers 1 2 4 8] [--quick]

Receivers are real relays in separate processes, without engines; the bench compares the tensors that they load with
the sent ones. The sender sends all data through one link of `rate` MB/s on loopback; receivers connect to each other
directly. The weights are random float32 numbers, which hardly compress, so the bench measures the transfer and not
the compression.

    star      seconds of a push in which every receiver is a separate chain
    relay     seconds of a push in which all receivers form one chain
    change    bytes over the link of a second push to the chain, as a share of the weights, in float32 and in
              bfloat16; before this push every number changes by a few millionths, as in a train step
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import torch
from measure import machine, say
from torch import Tensor

from rlsys.core.weight_updates import EngineAddress
from rlsys.weights.buckets import StagingBuffers, send_in_buckets
from rlsys.weights.relay_push import RelayPush
from tests.helpers.relay_host import Host, hosts
from tests.helpers.slow_link import SlowLink

BUCKET_BYTES = 16 * 2**20
SECONDS = 60.0
"""Time limit of a silent receiver, and of the loading of weights."""
Tensors = dict[str, Tensor]


def weights(megabytes: float, dtype: torch.dtype, step: int) -> Tensors:
    """Return eight random matrices `[rows, 1024]` with a small random change in each step.

    Args:
        megabytes: size of all matrices together.
        dtype: type of the matrices.
        step: number of changes.
    """
    generator = torch.Generator().manual_seed(0)
    rows = max(1, round(megabytes * 1e6 / 8 / 1024 / dtype.itemsize))
    tensors = [torch.randn(rows, 1024, generator=generator) for _ in range(8)]
    changes = [torch.randn(rows, 1024, generator=generator) * 3e-6 for _ in range(8)]
    pairs = zip(tensors, changes, strict=True)
    return {f"{i}.weight": (tensor + step * change).to(dtype) for i, (tensor, change) in enumerate(pairs)}


class Sender:
    """One trainer rank, and the throttled link through which it sends."""

    def __init__(self, hosts: Sequence[Host], rate: float, *, star: bool) -> None:
        self._hosts, self.link = hosts, SlowLink(rate)
        self._urls = [self.link.through(host.url) for host in hosts]
        chains = [[i] for i in range(len(hosts))] if star else [list(range(len(hosts)))]
        near = {url: host.url for url, host in zip(self._urls, hosts, strict=True)}
        self._relays, self._version = RelayPush(chains, SECONDS, SECONDS, near), 0

    def push(self, tensors: Tensors) -> tuple[float, int]:
        """Push tensors to all receivers. Return the seconds, and the bytes over the link.

        Raises:
            AssertionError: the push excluded a receiver, or a receiver loaded other data.
        """
        self._version += 1
        for host in self._hosts:
            host.begin(self._version)
        engines = [EngineAddress(url, 1, -1, i, epoch=self._version) for i, url in enumerate(self._urls)]
        start, bytes_before = time.perf_counter(), self.link.passed
        self._relays.begin(engines, self._version)
        send_in_buckets(tensors.items(), BUCKET_BYTES, StagingBuffers(shared=False), self._relays.send)
        self._relays.end()
        seconds, passed = time.perf_counter() - start, self.link.passed - bytes_before
        assert not self._relays.excluded, self._relays.excluded
        digests = {
            name: hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest()[:16]
            for name, tensor in tensors.items()
        }
        for host in self._hosts:
            loaded = host.state()["tensors"]
            assert loaded == digests, f"{host.url}: loaded tensors with digests {loaded}; expected {digests}"
        return seconds, passed

    def close(self) -> None:
        self._relays.close()
        self.link.close()


def run_pushes(
    receivers: int, rate: float, pushes: Sequence[Tensors], *, star: bool
) -> list[tuple[float, int]]:
    """Push each of `pushes` to new receivers. Return seconds and bytes over the link of each push.

    Args:
        receivers: number of receivers.
        rate: rate of the link in bytes per second.
        pushes: tensors of each push.
        star: whether every receiver is a separate chain; otherwise all receivers form one chain.
    """
    with hosts(receivers) as receivers_hosts:
        sender = Sender(receivers_hosts, rate, star=star)
        try:
            return [sender.push(tensors) for tensors in pushes]
        finally:
            sender.close()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all numbers of receivers. Return the result of the bench."""
    rate = args.rate * 1e6
    pushes: dict[str, dict[int, dict[str, float]]] = {}
    tensors = weights(args.megabytes, torch.float32, 0)
    total = sum(t.nbytes for t in tensors.values())
    for topology in ("star", "relay"):
        pushes[topology] = {}
        for count in args.receivers:
            ((seconds, passed),) = run_pushes(count, rate, [tensors], star=topology == "star")
            pushes[topology][count] = {"seconds": seconds, "link_bytes_per_model_byte": passed / total}
            say(f"{topology} to {count}: {seconds:.2f} s, {passed / total:.2f} x the weights over the link")
    change = {}
    for dtype in (torch.float32, torch.bfloat16):
        steps = [weights(args.megabytes, dtype, step) for step in (0, 1)]
        (_, first), (_, second) = run_pushes(2, rate, steps, star=False)
        size = sum(t.nbytes for t in steps[0].values())
        change[str(dtype).removeprefix("torch.")] = {"first": first / size, "second": second / size}
    fewest, largest = min(args.receivers), max(args.receivers)
    growth = {
        topology: figures[largest]["seconds"] / figures[fewest]["seconds"]
        for topology, figures in pushes.items()
    }
    return {
        "bench": "relay", "bytes": total, "rate": rate, "machine": machine(), "pushes": pushes, "change": change,
        "summary": {
            "receivers": largest / fewest,
            **{f"{topology}_growth": value for topology, value in growth.items()},
            "relay_link_bytes_per_model_byte": pushes["relay"][largest]["link_bytes_per_model_byte"],
            **{f"change_{name}": figures["second"] for name, figures in change.items()},
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--megabytes", type=float, default=32.0, help="size of the weights in MB")
    parser.add_argument("--rate", type=float, default=16.0, help="rate of the link in MB/s")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of receivers")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small weights, 1 and 2 receivers: checks only that the bench runs",
    )
    args = parser.parse_args()
    if args.quick:
        args.megabytes, args.rate, args.receivers = 4.0, 8.0, [1, 2]
    result = measure(args)
    print(json.dumps(result if args.json else result["summary"], indent=2))


if __name__ == "__main__":
    main()
