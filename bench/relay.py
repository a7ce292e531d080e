"""Seconds of a weight push over a slow link, by the number of receivers: by relay, and to each of them by itself.

    python bench/relay.py --json [--megabytes 32] [--rate 16] [--receivers 1 2 4 8] [--quick]

Receivers are real relays in processes of their own, without an engine: what they load is compared with what was sent,
tensor by tensor. All that the sender sends goes through one link of `rate` MB/s on loopback; receivers reach each
other without it. star: every receiver is a chain of its own. relay: one chain of all. The weights are random float32,
which hardly compress: what is measured is the way, not the compression. `change`: bytes over the link, as a share of
the weights, of a second push to the chain, after a change of every number by a few millionths, as of a train step,
in float32 and in bfloat16.
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
Tensors = dict[str, Tensor]


def weights(megabytes: float, dtype: torch.dtype, step: int) -> Tensors:
    """Eight matrices, after so many steps that change them a little."""
    generator = torch.Generator().manual_seed(0)
    rows = max(1, round(megabytes * 1e6 / 8 / 1024 / dtype.itemsize))
    made = [torch.randn(rows, 1024, generator=generator) for _ in range(8)]
    change = [torch.randn(rows, 1024, generator=generator) * 3e-6 for _ in range(8)]
    return {
        f"{i}.weight": (t + step * d).to(dtype) for i, (t, d) in enumerate(zip(made, change, strict=True))
    }


class Sender:
    """One trainer rank, and the link that it sends through."""

    def __init__(self, there: Sequence[Host], rate: float, *, star: bool) -> None:
        self._hosts, self.link = there, SlowLink(rate)
        self._urls = [self.link.through(host.url) for host in there]
        chains = [[i] for i in range(len(there))] if star else [list(range(len(there)))]
        near = {url: host.url for url, host in zip(self._urls, there, strict=True)}
        self._relays, self._version = RelayPush(chains, SECONDS, SECONDS, near), 0

    def push(self, tensors: Tensors) -> tuple[float, int]:
        """Seconds, and bytes over the link. Ends the process when a receiver has loaded something else."""
        self._version += 1
        for host in self._hosts:
            host.begin(self._version)
        engines = [EngineAddress(url, 1, -1, i, epoch=self._version) for i, url in enumerate(self._urls)]
        start, before = time.perf_counter(), self.link.passed
        self._relays.begin(engines, self._version)
        send_in_buckets(tensors.items(), BUCKET_BYTES, StagingBuffers(shared=False), self._relays.send)
        self._relays.end()
        seconds, passed = time.perf_counter() - start, self.link.passed - before
        assert not self._relays.excluded, self._relays.excluded
        right = {
            n: hashlib.sha256(t.view(torch.uint8).numpy().data).hexdigest()[:16] for n, t in tensors.items()
        }
        assert all(host.state()["tensors"] == right for host in self._hosts), "other tensors than were sent"
        return seconds, passed

    def close(self) -> None:
        self._relays.close()
        self.link.close()


def pushed(receivers: int, rate: float, pushes: Sequence[Tensors], *, star: bool) -> list[tuple[float, int]]:
    with hosts(receivers) as there:
        sender = Sender(there, rate, star=star)
        try:
            return [sender.push(tensors) for tensors in pushes]
        finally:
            sender.close()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rate, found = args.rate * 1e6, dict[str, dict[int, dict[str, float]]]()
    tensors = weights(args.megabytes, torch.float32, 0)
    total = sum(t.nbytes for t in tensors.values())
    for way in ("star", "relay"):
        found[way] = {}
        for count in args.receivers:
            ((seconds, passed),) = pushed(count, rate, [tensors], star=way == "star")
            found[way][count] = {"seconds": seconds, "link_bytes_per_model_byte": passed / total}
            say(f"{way} to {count}: {seconds:.2f} s, {passed / total:.2f} x the weights over the link")
    change = {}
    for dtype in (torch.float32, torch.bfloat16):
        steps = [weights(args.megabytes, dtype, step) for step in (0, 1)]
        (_, first), (_, second) = pushed(2, rate, steps, star=False)
        size = sum(t.nbytes for t in steps[0].values())
        change[str(dtype).removeprefix("torch.")] = {"first": first / size, "second": second / size}
    fewest, most = min(args.receivers), max(args.receivers)
    growth = {way: of[most]["seconds"] / of[fewest]["seconds"] for way, of in found.items()}
    return {
        "bench": "relay", "bytes": total, "rate": rate, "machine": machine(), "pushes": found, "change": change,
        "summary": {
            "receivers": most / fewest,
            **{f"{way}_growth": value for way, value in growth.items()},
            "relay_link_bytes_per_model_byte": found["relay"][most]["link_bytes_per_model_byte"],
            **{f"change_{name}": of["second"] for name, of in change.items()},
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="the whole result as JSON on stdout")
    parser.add_argument("--megabytes", type=float, default=32.0, help="size of the weights")
    parser.add_argument("--rate", type=float, default=16.0, help="of the link, in MB/s")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--quick", action="store_true", help="small, to 1 and 2: shows that it runs")
    args = parser.parse_args()
    if args.quick:
        args.megabytes, args.rate, args.receivers = 4.0, 8.0, [1, 2]
    result = measure(args)
    print(json.dumps(result if args.json else result["summary"], indent=2))


if __name__ == "__main__":
    main()
