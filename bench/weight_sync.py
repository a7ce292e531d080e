"""Measure the seconds per GB of a weight push by method, and the minimum cost of the same bytes, on one real engine.

    python bench/weight_sync.py --json [--megabytes 256] [--repeats 5] [--quick]

A push is the work of rlsys.weights between begin_weight_update and end_weight_update, including the engine's loading.
The tensors are in this process, so a push does not gather; disk methods use the run folder. The first push of each
method imports SGLang or creates a process group; it is reported separately, and the medians exclude it. `disk_delta`
pushes a model of which one tensor in eight has changed.

Minimum costs, measured in the same run:

    copy        a memory copy of the bytes
    loopback    the bytes over a TCP connection of this machine
    hashlib     the SHA-256 of the bytes

A push of tensors copies at least twice: into memory that the engine can open, and out of this memory. A broadcast
uses TCP and copies once. `checksums` is the time of an attestation by checksums, `hashes` the trainer's part of this
time, which runs in parallel to the push if cores are idle.
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
    """Return a config with this weights.method, model.path and run.dir."""
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
    """Return the transport of a config."""
    kind = transport_class(config)
    assert issubclass(kind, GatheredTransport)
    return kind(config)


async def push(
    client: EngineClient, sync: GatheredTransport, tensors: dict[str, Tensor], version: int
) -> tuple[float, int]:
    """Push tensors to an engine as `version`. Return the seconds, and the number of sent bytes."""
    update = WeightUpdate(version, [EngineAddress(client.url, client.tp, version - 1)], [])
    await client.begin_weight_update()
    start = time.perf_counter()
    sent_bytes = await asyncio.to_thread(sync.push, iter(tensors.items()), update)
    seconds = time.perf_counter() - start
    await client.end_weight_update()
    return seconds, sent_bytes


def copy_seconds(tensors: dict[str, Tensor]) -> float:
    """Return the seconds of copying all tensors into memory that is already allocated."""
    targets = [t.clone() for t in tensors.values()]
    start = time.perf_counter()
    for target, t in zip(targets, tensors.values(), strict=True):
        target.copy_(t)
    return time.perf_counter() - start


def loopback_seconds(tensors: dict[str, Tensor]) -> float:
    """Return the seconds of sending all bytes through one TCP connection of this machine into allocated memory."""
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
    """Return the seconds of hashing all tensors with hashlib's SHA-256."""
    start = time.perf_counter()
    for tensor in tensors.values():
        hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return time.perf_counter() - start


async def checksum_seconds(
    client: EngineClient, hf: HFConfig, tensors: dict[str, Tensor]
) -> tuple[float, float]:
    """Compare the checksums of the engine's tensors with the trainer's.

    Returns:
        seconds of the comparison with all hashing, and seconds of the trainer's hashing.
    """
    start = time.perf_counter()
    checksums = EngineChecksums(hf, client.tp)
    for _ in checksums.watch(tensors.items()):
        pass
    digests = checksums.digests()
    hash_seconds = time.perf_counter() - start
    match = ChecksumVerifier().compare(client.url, digests, await client.checksums())
    assert match.equal and not match.wrong, match
    return time.perf_counter() - start, hash_seconds


async def bench(client: EngineClient, model: Path, folder: Path, repeats: int) -> dict[str, Any]:
    """Measure all methods and minimum costs, interleaved. Return the result of the bench.

    Args:
        client: client of the engine.
        model: Hugging Face folder of the model.
        folder: parent of the methods' run folders.
        repeats: number of repeats after a warm-up.
    """
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
            # Each method counts its own versions: the engine holds at least the tensors of its last push.
            push_seconds, sent_bytes[method] = await push(client, syncs[method], tensors, repeat + 2)
            if repeat < 0:
                first[method] = push_seconds
            else:
                seconds[method].append(push_seconds)
        checksums, hashes = await checksum_seconds(client, hf, tensors)
        seconds["checksums"].append(checksums)
        seconds["hashes"].append(hashes)
        last = ", ".join(f"{name} {values[-1]:.2f} s" for name, values in seconds.items() if values)
        say(f"repeat {repeat + 1}/{repeats}: {last}")
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
    """Start an engine with a model of the requested size, and run the bench."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A layer has 32 experts of 3 * hidden * width floats; the number of layers determines the size.
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
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats")
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
