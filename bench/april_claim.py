"""Compare APRIL with synchronous runs in throughput, convergence and accuracy, for several algorithms and seeds.

    python bench/april_claim.py --json [--records FILE] [--algorithms grpo ...] [--seeds 0 1 ...] [--ratios 1 1.5 2]
    python bench/april_claim.py --quick
    python bench/april_claim.py --table

The bench makes real runs of configs/algorithms/NAME.yaml on the quickstart's task, whose responses have long-tailed
lengths, with a learning rate with which the task takes some 40 steps. N'/N = 1 is synchronous (max_staleness 0);
N'/N = 1.5 and 2 over-provision (max_staleness 8). All runs make the same number of steps and evaluate greedily every
few steps. Figures exclude the time of evaluations. The engine sleeps before every forward pass (SGLang's /slow_down),
like `gpu-like` in april.py: on a GPU a pass with more requests takes hardly longer. On a CPU without the sleep it
takes longer, so APRIL could gain nothing (bench/README.md).

A finished run is one line of `--records`, and is not run again. `--table` writes the table of all records into
bench/README.md. The bench refuses a file with records of other settings. Runs of one seed and algorithm follow each
other; the ratio that begins rotates from seed to seed.

    throughput            trained tokens per second of the steps, over the whole run
    step_seconds          mean seconds of a step
    to_ACCURACY           steps, and seconds of steps, to the first evaluation of at least ACCURACY, or null
    accuracy              accuracy of the last evaluation
    against_synchronous   comparison with the synchronous run of the same algorithm and seed: ratios of throughput and
                          of seconds, difference of the final accuracies, and difference to the accuracy that the
                          synchronous run has after the same seconds

Figures are the mean, and the 95 % interval by Student's t, over the seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from measure import ROOT, machine, say
from plan_stage import Size, Stage, stage

from rlsys.config import load_config
from rlsys.core.errors import UserError

ALGORITHMS: tuple[str, ...] = ("grpo", "dapo", "gspo")
RATIOS = (1.0, 1.5, 2.0)
SEEDS: tuple[int, ...] = (0, 1, 2, 3, 4)
SETTINGS: dict[str, Any] = {
    "groups": 8, "group_size": 8, "longest": 256, "steps": 52, "lr": 6.0e-6, "eval_interval": 4, "eval_prompts": 128,
    "max_staleness": 8, "sleep": 0.02,
}  # fmt: skip
"""Settings of every run.

groups, group_size: of a step. longest: largest number of tokens of a response. eval_interval, max_staleness: steps;
max_staleness is 0 in runs with N'/N = 1. sleep: seconds before every pass of the engine.
"""
QUICK = SETTINGS | {
    "groups": 4,
    "longest": 64,
    "steps": 2,
    "eval_interval": 1,
    "eval_prompts": 8,
}
TARGETS: tuple[float, ...] = (0.5, 0.9)
"""Held-out accuracies of `to_ACCURACY`."""
RECORDS = ROOT / "bench" / "april_claim.jsonl"
PAGE = ROOT / "bench" / "README.md"
BEGIN, END = "<!-- table: python bench/april_claim.py --table -->\n", "<!-- end of table -->"
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom."""

Record = dict[str, Any]
Key = tuple[str, float, int]
"""Algorithm, N'/N, seed."""


def run(engines: Stage, settings: Mapping[str, Any], key: Key) -> Record:
    """Make one run and return its record. The error of a failed run ends the bench."""
    algorithm, ratio, seed = key
    folder, samples = engines.new_folder(), settings["groups"] * settings["group_size"]
    config = load_config(
        ROOT / "configs" / "algorithms" / f"{algorithm}.yaml",
        [
            f"run.dir={folder}", f"run.seed={seed}", f"trainer.lr={settings['lr']}", "trainer.warmup_steps=0",
            "trainer.steps=100000", "trainer.checkpoint_every=100000", f"eval.interval={settings['eval_interval']}",
            f"eval.prompts={settings['eval_prompts']}", f"rollout.groups_per_step={settings['groups']}",
            f"rollout.group_size={settings['group_size']}", f"rollout.max_response_tokens={settings['longest']}",
            f"rollout.over_provision={ratio:g}",
            f"rollout.max_staleness={0 if ratio == 1 else settings['max_staleness']}",
            f"engine.max_running_requests={2 * samples}",
        ],
    )  # fmt: skip
    evaluations = 1 + settings["steps"] // settings["eval_interval"]
    engines.run_config(config, settings["sleep"], "eval", evaluations)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "algorithm": algorithm, "ratio": ratio, "seed": seed, **measured(lines, settings["steps"]),
        "settings": dict(settings), "machine": machine(),
    }  # fmt: skip


