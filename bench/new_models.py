"""Check the configs of `rlsys new` for published models: memory as estimated by `explain` and counted by `rehearse`.

    python bench/new_models.py CONFIG_JSON ... [--gpus 8 64 512] [--rehearse] [--out FILE]

CONFIG_JSON is the config.json of a model, under any name. For each model and number of GPUs the bench makes the
config of `rlsys new`, and prints one line: the layout, the GB of a trainer rank that `rlsys explain` estimates, and
with `--rehearse` the peak that `rlsys rehearse` counts for the rank with the most memory. If the model does not fit,
the line has the error, which names the smallest sufficient number of GPUs. `--out` saves the results; results that
the file contains are not measured again.

The exit code is 1 if an estimate differs by more than 15 % from the rehearsed peak. Any error other than a refusal of
`rlsys new` ends the bench.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import say

from rlsys.cli.rehearse import run_rank
from rlsys.config import dump_config
from rlsys.convert.config import HFConfig
from rlsys.core.errors import UserError
from rlsys.planner.memory import budget, model_size
from rlsys.planner.recommendation import recommend
from rlsys.rehearse.kinds import Request

TOLERANCE = 0.15
"""Largest relative difference of an estimate from the rehearsed peak."""
GPUS = (8, 64, 512)


def model_name(source: Path) -> str:
    """Return the model's name for a path NAME/config.json or NAME.json."""
    return source.parent.name if source.name == "config.json" else source.stem


def cell(source: Path, gpus: int, rehearse: bool) -> dict[str, Any]:
    """Return the figures of a model on a number of GPUs (see sized), or `refusal`, the error of `rlsys new`.

    Args:
        source: the model's config.json.
        gpus: number of GPUs.
        rehearse: whether to rehearse a rank.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / model_name(source)
        folder.mkdir()
        shutil.copyfile(source, folder / "config.json")
        try:
            return sized(folder, gpus, Path(name) / "config.yaml" if rehearse else None)
        except UserError as e:
            return {"refusal": str(e).replace(f"{name}/", "")}


def sized(folder: Path, gpus: int, config_file: Path | None) -> dict[str, Any]:
    """Make the config of `rlsys new` for a model folder.

    Args:
        folder: folder with config.json.
        gpus: number of GPUs.
        config_file: file for the config of a rehearsal; None: no rehearsal.

    Returns:
        layout: sizes of the parallel dimensions above 1.
        stated_gb: estimated memory of a rank of the stage with the most memory.
        pool_tokens: tokens of an engine's KV pool.
        rehearsed_gb, ratio, rehearsal_seconds: with a rehearsal, the counted peak, stated_gb divided by it, and the
            duration.

    Raises:
        UserError: the model does not fit, or `rlsys new` does not support it.
    """
    hf, config = HFConfig.read(folder), recommend(folder, gpus).config
    estimate = budget(config, model_size(hf))
    parallel = config.parallel
    dimensions = ("tp", "cp", "pp", "ep", "dp")
    figures: dict[str, Any] = {
        "layout": {name: getattr(parallel, name) for name in dimensions if getattr(parallel, name) > 1},
        "stated_gb": round(estimate.trainer / 1e9, 2),
        "pool_tokens": estimate.pool_tokens,
    }
    if config_file is None:
        return figures
    config_file.write_text(dump_config(config), encoding="utf-8")
    start = time.monotonic()
    micro_batches = None if parallel.pp > 1 else 1  # without a pipeline more micro-batches change no peak
    first_rank = estimate.stage * (parallel.world_size // parallel.pp)
    rank = run_rank(config_file, [], Request(first_rank, micro_batches=micro_batches))
    rehearsed = round(rank.worst.total / 1e9, 2)
    return figures | {
        "rehearsed_gb": rehearsed,
        "ratio": round(figures["stated_gb"] / rehearsed, 3),
        "rehearsal_seconds": round(time.monotonic() - start, 1),
    }


def text(figures: dict[str, Any]) -> str:
    """Return the figures of a cell as one line."""
    if "layout" not in figures:
        return str(figures["refusal"])
    layout = " ".join(f"{key}={size}" for key, size in figures["layout"].items())
    rehearsed = (
        f", rehearsed {figures['rehearsed_gb']} ({figures['ratio']:.2f})" if "ratio" in figures else ""
    )
    return f"{layout}: {figures['stated_gb']} GB{rehearsed}, pool {figures['pool_tokens']}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG_JSON", help="config.json of a model")
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS, help="numbers of GPUs")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="rehearse the rank with the most memory: up to minutes per config",
    )
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {}
    for source in args.configs:
        for gpus in args.gpus:
            key = f"{model_name(source)} {gpus}"
            if key not in results:
                results[key] = cell(source, gpus, args.rehearse)
                if args.out:
                    args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            say(f"{key}: {text(results[key])}")
    ratios = [figures["ratio"] for figures in results.values() if "ratio" in figures]
    fitting = sum("layout" in figures for figures in results.values())
    print(f"{len(results)} models and numbers of GPUs: {fitting} fit, {len(results) - fitting} refused")
    if ratios:
        print(f"estimated / rehearsed memory: {min(ratios):.3f} to {max(ratios):.3f}")
    return int(any(abs(ratio - 1) > TOLERANCE for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
