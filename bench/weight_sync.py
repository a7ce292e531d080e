"""Seconds per GB of a weight push by method, compared with the minimum cost of the same bytes, on one real engine.

    python bench/weight_sync.py --json [--megabytes 256] [--repeats 5] [--quick]

A push is the work of rlsys.weights between begin_weight_update and end_weight_update, including the engine's loading.
The tensors are ready in this process, so nothing is gathered; disk methods write to and read from the run folder. The
first push of each method, which imports SGLang or creates a process group, is reported separately and is not in the
medians. `disk_delta` pushes a model of which one tensor in eight has changed.

Minimum costs, measured in the same run: `copy`, a memory copy; `loopback`, the bytes over a TCP connection of this
machine; `hashlib`, their SHA-256. A push of tensors copies at least twice, into memory that the engine can open and
out of it. A broadcast uses TCP and copies once. `checksums` is the time to compare all of them, `hashes` the
trainer's part of it, which runs in parallel to the push if cores are idle.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from measure import machine, running_engine, say, spread, write_random_moe
from safetensors.torch import load_file
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.core.weight_updates import EngineAddress, WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.router.engine_checksums import ChecksumVerifier
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.weight_transport import GatheredTransport, transport_class

METHODS = ("auto", "broadcast", "disk", "disk_delta")
GB = 1e9


def config_for(method: str, model: Path, run: Path) -> Config:
    data = {
        "model": {"path": model},
        "run": {"dir": run},
        "engine": {
            "extra_args": ["--skip-tokenizer-init"],
            "max_total_tokens": 4096,
            "max_running_requests": 4,
        },
        "weights": {"method": method},
        "rollout": {"max_response_tokens": 256},
    }
    return Config.model_validate(data)


def transport_of(config: Config) -> GatheredTransport:
    kind = transport_class(config)
    assert issubclass(kind, GatheredTransport)
    return kind(config)


async def push(
    client: EngineClient, sync: GatheredTransport, tensors: dict[str, Tensor], version: int
) -> tuple[float, int]:
    """Push once, and return seconds and bytes."""
    ticket = WeightUpdate(version, [EngineAddress(client.url, client.tp, version - 1)], [])
    await client.begin_weight_update()
    start = time.perf_counter()
    sent_bytes = await asyncio.to_thread(sync.push, iter(tensors.items()), ticket)
    seconds = time.perf_counter() - start
    await client.end_weight_update()
    return seconds, sent_bytes


def copy_seconds(tensors: dict[str, Tensor]) -> float:
    """Return the seconds of copying every tensor into allocated memory."""
    targets = [t.clone() for t in tensors.values()]
    start = time.perf_counter()
    for target, t in zip(targets, tensors.values(), strict=True):
        target.copy_(t)
    return time.perf_counter() - start


def loopback_seconds(tensors: dict[str, Tensor]) -> float:
    """Send all bytes through one TCP connection to this machine, into allocated memory."""
    blocks = [t.contiguous().view(-1).view(torch.uint8).numpy() for t in tensors.values()]
    target = memoryview(bytearray(max(block.nbytes for block in blocks)))

    def receive() -> None:
        with socket.create_connection(server.getsockname()) as connection:
            for block in blocks:
                received_bytes = 0
                while received_bytes < block.nbytes:
                    received_bytes += connection.recv_into(target[received_bytes : block.nbytes])

    with socket.create_server(("127.0.0.1", 0)) as server:
        receiver = threading.Thread(target=receive)
        receiver.start()
        with server.accept()[0] as connection:
            start = time.perf_counter()
            for block in blocks:
                connection.sendall(block.data)
            receiver.join()
            return time.perf_counter() - start


def hashlib_seconds(tensors: dict[str, Tensor]) -> float:
    start = time.perf_counter()
    for tensor in tensors.values():
        hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return time.perf_counter() - start


async def checksum_seconds(
    client: EngineClient, hf: HFConfig, tensors: dict[str, Tensor]
) -> tuple[float, float]:
    """Return the seconds that attestation adds to a push, and those of the trainer's checksums."""
    start = time.perf_counter()
    checksums = EngineChecksums(hf, client.tp)
    for _ in checksums.watch(tensors.items()):
        pass
    digests, hashed = checksums.digests(), time.perf_counter() - start
    match = ChecksumVerifier().compare(client.url, digests, await client.checksums())
    assert match.equal and not match.wrong, match
    return time.perf_counter() - start, hashed


