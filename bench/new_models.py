"""Configs of `rlsys new` for published models: memory estimated by `explain` and counted by `rehearse`.

    python bench/new_models.py CONFIG_JSON ... [--gpus 8 64 512] [--rehearse] [--out FILE]

CONFIG_JSON is the config.json of a model, under any name. For each model and number of GPUs the bench writes the
config of `rlsys new`, and prints one line: the layout, the bytes of a trainer rank that `rlsys explain` estimates,
and with `--rehearse` the peak of the fullest rank that `rlsys rehearse` counts; or the refusal, with the smallest
number of GPUs that suffices. `--out` saves the results; cells that it contains are not repeated.

The exit code is 1 if an estimate differs by more than 15 % from the rehearsed peak. Any error other than a refusal
ends the bench.
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
GPUS = (8, 64, 512)


def model_name(source: Path) -> str:
    return source.parent.name if source.name == "config.json" else source.stem


def cell(source: Path, gpus: int, rehearse: bool) -> dict[str, Any]:
    """Return the figures of a model on a number of GPUs: `refusal` or layout and bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / model_name(source)
        folder.mkdir()
        shutil.copyfile(source, folder / "config.json")
        try:
            return sized(folder, gpus, Path(name) / "config.yaml" if rehearse else None)
        except UserError as e:
            return {"refusal": str(e).replace(f"{name}/", "")}


def sized(folder: Path, gpus: int, config_file: Path | None) -> dict[str, Any]:
    """Return layout and estimated bytes, and the rehearsed bytes if a rehearsal was requested. Raises UserError."""
    hf, config = HFConfig.read(folder), recommend(folder, gpus).config
    stated = budget(config, model_size(hf))
    p, in_stage = config.parallel, config.parallel.world_size // config.parallel.pp
    figures: dict[str, Any] = {
        "layout": {key: getattr(p, key) for key in ("tp", "cp", "pp", "ep", "dp") if getattr(p, key) > 1},
        "stated_gb": round(stated.trainer / 1e9, 2),
        "pool_tokens": stated.pool_tokens,
    }
    if config_file is None:
        return figures
    config_file.write_text(dump_config(config), encoding="utf-8")
    begin = time.monotonic()
    micro_batches = None if p.pp > 1 else 1  # more of them change no peak
    rank = run_rank(config_file, [], Request(stated.stage * in_stage, micro_batches=micro_batches))
    real = round(rank.worst.total / 1e9, 2)
    return figures | {
        "rehearsed_gb": real,
        "ratio": round(figures["stated_gb"] / real, 3),
        "rehearsal_seconds": round(time.monotonic() - begin, 1),
    }


def text(figures: dict[str, Any]) -> str:
    """Return a cell as text."""
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
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG_JSON")
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS)
    parser.add_argument(
        "--rehearse", action="store_true", help="rehearse the fullest rank: up to minutes per config"
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
    sized = sum("layout" in figures for figures in results.values())
    print(f"{len(results)} cells: {sized} sized, {len(results) - sized} refused")
    if ratios:
        print(f"stated / rehearsed: {min(ratios):.3f} to {max(ratios):.3f}")
    return int(any(abs(ratio - 1) > TOLERANCE for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
