"""Measure the time and the memory that one trainer rank needs to plan and read a step of DeepSeek-V3's size.

    python bench/share.py --json [--quick] [--samples 25000] [--mean 10000] [--dp 16] [--pp 16]

The files have real bytes, with checksums, for all data that this rank reads: the tokens of its data-parallel share,
and the experts that its pipeline stage replays. The layers of other stages are holes in the same files. The files
have just been written, so they are in the page cache: the figures include the cost of rlsys' code, but not that of a
file system.

    plan_seconds          CPU seconds of assigning samples to ranks
    read_share_seconds    seconds from the answer of `take` to this rank's micro-batches, including the plan
    memory_ratio          peak of the additional memory, divided by the bytes read
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from measure import ROOT, machine
from numpy.typing import NDArray

from rlsys.core.messages import decode
from rlsys.core.messages import encode as to_wire
from rlsys.core.spans import RouteLocation, RouteSpan, VersionSpan
from rlsys.core.types import GroupState, Sample, SampleGroup, Status, TrainBatch
from rlsys.ledger.sample_rows import encode_routes
from rlsys.ledger.segments import SegmentFile
from rlsys.segments.records import (
    FOLDER,
    HEADER_BYTES,
    Kind,
    SegmentReader,
    SequenceKey,
    encode,
    encode_header,
)
from rlsys.segments.route_records import RouteFile
from rlsys.trainer.bins import plan_bins
from rlsys.trainer.pack import LazySample, pack
from rlsys.trainer.prefixes import Prefixes

LAYERS, TOPK, EXPERTS, GROUP = 58, 8, 256, 16
"""DeepSeek-V3's layers with experts, experts per token, experts of a layer, and samples of a group."""
PROMPT, LONGEST = 64, 32_768
"""Tokens of a prompt, and largest number of tokens of a response."""
STEP = "taken.msgpack"
"""File with the answer of `take`."""


