"""Run all algorithms on the real stack with one engine, and measure their learning curves and cost.

    python bench/algorithms.py --json                       # every recipe, 3 steps; then the cost shares
    python bench/algorithms.py --part curves --json         # learning curves against GRPO: hours on a laptop
    python bench/algorithms.py --quick --json               # a few recipes of each part
    python bench/algorithms.py --part recipes --only gspo dapo

`--out FILE` (default runs/bench_algorithms.json) saves every result at once. Results that the file contains are not
measured again, so an interrupted bench can continue. `--plot` draws the curves of the file into docs/figures.

Parts:
    recipes   runs each file of configs/algorithms for 3 steps: reward, loss and the recipe's own metrics
    curves    runs with N'/N = 2 and 2 seeds, with the held-out accuracy every third step. Methods for stale data
              also run with N'/N = 5 and 9, which force the staleness towards 4 and 8 train steps (`staleness_mean`
              is the measured staleness). exact_old runs with router replay. Batch and learning rate are a quarter
              of the quickstart's, because otherwise every method is above 0.95 after five steps
    cost      share of a train step that the algorithm itself takes (plan, finish, prepare, loss), and the share of
              the forward passes that it requests. For recipes that take `old` from the training pass also the
              seconds of a step with and without a scoring pass, and the saved share
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure import ROOT, machine, running_engine, say

from rlsys.algo.preflight import check
from rlsys.config import Config, dump_config, load_config
from rlsys.core.errors import RlsysError
from rlsys.core.owner import FOLDER as OWNERS
from rlsys.core.owner import Owner, claim
from rlsys.core.sockets import make_folder, remove_folder
from rlsys.obs.metrics import read_metrics

FOLDER = ROOT / "configs" / "algorithms"
RECIPES = sorted(p.stem for p in FOLDER.glob("*.yaml"))
CURVES = ("grpo", "dapo", "gspo", "cispo", "sapo", "tis", "decoupled_ppo", "m2po", "bapo")
STALE = ("grpo", "decoupled_ppo", "m2po", "vcpo", "sapo", "dppo", "exact_old")
"""Methods for stale data, and GRPO for comparison."""
REPLAYED = ("exact_old",)
"""Methods that correct only the age of tokens: their curves use the engine's experts in the trainer."""
WAVE_1 = (
    "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "dapo", "gspo", "cispo", "sapo",
    "dual_clip", "kl", "kl_reward", "entropy", "tis", "icepop", "icepop_geometric", "opsm", "decoupled_ppo",
    "decoupled_interpolated", "decoupled_ewma", "exact_old", "m2po", "m2po_mask", "bapo", "vcpo", "minpro", "gdpo",
)  # fmt: skip
"""Methods whose algorithm must take less than 5 % of a step."""
QUICK = ("grpo", "dapo", "gae")
ROLE_SECONDS = 1800.0
"""Time limit of a run in seconds."""


@dataclass(frozen=True)
class SharedEngine:
    """A running engine that several runs use, one after the other."""

    url: str
    owner: Owner


