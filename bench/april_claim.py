"""APRIL's own claim: over-provision shortens the way to the same held-out accuracy, training included, at no loss.

    python bench/april_claim.py --json [--seeds 5] [--steps 10] [--quick]

Real runs of the quickstart, whose task has a long tail, at N'/N = 1 (synchronous), 1.5 and 2, one after the other;
who begins goes round from seed to seed. Each makes the same number of steps and evaluates greedily after every one.
What evaluations take is in no figure. The engine sleeps before every forward pass (SGLang's /slow_down), as
april.py's `gpu-like` one does: a pass of a GPU takes hardly longer for more requests. On the raw CPU it does, and
there is nothing to gain: see bench/README.md.

    seconds_to_target   from the first moment at which a run could train to the step whose evaluation showed the
                        target
    times_sooner        the synchronous run's seconds to the target over this one's, of the same seed
    accuracy            after the last step, which is the same step for all
    accuracy_difference this accuracy less that of the synchronous run of the same seed: mean, and its 95 % interval
                        by Student's t over the seeds
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from measure import ROOT, machine, say, spread
from plan_stage import Size, Stage, stage
from race import CONFIG, read_run

from rlsys.config import load_config

RATIOS = (1.0, 1.5, 2.0)
STALENESS = 8
"""Steps; where N'/N is 1 it is 0."""
SLEEP = 0.02
"""Seconds before every pass."""
TARGET = 0.9
QUICK = Size(groups=4, group=8, longest=64, engines=1)
SIZE = Size(groups=16, group=8, longest=256, engines=1)
"""The quickstart's own."""
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Claimed:
    """One run. `seconds`: to the target, None where it was not reached."""

    accuracy: float
    seconds: float | None
    steps: int | None
    step_seconds: float


def run(
    kept: Stage, ratio: float, seed: int, steps: int, target: float, overrides: tuple[str, ...]
) -> Claimed:
    """Ends the bench when the run fails: a claim of fewer runs is another one."""
    size, folder = kept.size, kept.new_folder()
    config = load_config(
        ROOT / CONFIG,
        [
            f"run.dir={folder}", f"run.seed={seed}", "trainer.warmup_steps=0", "trainer.steps=100000",
            "trainer.checkpoint_every=100000", "eval.interval=1", f"rollout.groups_per_step={size.groups}",
            f"rollout.group_size={size.group}", f"rollout.max_response_tokens={size.longest}",
            f"rollout.over_provision={ratio:g}", f"rollout.max_staleness={0 if ratio == 1 else STALENESS}",
            f"engine.max_running_requests={2 * size.groups * size.group}",
            *overrides,
        ],
    )  # fmt: skip
    began = time.time()
    kept.run_config(config, SLEEP, "eval", 1 + steps)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    reached = read_run(lines, began, target)
    took = [line["time_step"] for line in lines if line["kind"] == "step"]
    return Claimed(
        [line["accuracy"] for line in lines if line["kind"] == "eval"][steps],
        None if reached is None else reached.step_seconds,
        None if reached is None else reached.steps,
        mean(took[:steps]),
    )


def interval(differences: list[float]) -> list[float] | None:
    """95 % of the mean, by Student's t; None for a single one, and for more than the table has."""
    n = len(differences)
    if not 2 <= n <= len(T_975) + 1:
        return None
    half = T_975[n - 2] * stdev(differences) / n**0.5
    return [mean(differences) - half, mean(differences) + half]


def compared(runs: dict[float, list[Claimed]]) -> dict[str, Any]:
    """Return the figures of each N'/N, and ratios and differences against N'/N = 1, seed by seed."""
    out: dict[str, Any] = {}
    for ratio, own in runs.items():
        pairs = list(zip(runs[1.0], own, strict=True))
        sooner = [a.seconds / b.seconds for a, b in pairs if a.seconds and b.seconds]
        differences = [b.accuracy - a.accuracy for a, b in pairs]
        found = [r.seconds for r in own if r.seconds is not None]
        out[f"{ratio:g}"] = {
            "seconds_to_target": spread(found) if found else None,
            "steps_to_target": [r.steps for r in own],
            "times_sooner": spread(sooner) if sooner else None,
            "times_sooner_by_seed": sooner,
            "seconds_of_a_step": spread([r.step_seconds for r in own]),
            "times_faster_a_step": spread([a.step_seconds / b.step_seconds for a, b in pairs]),
            "accuracy": spread([r.accuracy for r in own]),
            "accuracy_difference": mean(differences),
            "accuracy_difference_interval": interval(differences),
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="the whole result as JSON on one line")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each N'/N, at most 10")
    parser.add_argument("--steps", type=int, default=10, help="of every run")
    parser.add_argument("--target", type=float, default=TARGET, help="held-out accuracy")
    parser.add_argument("--quick", action="store_true", help="one seed, two tiny steps: that it runs")
    args = parser.parse_args()
    seeds, steps, target = (1, 2, 0.0) if args.quick else (args.seeds, args.steps, args.target)
    runs: dict[float, list[Claimed]] = {ratio: [] for ratio in RATIOS}
    with tempfile.TemporaryDirectory() as name, stage(Path(name), QUICK if args.quick else SIZE) as kept:
        for seed in range(seeds):
            first = seed % len(RATIOS)
            for ratio in (*RATIOS[first:], *RATIOS[:first]):
                runs[ratio].append(
                    run(kept, ratio, seed, steps, target, ("eval.prompts=8",) if args.quick else ())
                )
                say(f"seed {seed} N'/N = {ratio:g}: {runs[ratio][-1]}")
    found = compared(runs)
    summary = {
        f"{figure}_at_{name}": value["median"] if isinstance(value, dict) else value
        for name, figures in found.items()
        if name != "1"
        for figure in ("times_sooner", "times_faster_a_step", "accuracy_difference")
        if (value := figures[figure]) is not None
    }
    result = {
        "bench": "april_claim", "seconds_slept_before_a_pass": SLEEP, "seeds": seeds, "steps": steps,
        "target": target, "machine": machine(), "runs": found, "summary": summary,
    }  # fmt: skip
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
