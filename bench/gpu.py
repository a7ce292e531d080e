"""Run the drill for one GPU: measurements in the order of their importance, each with a time limit, all offline.

    python bench/gpu.py [--seconds 840] [--part NAME ...] [--out FOLDER] [--attention-backend triton]
                        [--engine-args "..."] [--transformer-engine FOLDER] [--json]

Each part runs in a separate process group, with its own time limit and at most the remaining `--seconds`, so a hang
or a crash affects only that part. A part writes each figure to FOLDER/PART.json as soon as it is measured, and its
output to FOLDER/PART.log. The drill rewrites FOLDER/results.json after each part, so an interrupted drill keeps its
results. On a host without a GPU, a part that needs a GPU reports `no CUDA device`; all others run with small sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from gpu_figures import HERE, MODELS, ROOT, Figures, NoDevice

from rlsys.core.devices import have_cuda
from tests.helpers.engine_process import ENGINE_ARGS
from tests.helpers.python_path import python_path

CPU_FACTOR = 4.0
"""Factor of all time limits on a CPU host, where the drill only checks that the parts run."""
LEAST_SECONDS = 5.0
"""Smallest remaining time in which the drill starts a part."""
KILL_SECONDS = 10.0
"""Time to wait for the end of killed processes."""
LOG_CHARACTERS = 2000
"""Number of last characters of a failed part's log that its result contains."""


@dataclass(frozen=True)
class Part:
    """One part of the drill.

    Attributes:
        function: MODULE:FUNCTION of bench/, called with the part's `Figures`.
        limit: time limit in seconds.
        transformer_engine: whether the part uses the folder of `--transformer-engine`.
    """

    name: str
    function: str
    limit: float
    transformer_engine: bool = False


PARTS = (
    Part("ceilings", "gpu_trainer:ceilings", 40),
    Part("trainer", "gpu_trainer:speed", 120),
    Part("trainer_te", "gpu_trainer:speed_with_transformer_engine", 120, transformer_engine=True),
    Part("weight_layout", "gpu_trainer:weight_layout", 60),
    Part("engine", "gpu_engine:engine", 260),
    Part("engine_nondeterministic", "gpu_engine:engine_nondeterministic", 130),
    Part("quickstart", "gpu_engine:quickstart", 150),
    Part("april", "gpu_engine:april", 240),
    Part("memory", "gpu_trainer:memory", 90),
    Part("parity", "gpu_trainer:parity", 60),
    Part("fp8_rollout", "gpu_engine:fp8_rollout", 130),
    Part("versions", "gpu_checks:versions", 60),
    Part("checksums", "gpu_checks:checksums", 60),
    Part("fp8", "gpu_checks:fp8", 60),
    Part("objective", "gpu_checks:objective", 120),
    Part("cache", "gpu_checks:cache", 90),
    Part("checkpoint", "gpu_checks:checkpoint", 90),
    Part("offload", "gpu_checks:offload", 120),
    Part("families", "gpu_checks:families", 300),
    Part("handles", "gpu_checks:handles", 90),
    Part("nccl", "gpu_checks:nccl", 60),
    Part("spinning", "gpu_checks:spinning", 90),
    Part("waiting", "gpu_checks:waiting", 90),
    Part("two_ranks_on_one_gpu", "gpu_checks:two_ranks_on_one_gpu", 120),
)
"""The parts in the order of execution; those that may hang come last."""


def end_with_descendants(process: subprocess.Popen[bytes]) -> None:
    """Kill a part and all its descendants, also those in other sessions, and wait for their end."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # includes children of a part that has already ended
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=KILL_SECONDS)


def run_part(part: Part, seconds: float, out: Path, transformer_engine: Path | None) -> dict[str, Any]:
    """Run one part in a separate process.

    Args:
        part: the part.
        seconds: time limit.
        out: folder of the figures and the log.
        transformer_engine: folder of `--transformer-engine`.

    Returns:
        status: `ok`, `no CUDA device`, `failed` or `time limit`.
        seconds: duration.
        figures: figures that the part wrote.
        exit_code, log: of a part that failed or exceeded its time limit, exit code and last characters of the log.
    """
    file, log = out / f"{part.name}.json", out / f"{part.name}.log"
    file.unlink(missing_ok=True)
    folders = [ROOT, HERE]
    if part.transformer_engine and transformer_engine is not None:
        folders.insert(0, transformer_engine)
    environment = {**os.environ, "PYTHONPATH": python_path(*folders)}
    command = [sys.executable, __file__, "--run", part.name, "--out", str(out)]
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        end_with_descendants(process)
    figures: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    status = "time limit" if code is None else "ok" if code == 0 else "failed"
    if figures.pop("no_device", False):
        status = NoDevice.STATUS
    result = {"status": status, "seconds": round(time.monotonic() - start, 1), "figures": figures}
    if status in ("failed", "time limit"):
        result |= {"exit_code": code, "log": log.read_text(errors="replace")[-LOG_CHARACTERS:]}
    return result


def drill(parts: list[Part], seconds: float, out: Path, transformer_engine: Path | None) -> dict[str, Any]:
    """Run parts one after the other for at most `seconds`.

    Writes the results to `out`/results.json after each part.

    Returns:
        result of each part, by name (see run_part); `no time left` for a part that could not start.
    """
    end = time.monotonic() + seconds
    factor = 1.0 if have_cuda() else CPU_FACTOR
    results: dict[str, Any] = {}
    for part in parts:
        remaining = end - time.monotonic()
        if remaining < LEAST_SECONDS:
            results[part.name] = {"status": "no time left"}
        else:
            results[part.name] = run_part(part, min(part.limit * factor, remaining), out, transformer_engine)
        partial = out / "results.json.part"
        partial.write_text(json.dumps(results, indent=1) + "\n")
        partial.replace(out / "results.json")
        print(f"{part.name}: {json.dumps(results[part.name])[:400]}", file=sys.stderr, flush=True)
    return results


def run_here(name: str, out: Path) -> None:
    """Run the part `name` in this process; write its figures to `out`/NAME.json."""
    module, _, function = next(part.function for part in PARTS if part.name == name).partition(":")
    figures = Figures(out / f"{name}.json")
    try:
        getattr(importlib.import_module(module), function)(figures)
    except NoDevice:
        figures(no_device=True)


def main() -> None:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=names, default=names, help="parts to run (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=840.0, help="time limit of the whole drill in seconds (default: 840)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/drill"), help="folder of results and logs")
    parser.add_argument(
        "--attention-backend", help="attention backend of every engine on a GPU (SGLang's option)"
    )
    parser.add_argument(
        "--engine-args", default="", help="additional SGLang options of every engine on a GPU, in one string"
    )
    parser.add_argument(
        "--transformer-engine", type=Path, help="folder of packages that only the part trainer_te uses"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--run", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args()
    out = args.out.resolve()
    if args.run:
        run_here(args.run, out)
        return
    out.mkdir(parents=True, exist_ok=True)
    words = shlex.split(os.environ.get(ENGINE_ARGS, ""))
    if have_cuda():  # on a CPU there is only one attention backend
        words += shlex.split(args.engine_args)
        words += ["--attention-backend", args.attention_backend] if args.attention_backend else []
    os.environ[ENGINE_ARGS] = shlex.join(words)
    memory = Path("/dev/shm")  # fast for gigabytes of weights
    with tempfile.TemporaryDirectory(
        prefix="rlsys-drill-", dir=memory if memory.is_dir() else None
    ) as models:
        os.environ[MODELS] = models
        parts = [part for part in PARTS if part.name in args.part]
        results = drill(parts, args.seconds, out, args.transformer_engine)
    if args.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
