"""The command `rlsys rehearse`. Each rank is rehearsed in a process of its own; without torch in this one."""

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

from rlsys.config import Config, add_config, load_config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_asked, check_layout
from rlsys.convert.hub import model_overrides, pin_models
from rlsys.core.errors import RunError, UserError
from rlsys.planner.memory import budget, model_size
from rlsys.planner.model_preflight import read_model
from rlsys.rehearse.figures import Figures
from rlsys.rehearse.kinds import Request, kinds_of_rank, name_of_kind, one_rank, stage_of
from rlsys.rehearse.report import describe, problems

_ENV = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
"""On a host with GPUs, too: tensors without values need none."""
_KEPT = 12
"""Lines that are shown of a failure."""


class RankFailed(Exception):
    """The rehearsed code raised; `lines` end with the error."""

    def __init__(self, lines: list[str], during: str) -> None:
        super().__init__(lines[-1] if lines else "it was killed")
        self.lines, self.during = lines, during


def add_rehearse(add: Callable[..., argparse.ArgumentParser]) -> None:
    """`add` makes a sub-command: name, function, help."""
    sub = add(
        "rehearse",
        rehearse,
        "run one update of true size of any rank on this CPU, without weights or values: memory, FLOPs, collectives",
    )
    add_config(sub)
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="this rank only")
    which.add_argument(
        "--all-kinds", action="store_true",
        help="a rank of every pipeline stage; by default of the first, the fullest middle and the last one",
    )  # fmt: skip
    sub.add_argument(
        "--gpu-memory", type=float, metavar="GB", help="of one GPU; 80 where launch.gpus_per_node is given"
    )
    sub.add_argument(
        "--skew", type=float, default=1.0, metavar="X",
        help="how many times its even share of tokens the busiest expert gets; 1",
    )  # fmt: skip
    sub.add_argument("--json", action="store_true", help="print the figures as JSON only")


def rehearse(args: argparse.Namespace) -> int:
    """Raises RunError (exit code 1) when a rank would fail."""
    config = pin_models(load_config(args.config, args.overrides), weights=False)
    overrides = [*args.overrides, *model_overrides(config)]
    hf = _checked(args, config)
    on_gpus = config.launch.gpus_per_node > 0
    gpu_gb = args.gpu_memory if args.gpu_memory is not None else 80.0 if on_gpus else None
    ranks = (
        one_rank(config, args.rank) if args.rank is not None else kinds_of_rank(config, hf, args.all_kinds)
    )
    found, failures = [], []
    for rank in ranks:
        kind = name_of_kind(stage_of(config, rank), config.parallel.pp)
        print(f"rlsys: rank {rank} of {config.parallel.world_size}, {kind}", file=sys.stderr, flush=True)
        try:
            found.append(run_rank(args.config, overrides, Request(rank, args.skew)))
        except RankFailed as e:
            print(*(f"    {line}" for line in e.lines), sep="\n", file=sys.stderr)
            failures.append(f"{kind} (rank {rank}) fails in {e.during}: {e}")
    shares = config.launch.placement == "colocated" and not config.launch.release_memory
    beside = budget(config, model_size(hf)).engine if on_gpus and shares else 0.0
    failures += problems(found, gpu_gb, beside)
    if args.json:
        print(json.dumps({"ranks": [f.as_json() for f in found], "failures": failures}, indent=2))
    elif found:
        print(describe(config, found, beside))
    if failures:
        raise RunError("; ".join(failures))
    return 0


def _checked(args: argparse.Namespace, config: Config) -> HFConfig:
    """What the model's folder says. Raises UserError for options or a layout that make no sense."""
    if args.gpu_memory is not None and not 0 < args.gpu_memory < math.inf:
        raise UserError(f"--gpu-memory {args.gpu_memory}: expected more than 0 GB, and finite")
    if not 1 <= args.skew < math.inf:
        raise UserError(f"--skew {args.skew}: expected 1 or more, and finite")
    if config.trainer.lora is not None:
        raise UserError(
            "trainer.lora: a rehearsal counts the training of whole models; use trainer.lora=null"
        )
    hf = read_model(config)
    check_layout(config, hf)
    check_asked(config, hf)
    return hf


def run_rank(config: Path, overrides: list[str], request: Request) -> Figures:
    """In a process of its own, whose progress appears on stderr. Raises UserError, or RankFailed."""
    asked = json.dumps({"config": str(config), "overrides": overrides, "request": asdict(request)})
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlsys.rehearse.rank"],
            stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE, text=True, env={**os.environ, **_ENV},
        )  # fmt: skip
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(asked)
        process.stdin.close()
        lines, during = _follow(process.stderr)
        code = process.wait()
        if code == UserError.exit_code:
            raise UserError(lines[-1].removeprefix("UserError: "))
        if code:
            raise RankFailed(lines, during)
        out.seek(0)
        return Figures.of_json(json.load(out))


def _follow(stderr: IO[str]) -> tuple[list[str], str]:
    """Show progress as it comes; the last other lines, and what was being done."""
    kept: deque[str] = deque(maxlen=_KEPT)
    during = "the build"
    for line in stderr:
        if line.startswith("rlsys: "):
            print(line, end="", file=sys.stderr, flush=True)
            during = line.rpartition(": ")[2].strip()
        elif line.strip():
            kept.append(line.rstrip())
    return list(kept), during
