"""Measure the cost of `rlsys rehearse`: `python bench/rehearse.py [--only WORD ...] [--pushes] [--json] [--quick]`.

The layouts are the shipped experiments, and DeepSeek-V3 on 2,048 GPUs. For each layout the bench first plans a
sharded push: the bytes that trainer ranks send and engines receive, and the seconds at the stated rate of a link.
Then it rehearses one rank of the first, of the fullest middle and of the last pipeline stage, one process after the
other, and prints wall seconds, CPU seconds and memory. The exit code is 1 if a rank takes more than 3 minutes or
4 GB, or a plan more than 10 s of CPU time. Wall times are meaningful on a quiet machine only.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from measure import ROOT, machine

from rlsys.cli.rehearse import run_rank
from rlsys.config import Config, load_config
from rlsys.planner.model_preflight import read_model
from rlsys.planner.weight_update_cost import GB, LINK, seconds
from rlsys.rehearse.kinds import Request, kinds_of_rank
from rlsys.weights.shard_plan import plan_senders

SECONDS, BYTES = 180.0, 4e9
"""Limits of the wall seconds and of the memory of a rehearsal."""
PLAN_SECONDS = 10.0
"""Limit of the CPU seconds of the plan of a push."""
EXPERIMENTS = ROOT / "configs/experiments"
LARGEST = ["parallel.tp=8", "parallel.pp=16", "parallel.ep=64", "parallel.dp=16", "launch.nodes=256"]
"""Layout of DeepSeek-V3's 61 layers on 2,048 GPUs."""
SMALLEST = "qwen2.5-7b_8gpu_colocated"
"""Experiment of `--quick`."""


def cases() -> dict[str, tuple[Path, list[str]]]:
    """Return config file and overrides of each layout, by name."""
    experiments: dict[str, tuple[Path, list[str]]] = {
        p.stem: (p, []) for p in sorted(EXPERIMENTS.glob("*.yaml")) if p.stem != "base"
    }
    return {
        **experiments,
        "deepseek-v3_2048gpu": (EXPERIMENTS / "deepseek-v3_256gpu_colocated.yaml", LARGEST),
    }


def rehearse_rank(path: Path, overrides: list[str], rank: int) -> dict[str, Any]:
    """Rehearse one rank in a process of its own. Return the cost of the rehearsal and its main figures."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    figures = run_rank(path, overrides, Request(rank))
    wall = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "rank": rank, "stage": figures.stage, "world": figures.world, "wall_s": round(wall, 1),
        "cpu_s": round(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, 1),
        "rss_gb": round(figures.resident / 1e9, 2), "peak_gb": round(figures.worst.total / 1e9, 2),
        "operations": sum(phase.operations for phase in figures.phases),
    }  # fmt: skip


def plan_figures(config: Config) -> dict[str, Any]:
    """Plan a sharded push. Return the figures of the plan, and the CPU seconds of planning."""
    start = time.process_time()
    plan = plan_senders(config, read_model(config))
    plan_seconds = time.process_time() - start
    return {
        "senders": len(plan.schedules), "ranks": len(plan.total_bytes),
        "sent_max_gb": round(max(plan.total_bytes) / GB, 3),
        "sent_mean_gb": round(plan.mean / GB, 3), "received_gb": round(plan.received_bytes / GB, 3),
        "link_gb_s": LINK, "seconds": round(seconds(plan, config), 2),
        "planned_s": round(plan_seconds, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="WORD",
        help="only layouts whose names contain one of these words",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"one rank of {SMALLEST}: checks only that the bench runs"
    )
    parser.add_argument("--pushes", action="store_true", help="only the plans of pushes, which take seconds")
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    args = parser.parse_args()
    chosen = [SMALLEST] if args.quick else [n for n in cases() if any(word in n for word in args.only)]
    if not chosen:
        parser.error(f"--only {' '.join(args.only)}: in no name; expected a part of: {', '.join(cases())}")
    results: dict[str, list[dict[str, Any]]] = {}
    pushes: dict[str, dict[str, Any]] = {}
    for name in chosen:
        path, overrides = cases()[name]
        config = load_config(path, overrides)
        pushes[name] = plan_figures(config)
        if not args.json:
            print(f"{name}: {json.dumps(pushes[name])}", file=sys.stderr, flush=True)
        ranks = [] if args.pushes else kinds_of_rank(config, read_model(config))
        for rank in ranks[:1] if args.quick else ranks:
            results.setdefault(name, []).append(rehearse_rank(path, overrides, rank))
            if not args.json:
                print(f"{name}: {json.dumps(results[name][-1])}", file=sys.stderr, flush=True)
    rank_figures = [figures for ranks in results.values() for figures in ranks]
    within = all(rank["wall_s"] <= SECONDS and rank["rss_gb"] * 1e9 <= BYTES for rank in rank_figures)
    within &= all(push["planned_s"] <= PLAN_SECONDS for push in pushes.values())
    print(
        json.dumps({"machine": machine(), "within": within, "pushes": pushes, "results": results}, indent=1)
    )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