def measured(lines: Sequence[Mapping[str, Any]], steps: int) -> Record:
    """Return the figures of a run's first `steps` steps.

    Args:
        lines: lines of metrics.jsonl; `time` is in seconds since the start. A step lasts from the line before it,
            of a step or an evaluation, to its own line.
        steps: number of steps.

    Returns:
        seconds and tokens of the steps, and `curve`: step, accuracy, and seconds of the previous steps of each
        evaluation.
    """
    seconds, previous_time, tokens = 0.0, 0.0, 0
    curve: list[list[float]] = []
    for line in lines:
        if line["kind"] == "step" and line["step"] <= steps:
            seconds += line["time"] - previous_time
            tokens += line["tokens"]
        elif line["kind"] == "eval" and line["step"] <= steps:
            curve.append([line["step"], round(line["accuracy"], 4), round(seconds, 2)])
        previous_time = line["time"]
    return {"seconds": round(seconds, 2), "tokens": tokens, "steps": steps, "curve": curve}


def target_reached(record: Record, accuracy: float) -> list[float] | None:
    """Return the steps, and the seconds of steps, to the first evaluation of at least `accuracy`, or None."""
    for step, value, seconds in record["curve"]:
        if value >= accuracy:
            return [step, seconds]
    return None


def accuracy_by(record: Record, seconds: float) -> float:
    """Return the accuracy of the last evaluation within `seconds` of steps."""
    return float([value for _, value, elapsed in record["curve"] if elapsed <= seconds][-1])


def interval(values: Sequence[float]) -> list[float] | None:
    """Return the 95 % interval of the mean by Student's t; None for one value, or more than T_975 covers."""
    n = len(values)
    if not 2 <= n <= len(T_975) + 1:
        return None
    half = T_975[n - 2] * stdev(values) / n**0.5
    return [mean(values) - half, mean(values) + half]


def estimate(values: Sequence[float]) -> dict[str, Any] | None:
    """Return mean, interval and number of the values, or None if there are no values."""
    if not values:
        return None
    bounds = interval(values)
    return {
        "mean": round(mean(values), 4),
        "interval": bounds and [round(x, 4) for x in bounds],
        "n": len(values),
    }


def table(records: Mapping[Key, Record], targets: Sequence[float] = TARGETS) -> dict[str, Any]:
    """Return algorithm -> N'/N -> figures over the seeds, including the comparison with the synchronous runs."""
    out: dict[str, Any] = {}
    for algorithm, ratio in sorted(
        {key[:2] for key in records}, key=lambda k: (ALGORITHMS.index(k[0]), k[1])
    ):
        seed_records = {seed: r for (a, n, seed), r in records.items() if (a, n) == (algorithm, ratio)}
        pairs = [
            (records[algorithm, 1.0, seed], r)
            for seed, r in seed_records.items()
            if (algorithm, 1.0, seed) in records
        ]
        figures: dict[str, Any] = {
            "throughput": estimate([r["tokens"] / r["seconds"] for r in seed_records.values()]),
            "step_seconds": estimate([r["seconds"] / r["steps"] for r in seed_records.values()]),
            "accuracy": estimate([r["curve"][-1][1] for r in seed_records.values()]),
            "against_synchronous": {
                "throughput": estimate(
                    [b["tokens"] / b["seconds"] / (a["tokens"] / a["seconds"]) for a, b in pairs]
                ),
                "accuracy": estimate([b["curve"][-1][1] - a["curve"][-1][1] for a, b in pairs]),
                "accuracy_in_equal_seconds": estimate(
                    [b["curve"][-1][1] - accuracy_by(a, b["curve"][-1][2]) for a, b in pairs]
                ),
            },
        }
        for accuracy in targets:
            name = f"to_{accuracy:g}"
            reached = [target_reached(r, accuracy) for r in seed_records.values()]
            figures[name] = {
                "steps": [r and r[0] for r in reached],
                "seconds": estimate([r[1] for r in reached if r]),
            }
            target_pairs = [(target_reached(a, accuracy), target_reached(b, accuracy)) for a, b in pairs]
            figures["against_synchronous"][f"seconds_{name}"] = estimate(
                [b[1] / a[1] for a, b in target_pairs if a and b and a[1]]
            )
        out.setdefault(algorithm, {})[f"{ratio:g}"] = figures
    return out