@dataclass(frozen=True)
class Sizes:
    """Size of the step and of the layout.

    Attributes:
        samples: samples of the step.
        mean: mean tokens of a response.
        dp: data-parallel size.
        pp: pipeline-parallel size.
    """

    samples: int
    mean: int
    dp: int
    pp: int

    @property
    def budget(self) -> int:
        """Largest number of tokens of a micro-batch; it fits a prompt with the longest response."""
        return PROMPT + min(LONGEST, 4 * self.mean)

    @property
    def layers(self) -> list[int]:
        """Indices of the layers of the first pipeline stage."""
        return list(range(-(-LAYERS // self.pp)))

    def lengths(self) -> list[int]:
        """Return the lengths of the responses in tokens: lognormal, at most four times the mean."""
        samples = np.random.default_rng(0).lognormal(sigma=0.8, size=self.samples)
        return np.clip(samples / samples.mean() * self.mean, 1, self.budget - PROMPT).astype(int).tolist()


class HoledRoutes:
    """A file of routes as an engine writes it (rlsys/segments/route_records.py), with holes for some layers.

    Args:
        folder: the run folder.
        layers: indices of the layers whose bytes are written.
    """

    def __init__(self, folder: Path, layers: list[int]) -> None:
        self._name = RouteFile(0, "engine-0", 1, 0, 1).name
        path = folder / FOLDER / self._name
        path.parent.mkdir(parents=True)
        self._file = path.open("wb")
        self._layers = layers
        self._end = 0

    def append(self, experts: NDArray[np.uint8]) -> RouteSpan:
        """Append a record.

        Args:
            experts: ids of the experts, `[written layers, positions, TOPK]`.

        Returns:
            the location of the record.
        """
        positions = experts.shape[1]
        size = positions * TOPK
        checksums = {layer: zlib.crc32(experts[i].tobytes()) for i, layer in enumerate(self._layers)}
        table = struct.pack("<HHI", LAYERS, TOPK, 1)
        table += struct.pack(f"<{LAYERS}I", *(checksums.get(layer, 0) for layer in range(LAYERS)))
        length = len(table) + LAYERS * size
        header = encode_header(Kind.ROUTES, SequenceKey(0), 0, positions, length, table, len(table))
        self._file.seek(self._end)
        self._file.write(header + table)
        for layer, layer_experts in zip(self._layers, experts, strict=True):
            self._file.seek(self._end + HEADER_BYTES + len(table) + layer * size)
            self._file.write(layer_experts.tobytes())
        checksum = int.from_bytes(header[4:8], "little")
        location = RouteLocation(self._name, self._end, HEADER_BYTES + length, checksum)
        self._end += HEADER_BYTES + length
        self._file.truncate(self._end)
        return RouteSpan(0, positions, b"", location)

    def close(self) -> None:
        self._file.close()


def write_step(folder: Path, sizes: Sizes) -> None:
    """Write the segment files of a step, with the data that rank 0 reads, and the answer of `take` (STEP).

    Args:
        folder: the run folder.
        sizes: size of the step and of the layout.
    """
    (folder / FOLDER).mkdir()
    lengths = sizes.lengths()
    bins = plan_bins(Prefixes.none([PROMPT + n for n in lengths]), sizes.budget, 0, sizes.dp)
    rank_samples = {i for members in bins for i in members}
    rng = np.random.default_rng(1)
    tokens, routes = SegmentFile(folder, "000000-000001"), HoledRoutes(folder, sizes.layers)
    groups = [SampleGroup(i, i, [], GroupState.TRAINED, 1) for i in range(-(-sizes.samples // GROUP))]
    for i, n in enumerate(lengths):
        spans = [VersionSpan(1, 0, n)]
        sample = Sample(
            i, i // GROUP, i % GROUP, [5] * PROMPT, i, spans=spans, status=Status.FINISHED, reward=0.5
        )
        if i in rank_samples:
            ids = rng.integers(0, 100_000, n, np.int32).tobytes()
            mu = rng.random(n).tobytes()
            experts = rng.integers(0, EXPERTS, (len(sizes.layers), PROMPT + n - 1, TOPK), np.uint8)
            location = encode_routes([routes.append(experts)])
            record = encode(Kind.TOKENS, SequenceKey(i), 0, n, ids + mu + location, len(location))
            sample.pieces = [tokens.append(record)]
            tokens.write_out()
        groups[i // GROUP].samples.append(sample)
    tokens.close()
    routes.close()
    (folder / STEP).write_bytes(to_wire(TrainBatch(1, 1, groups, {})))


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def read_share(folder: Path, sizes: Sizes) -> dict[str, float]:
    """Decode the answer of `take`, and read and pack the samples of rank 0. Return the figures of the bench.

    Args:
        folder: the run folder of write_step.
        sizes: size of the step and of the layout.
    """
    answer = (folder / STEP).read_bytes()
    start, cpu_before = time.perf_counter(), time.process_time()
    batch = decode(answer, TrainBatch)
    with SegmentReader(folder) as segments:
        samples = [s for g in batch.groups for s in g.samples]
        layers = sizes.layers
        unread = [LazySample(s, row, segments, layers) for row, s in enumerate(samples)]
        peak_before = peak_bytes()
        batches = pack(unread, sizes.budget, 0, sizes.dp)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_before
        plan_start = time.process_time()
        plan_bins(Prefixes.none([len(s) for s in unread]), sizes.budget, 0, sizes.dp)
        plan_seconds = time.process_time() - plan_start
        return {
            "plan_seconds": plan_seconds,
            "read_share_seconds": seconds,
            "read_share_cpu_seconds": cpu_seconds,
            "read_gb": segments.bytes_read / 1e9,
            "memory_ratio": (peak_bytes() - peak_before) / segments.bytes_read,
            "share_tokens": sum(micro.response_tokens for micro in batches),
            "micro_batches": len(batches),
            "answer_bytes_per_sample": len(answer) / sizes.samples,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes: checks only that the bench runs")
    parser.add_argument("--samples", type=int, default=25_000, help="number of samples of the step")
    parser.add_argument("--mean", type=int, default=10_000, help="mean number of tokens of a response")
    parser.add_argument("--dp", type=int, default=16, help="data-parallel size")
    parser.add_argument("--pp", type=int, default=16, help="pipeline-parallel size")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.samples, args.mean = 256, 200
    sizes = Sizes(args.samples, args.mean, args.dp, args.pp)
    if args.read:
        print(json.dumps(read_share(args.read, sizes)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_step(Path(folder), sizes)
        words = [word for name, value in asdict(sizes).items() for word in (f"--{name}", str(value))]
        # A new process reads, so that its peak of memory excludes the writing.
        command = [sys.executable, __file__, "--read", folder, *words]
        process = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        figures = json.loads(process.stdout)
    if args.json:
        print(json.dumps({"machine": machine(), "sizes": asdict(sizes), "summary": figures}))
    else:
        for name, value in figures.items():
            print(f"{name:<24} {value:,.3f}")


if __name__ == "__main__":
    main()
