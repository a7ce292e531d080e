"""`rlsys rehearse`: runs each rehearsed rank in a subprocess. This process does not import torch."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO

from rlsys.cli.explain import with_gpu_memory
from rlsys.config import Config, add_config, load_config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_layout, check_requirements
from rlsys.convert.hub import model_overrides, pin_models
from rlsys.core.errors import RunError, UserError
from rlsys.core.imports import module_command
from rlsys.planner.memory import budget, model_size
from rlsys.planner.model_preflight import read_model
from rlsys.rehearse.figures import Figures
from rlsys.rehearse.kinds import Request, kinds_of_rank, name_of_kind, one_rank, stage_of
from rlsys.rehearse.report import describe, problems

_ENV = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Environment variables of the ranks. They need no GPU, because their tensors have no values."""
_MAX_LINES = 12
"""Maximum number of lines of a failed rank's output that are printed."""


class RankFailed(Exception):
    """The rehearsed code of a rank failed.

    Attributes:
        lines: last lines of the rank's output; the last one is the error.
        activity: what the rank was doing.
    """

    def __init__(self, lines: list[str], activity: str) -> None:
        super().__init__(lines[-1] if lines else "killed")
        self.lines, self.activity = lines, activity


def add_rehearse(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `rlsys rehearse`."""
    sub = add(
        "rehearse",
        rehearse,
        "run one full-size update of any rank on this CPU, without weights or values: memory, FLOPs, collectives",
    )
    add_config(sub)
    group = sub.add_mutually_exclusive_group()
    group.add_argument("--rank", type=int, metavar="N", help="rehearse this rank only")
    group.add_argument(
        "--all-kinds", action="store_true",
        help="rehearse a rank of every pipeline stage (default: the first, the largest middle and the last one)",
    )  # fmt: skip
    sub.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GB",
        help="memory of one GPU (default: launch.gpu_memory_gb if launch.gpus_per_node is set)",
    )
    sub.add_argument(
        "--skew", type=float, default=1.0, metavar="X",
        help="load of the busiest expert relative to the mean (default: 1)",
    )  # fmt: skip
    sub.add_argument("--json", action="store_true", help="print JSON only")


def rehearse(args: argparse.Namespace) -> int:
    """Run `rlsys rehearse`.

    Raises:
        RunError: a rank would fail (exit code 1).
    """
    config = with_gpu_memory(load_config(args.config, args.overrides), args.gpu_memory)
    config = pin_models(config, weights=False)
    overrides = [*args.overrides, *model_overrides(config)]
    hf = _check(args, config)
    on_gpus = config.launch.gpus_per_node > 0
    gpu_gb = config.launch.gpu_memory_gb if on_gpus or args.gpu_memory is not None else None
    ranks = (
        one_rank(config, args.rank) if args.rank is not None else kinds_of_rank(config, hf, args.all_kinds)
    )
    figures, failures = [], []
    for rank in ranks:
        kind = name_of_kind(stage_of(config, rank), config.parallel.pp)
        print(f"rlsys: rank {rank} of {config.parallel.world_size}, {kind}", file=sys.stderr, flush=True)
        try:
            figures.append(run_rank(args.config, overrides, Request(rank, args.skew)))
        except RankFailed as e:
            print(*(f"    {line}" for line in e.lines), sep="\n", file=sys.stderr)
            failures.append(f"{kind} (rank {rank}) fails in {e.activity}: {e}")
    shares = config.launch.placement == "colocated" and not config.launch.release_memory
    engine_bytes = budget(config, model_size(hf)).engine if on_gpus and shares else 0.0
    failures += problems(figures, gpu_gb, engine_bytes)
    if args.json:
        print(json.dumps({"ranks": [f.as_json() for f in figures], "failures": failures}, indent=2))
    elif figures:
        print(describe(config, figures, engine_bytes))
    if failures:
        raise RunError("; ".join(failures))
    return 0


def _check(args: argparse.Namespace, config: Config) -> HFConfig:
    """Check the options and the layout, and return the model.

    Raises:
        UserError: an option is invalid, or the layout does not fit the model.
    """
    if not 1 <= args.skew < math.inf:
        raise UserError(f"--skew {args.skew}: expected 1 or more, and finite")
    hf = read_model(config)
    check_layout(config, hf)
    check_requirements(config, hf)
    return hf


def run_rank(config: Path, overrides: list[str], request: Request) -> Figures:
    """Rehearse a rank in a subprocess, and show its progress on stderr.

    Args:
        config: the config file.
        overrides: overrides of config fields.
        request: the rank, and the load of its experts.

    Raises:
        UserError: the config is invalid.
        RankFailed: the rehearsed code failed.
    """
    request_json = json.dumps({"config": str(config), "overrides": overrides, "request": asdict(request)})
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            module_command("rlsys.rehearse.rank"),
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.PIPE, text=True, env={**os.environ, **_ENV},
        )  # fmt: skip
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(request_json)
        process.stdin.close()
        lines, activity = _follow(process.stderr)
        code = process.wait()
        if code == UserError.exit_code:
            raise UserError(lines[-1].removeprefix("UserError: "))
        if code:
            raise RankFailed(lines, activity)
        output.seek(0)
        return Figures.of_json(json.load(output))


def _follow(stderr: IO[str]) -> tuple[list[str], str]:
    """Print the progress lines of a rank's stderr until it ends.

    Returns:
        the last _MAX_LINES other lines, and the rank's last activity.
    """
    last_lines: deque[str] = deque(maxlen=_MAX_LINES)
    activity = "the build"
    for line in stderr:
        if line.startswith("rlsys: "):
            print(line, end="", file=sys.stderr, flush=True)
            activity = line.rpartition(": ")[2].strip()
        elif line.strip():
            last_lines.append(line.rstrip())
    return list(last_lines), activity