async def bench(client: EngineClient, model: Path, folder: Path, repeats: int) -> dict[str, Any]:
    tensors = load_file(model / "model.safetensors")
    total = sum(t.nbytes for t in tensors.values())
    syncs = {m: transport_of(config_for(m, model, folder / m)) for m in METHODS}
    first: dict[str, float] = {}
    floors = {"copy": copy_seconds, "loopback": loopback_seconds, "hashlib": hashlib_seconds}
    seconds: dict[str, list[float]] = {m: [] for m in (*floors, *METHODS, "checksums", "hashes")}
    hf = HFConfig.read(model)
    sent_bytes: dict[str, int] = {}
    for repeat in range(-1, repeats):  # the first round warms up
        for name, measure in floors.items():
            seconds[name].append(measure(tensors))
        for name in list(tensors)[(repeat + 1) % 8 :: 8]:
            tensors[name] += 1e-4
        for method in METHODS:
            # Each method counts versions of its own: the engine holds what it pushed last, and more.
            took, sent_bytes[method] = await push(client, syncs[method], tensors, repeat + 2)
            if repeat < 0:
                first[method] = took
            else:
                seconds[method].append(took)
        all_of_it, hashed = await checksum_seconds(client, hf, tensors)
        seconds["checksums"].append(all_of_it)
        seconds["hashes"].append(hashed)
        say(
            f"repeat {repeat + 1}/{repeats}: "
            + ", ".join(f"{m} {s[-1]:.2f} s" for m, s in seconds.items() if s)
        )
    for sync in syncs.values():
        await asyncio.to_thread(sync.close)
    median = {m: statistics.median(values) for m, values in seconds.items()}
    per_gb = {m: spread([s / total * GB for s in values]) for m, values in seconds.items()}
    return {
        "bench": "weight_sync", "bytes": total, "tensors": len(tensors), "repeats": repeats, "machine": machine(),
        "seconds_per_gb": per_gb, "first_push_seconds": first, "bytes_sent": sent_bytes,
        "summary": {
            **{f"{m}_ratio_to_copy": median[m] / median["copy"] for m in METHODS},
            "auto_ratio_to_floor": median["auto"] / (2 * median["copy"]),
            "broadcast_ratio_to_floor": median["broadcast"] / (median["loopback"] + median["copy"]),
            "hashes_ratio_to_hashlib": median["hashes"] / median["hashlib"],
        },
    }  # fmt: skip


async def main_async(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # One layer of 32 experts of 3 * hidden * width floats; layers until the size is reached.
        hidden, width, experts = 512, 256, 32
        layers = max(1, round(args.megabytes * 1e6 / (experts * 3 * hidden * width * 4)))
        model = write_random_moe(
            folder / "model", hidden_size=hidden, moe_intermediate_size=width, num_experts=experts,
            num_hidden_layers=layers, vocab_size=1024, head_dim=64,
        )  # fmt: skip
        say("starting the engine")
        with running_engine(config_for("auto", model, folder / "run"), folder) as url:
            async with make_session() as session:
                return await bench(EngineClient(url, session), model, folder, args.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--megabytes", type=float, default=256.0, help="size of the model in MB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, once: checks only that the bench runs"
    )
    args = parser.parse_args()
    if args.quick:
        args.megabytes, args.repeats = 8.0, 1
    result = asyncio.run(main_async(args))
    print(json.dumps(result if args.json else result["summary"], indent=2))


if __name__ == "__main__":
    main()