def table_lines(figures: Mapping[str, Any], targets: Sequence[float] = TARGETS) -> list[str]:
    """Return the lines of a Markdown table. A ratio is the row's figure divided by that of the synchronous row."""

    def text(value: Mapping[str, Any] | None, form: str = ".2f") -> str:
        if value is None:
            return "not reached"
        low_high = value["interval"]
        bounds = f" ({low_high[0]:{form}} to {low_high[1]:{form}})" if low_high else ""
        return f"{value['mean']:{form}}{bounds}"

    names = [f"to_{accuracy:g}" for accuracy in targets]
    head = ["algorithm", "N'/N", "seeds", "trained tokens/s", "ratio", "s a step"]
    for accuracy in targets:
        head += [f"steps to {accuracy:g}", f"seconds to {accuracy:g}", "ratio"]
    head += ["final accuracy", "difference", "in equal seconds"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for algorithm, rows in figures.items():
        for ratio, row in rows.items():
            paired = row["against_synchronous"]
            synchronous = ratio == "1"
            cells = [
                algorithm, ratio, str(row["throughput"]["n"]), text(row["throughput"], ".0f"),
                "" if synchronous else text(paired["throughput"]), text(row["step_seconds"], ".2f"),
            ]  # fmt: skip
            for name in names:
                steps = " ".join("-" if s is None else f"{s:g}" for s in row[name]["steps"])
                cells += [
                    steps, text(row[name]["seconds"], ".0f"),
                    "" if synchronous else text(paired[f"seconds_{name}"]),
                ]  # fmt: skip
            cells.append(text(row["accuracy"], ".3f"))
            for name in ("accuracy", "accuracy_in_equal_seconds"):
                cells.append("" if synchronous else text(paired[name], "+.3f"))
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def page_with(lines: Sequence[str]) -> str:
    """Return the text of bench/README.md with `lines` as the table."""
    prefix, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return "".join([prefix, BEGIN, *(f"{line}\n" for line in lines), END, rest.partition(END)[2]])


def read_records(path: Path, settings: Mapping[str, Any]) -> dict[Key, Record]:
    """Return the records of a file, by key; none if the file does not exist.

    Raises:
        UserError: a record has other settings.
    """
    records: dict[Key, Record] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.is_file() else (), 1):
        record = json.loads(line)
        if record["settings"] != dict(settings):
            raise UserError(f"{path}:{number}: settings are {record['settings']}; expected {dict(settings)}")
        records[record["algorithm"], record["ratio"], record["seed"]] = record
    return records


def missing_keys(
    records: Mapping[Key, Record], algorithms: Sequence[str], seeds: Sequence[int], ratios: Sequence[float]
) -> list[Key]:
    """Return the keys without a record, seed by seed, so that all algorithms get equally many runs."""
    keys = []
    for seed in seeds:
        first = seed % len(ratios)
        for algorithm in algorithms:
            keys += [(algorithm, ratio, seed) for ratio in (*ratios[first:], *ratios[:first])]
    return [key for key in keys if key not in records]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="the whole result as JSON on one line")
    parser.add_argument(
        "--table", action="store_true", help="run nothing; write the table into bench/README.md"
    )
    parser.add_argument("--records", type=Path, help=f"a line for each run (default: bench/{RECORDS.name})")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--ratios", nargs="+", type=float, choices=RATIOS, default=RATIOS, help="N'/N")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="values of run.seed")
    parser.add_argument("--quick", action="store_true", help="grpo, one seed, two tiny steps: that it runs")
    args = parser.parse_args()
    settings, targets, path = SETTINGS, TARGETS, args.records or RECORDS
    algorithms, seeds = args.algorithms, args.seeds
    with tempfile.TemporaryDirectory() as name:
        if args.quick:
            settings, targets, algorithms, seeds = QUICK, (0.0,), ("grpo",), (0,)
            path = Path(name) / "records.jsonl"
        try:
            records = read_records(path, settings)
        except UserError as e:
            print(f"error: {e}", file=sys.stderr)
            return e.exit_code
        keys = [] if args.table else missing_keys(records, algorithms, seeds, args.ratios)
        if keys:
            size = Size(settings["groups"], settings["group_size"], settings["longest"], engines=1)
            with stage(Path(name) / "stage", size) as engines, path.open("a", encoding="utf-8") as file:
                for key in keys:
                    records[key] = run(engines, settings, key)
                    file.write(json.dumps(records[key]) + "\n")
                    file.flush()
                    say(f"{key}: {records[key]['seconds']} s, {records[key]['curve'][-1]}")
        figures = table(records, targets)
    if args.table:
        PAGE.write_text(page_with(table_lines(figures, targets)), encoding="utf-8")
    if args.json:
        print(json.dumps({"bench": "april_claim", "settings": settings, "runs": figures}))
    else:
        print("\n".join(table_lines(figures, targets)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