class Results:
    """Owns the output file, a JSON object of results by "PART/NAME".

    Attributes:
        all: the content of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.all: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def put(self, key: str, value: Any) -> None:
        """Set a result, and write the file."""
        self.all[key] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.all, indent=1))


@contextlib.contextmanager
def role(module: str, *args: str, log: Path, owner: Owner) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of the run under a keeper, and end it after the context.

    The keeper ends the process even if this bench is killed.

    Args:
        module: the module to run.
        args: arguments of the module.
        log: file of the output.
        owner: the launch that owns the run.
    """
    argv = [sys.executable, "-m", "launch.keeper", "--grace", "10", "--", sys.executable, "-m", module, *args]
    with (
        log.open("wb") as out,
        subprocess.Popen(
            argv,
            cwd=ROOT,
            env=os.environ | owner.environment(start=1),
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


def run(config: Config, engine: SharedEngine) -> dict[str, Any]:
    """Make a whole run on a running engine, with a rollout process and one trainer.

    Returns:
        `ok` true with seconds, steps and evaluations; or `ok` false with `error`, the end of the trainer's log.
    """
    folder = config.run.dir
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    # The engine accepts only the launch that started it.
    shutil.copytree(engine.owner.run_dir / OWNERS, folder / OWNERS)
    owner = replace(engine.owner, run_dir=folder)
    start, path = time.monotonic(), str(folder / "config.yaml")
    rollout = ["--config", path, "--engine", engine.url]
    with contextlib.ExitStack() as stack:
        if config.engine.reference == "own":
            rollout += ["--reference", stack.enter_context(running_engine(config, folder, owner=owner))]
        stack.enter_context(role("rlsys.rollout.service", *rollout, log=folder / "rollout.log", owner=owner))
        training = stack.enter_context(
            role("rlsys.train", "--config", path, log=folder / "trainer.log", owner=owner)
        )
        code = training.wait(ROLE_SECONDS)
    if code:
        tail = (folder / "trainer.log").read_text(errors="replace").strip().splitlines()[-3:]
        return {"ok": False, "error": " | ".join(tail)}
    metrics = read_metrics(folder)
    return {
        "ok": True,
        "seconds": time.monotonic() - start,
        "steps": [{k: v for k, v in step.items() if isinstance(v, int | float)} for step in metrics.steps],
        "evals": [{k: e[k] for k in ("step", "accuracy", "mean_length")} for e in metrics.evals],
    }


def recipes(names: list[str], engine: SharedEngine, work: Path, results: Results) -> None:
    """Run each recipe for 3 steps; skip recipes that have a result."""
    for name in names:
        key = f"recipes/{name}"
        if results.all.get(key, {}).get("ok"):
            continue
        overrides = [f"run.dir={work / name}", "trainer.steps=3", "eval.prompts=8", "eval.interval=100"]
        try:
            config = load_config(FOLDER / f"{name}.yaml", overrides)
            check(config)
            results.put(key, run(config, engine))
        except RlsysError as e:  # that a recipe cannot run on this host is a result
            results.put(key, {"ok": False, "error": str(e)})
        say(f"{key}: {'ok' if results.all[key]['ok'] else results.all[key]['error']}")


def curves(
    names: list[str], engine: SharedEngine, work: Path, results: Results, steps: int, seeds: int
) -> None:
    """Measure the learning curves of recipes in CURVES and STALE; skip runs that have a result.

    Args:
        names: recipes.
        engine: the engine of all runs.
        work: folder of the runs.
        results: gets a result for each recipe, staleness and seed.
        steps: train steps of a run.
        seeds: number of seeds.
    """
    jobs = [(name, seed, 0) for name in names if name in CURVES for seed in range(seeds)]
    jobs += [(name, seed, k) for seed in range(seeds) for k in (8, 4) for name in names if name in STALE]
    for name, seed, staleness in jobs:
        key = f"curves/{name}/staleness-{staleness}/seed-{seed}"
        if results.all.get(key, {}).get("ok"):
            continue
        overrides = [
            f"run.dir={work / key.replace('/', '-')}", f"run.seed={seed}", f"trainer.steps={steps}",
            "rollout.groups_per_step=4", "trainer.lr=2.5e-5", "eval.prompts=64", "eval.interval=3",
            "trainer.checkpoint_every=1000",
        ]  # fmt: skip
        if name in REPLAYED:
            overrides += ["trainer.replay=engine", "engine.return_routes=true"]
        if staleness:  # by Little's law a group waits N'/N - 1 steps; a bound of twice that drops few groups
            overrides += [f"rollout.over_provision={staleness + 1}", f"rollout.max_staleness={2 * staleness}"]
        results.put(key, run(load_config(FOLDER / f"{name}.yaml", overrides), engine))
        say(f"{key}: {results.all[key].get('evals') or results.all[key]['error']}")


def cost(names: list[str], work: Path, results: Results, repeats: int) -> None:
    """Measure the cost of each recipe in this process, with the quickstart's model.

    Skips recipes that have a result, and recipes with a teacher.
    """
    from algorithms_cost import measure_cost

    pending = [
        n
        for n in names
        if f"cost/{n}" not in results.all and load_config(FOLDER / f"{n}.yaml").algo.teacher is None
    ]
    for name, measured in measure_cost(pending, work, repeats):
        figures = {key: statistics.median(values) for key, values in measured.items()}
        if "seconds_scored" in figures:
            figures["scoring_pass_saved"] = 1 - figures["seconds"] / figures["seconds_scored"]
        results.put(f"cost/{name}", figures)
        say(f"cost/{name}: {figures}")


Curves = dict[str, dict[str, list[dict[str, Any]]]]
"""Panel of the plot -> recipe -> one run per seed."""


def by_panel(results: Results) -> Curves:
    """Return the successful runs of the part `curves`."""
    panels: Curves = {}
    for key, result in sorted(results.all.items()):
        if key.startswith("curves/") and result["ok"]:
            _, name, panel, _ = key.split("/")
            panels.setdefault(panel, {}).setdefault(name, []).append(result)
    return panels


def summary(results: Results) -> dict[str, Any]:
    """Return the figures of all parts.

    `accuracy` of a curve is the mean over its evaluations, so it is higher if the accuracy rises earlier.
    """
    by_part = {
        kind: {k.split("/")[1]: v for k, v in results.all.items() if k.startswith(f"{kind}/")}
        for kind in ("recipes", "cost")
    }
    wave_1 = {n: v["algorithm_share"] for n, v in by_part["cost"].items() if n in WAVE_1}
    return {
        "recipes_ok": sum(v["ok"] for v in by_part["recipes"].values()),
        "recipes_failed": sorted(n for n, v in by_part["recipes"].items() if not v["ok"]),
        "largest_algorithm_share_wave_1": max(wave_1.items(), key=lambda kv: kv[1], default=None),
        "scoring_pass_saved": {
            n: {k: round(v[k], 3) for k in ("seconds", "seconds_scored", "scoring_pass_saved")}
            for n, v in by_part["cost"].items()
            if "scoring_pass_saved" in v
        },
        "curves": {
            panel: {name: curve_summary(runs) for name, runs in methods.items()}
            for panel, methods in by_panel(results).items()
        },
    }


def curve_summary(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the figures of a recipe's runs, one value for each run."""
    return {
        "accuracy": [round(statistics.mean(e["accuracy"] for e in run["evals"]), 3) for run in runs],
        "last": [round(run["evals"][-1]["accuracy"], 3) for run in runs],
        "staleness_mean": [
            round(statistics.mean(s["staleness_mean"] for s in run["steps"]), 2) for run in runs
        ],
    }


def plot(results: Results, folder: Path) -> None:
    """Write `folder`/algorithms_curves.png: held-out accuracy by step, mean and range of the seeds.

    Each staleness has one panel.
    """
    from matplotlib.figure import Figure

    panels = by_panel(results)
    figure = Figure(figsize=(7 * max(1, len(panels)), 5), layout="constrained")
    for i, (panel, methods) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), i + 1)
        title = "N'/N = 2" if panel == "staleness-0" else f"forced towards {panel[10:]} steps"
        axes.set(title=title, xlabel="train step", ylabel="held-out accuracy", ylim=(0, 1.02))
        for name, runs in methods.items():
            columns = list(zip(*(r["evals"] for r in runs), strict=False))
            steps = [evals[0]["step"] for evals in columns]
            accuracies = [[e["accuracy"] for e in evals] for evals in columns]
            (line,) = axes.plot(steps, [statistics.mean(values) for values in accuracies], label=name, lw=1.3)
            if name == "grpo":
                line.set(color="black", linewidth=3)
            axes.fill_between(
                steps,
                [min(values) for values in accuracies],
                [max(values) for values in accuracies],
                color=line.get_color(),
                alpha=0.08,
            )
        axes.legend(fontsize=8)
    figure.savefig(folder / "algorithms_curves.png", dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        choices=("recipes", "curves", "cost", "all"),
        default="recipes",
        help="part to measure (default: recipes, then cost)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=RECIPES, metavar="NAME", help="recipes to run (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="a few recipes, few steps, one seed")
    parser.add_argument("--steps", type=int, default=24, help="train steps of a learning curve")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "bench_algorithms.json", help="JSON file of all results"
    )
    parser.add_argument("--plot", action="store_true", help="draw the curves into docs/figures")
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    args = parser.parse_args()
    names = args.only or list(QUICK if args.quick else RECIPES)
    results = Results(args.out)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if args.part != "cost":
            # One engine for all runs: it returns a token's experts to runs that request them.
            shared = load_config(ROOT / "configs" / "quickstart.yaml", ["engine.return_routes=true"])
            owner = claim(work, sockets := make_folder())
            with contextlib.ExitStack() as stack:
                stack.callback(remove_folder, sockets)
                url = stack.enter_context(running_engine(shared, work, owner=owner))
                engine = SharedEngine(url, owner)
                if args.part in ("recipes", "all"):
                    recipes(names, engine, work, results)
                if args.part in ("curves", "all"):
                    curves(
                        names, engine, work, results, 5 if args.quick else args.steps, 1 if args.quick else 2
                    )
        if args.part in ("cost", "all", "recipes"):
            cost(names, work, results, 2 if args.quick else 5)
    results.put("machine", machine())
    results.put("summary", summary(results))
    if args.plot:
        plot(results, ROOT / "docs" / "figures")
    print(json.dumps(results.all if args.json else results.all["summary"], indent=1))


if __name__ == "__main__":
    main()
