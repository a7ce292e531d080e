"""Measure the accuracy of `rlsys plan --calibrate`: forecasts of eight settings, then runs of the real stack.

    python bench/plan_check.py --predict [--out FILE] [--quick]      three calibrating runs, then the forecasts
    python bench/plan_check.py --measure [--out FILE] [--quick]      three interleaved runs of each setting, compared

`--predict` writes FILE (bench/predictions/plan.json); commit it before the measurement. `--measure` reads FILE and
prints JSON: forecast and measured seconds of a step and trained tokens per second of each setting, and the errors.
The policy is frozen, so that lengths do not change. Trainer and engines share two cores; therefore engines sleep
before every forward pass (SGLang's /slow_down), like a host that waits for its GPU.

The settings differ in N'/N, engines, placement and sleep. The calibrating runs, one of each placement, have a
different sleep. The forecast adds only the difference of the sleeps to the cost of a pass.

`capacity` has the seconds that the trainer waits, forecast and measured, at max_staleness 0 to 3 with N'/N 1 and
staleness_policy wait. It also has the figure of ECHO-2's rule (rlsys/planner/capacity.py), which `rlsys explain`
prints: a lower bound that needs no simulation. `capacity` uses a separate calibrating run with one engine, because
two engines and a trainer on two cores slow each other down.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from measure import machine, say, spread
from plan_stage import Setting, Size, Stage, config_of, stage, steps_of

from rlsys.planner.calibration import Calibration, calibrate
from rlsys.planner.capacity import engine_rate, step_demand
from rlsys.planner.costs import Costs
from rlsys.planner.simulation import Forecast, simulate

FILE = Path(__file__).with_name("predictions") / "plan.json"
CALIBRATING = {
    "colocated": Setting("colocated", 1, 1.0, 0, 0.02),
    "disaggregated": Setting("disaggregated", 2, 1.25, 2, 0.02),
    "capacity": Setting("disaggregated", 1, 1.0, 2, 0.02, policy="wait"),
}
"""Calibrating runs, by purpose. All lengths come from the first one, which waits for every response."""
SETTINGS = (
    Setting("colocated", 1, 1.0, 0, 0.03),
    Setting("colocated", 1, 2.0, 8, 0.03),
    Setting("colocated", 2, 1.0, 0, 0.03),
    Setting("colocated", 2, 1.5, 4, 0.045),
    Setting("disaggregated", 1, 1.0, 1, 0.03),
    Setting("disaggregated", 1, 2.0, 8, 0.03),
    Setting("disaggregated", 2, 1.5, 4, 0.045),
    Setting("disaggregated", 2, 2.0, 8, 0.03),
)
"""Settings whose step is forecast."""
CAPACITY = tuple(Setting("disaggregated", 1, 1.0, age, 0.03, policy="wait") for age in range(4))
"""Settings whose waiting time is forecast."""
WARM, STEPS, CALIBRATED_STEPS = 2, 8, 16
"""Numbers of train steps: before the measurement, in the measurement, and of a calibrating run."""
ROUNDS, CAPACITY_ROUNDS = 3, 2
"""Numbers of measured runs of each of SETTINGS and of CAPACITY."""
SEEDS = range(101, 105)
"""Seeds of simulated runs. The forecast is their mean, because a run of few steps depends on its seed."""
CALIBRATING_SEED, FIRST_SEED = 1, 21
"""run.seed of the calibrating runs, and of the first measured round."""


def forecast_of(
    setting: Setting, calibration: Calibration, calibration_sleep: float, size: Size, steps: int
) -> dict[str, float]:
    """Return the forecast of a setting: seconds and rates of a step, as means over SEEDS.

    Args:
        setting: the setting.
        calibration: costs and lengths of a calibrating run.
        calibration_sleep: seconds that engines slept before each pass in the calibrating run.
        size: size of a train step.
        steps: number of simulated steps after the warm-up.
    """
    costs = with_more_sleep(calibration.costs(1), setting.sleep - calibration_sleep)
    runs: list[Forecast] = []
    for seed in SEEDS:
        config = config_of(setting, size, Path("simulated"), seed)
        runs.append(
            simulate(
                config, costs, calibration.lengths.truncate(size.longest),
                prompt_tokens=calibration.prompt_tokens, steps=steps, warmup_steps=WARM,
            )
        )  # fmt: skip
    names = (
        "step_seconds",
        "rollout_seconds",
        "train_seconds",
        "push_seconds",
        "tokens_per_s",
        "staleness",
        "dropped",
    )
    return {name: fmean(getattr(run, name) for run in runs) for name in names}


def with_more_sleep(costs: Costs, seconds: float) -> Costs:
    """Return the costs with `seconds` more before each pass; `seconds` may be negative."""
    return replace(costs, pass_overhead=max(0.0, costs.pass_overhead + seconds))


def capacity_of(
    setting: Setting, calibration: Calibration, calibration_sleep: float, size: Size, steps: int
) -> dict[str, float]:
    """Return the seconds of a step, and the seconds of waiting of the trainer: simulated, and by ECHO-2's rule.

    The arguments are those of forecast_of.
    """
    simulated = forecast_of(setting, calibration, calibration_sleep, size, steps)
    return {
        "step_seconds": simulated["step_seconds"], "idle_seconds": simulated["rollout_seconds"],
        **idle_by_rule(setting, calibration, calibration_sleep, size),
    }  # fmt: skip


def idle_by_rule(
    setting: Setting, calibration: Calibration, calibration_sleep: float, size: Size
) -> dict[str, float]:
    """Return the seconds of a step, and of waiting of the trainer, by ECHO-2's rule."""
    config = config_of(setting, size, Path("simulated"), FIRST_SEED)
    costs = with_more_sleep(calibration.costs(1), setting.sleep - calibration_sleep)
    running = config.slots
    demand = step_demand(config, costs, calibration.lengths, running, calibration.prompt_tokens)
    rate = engine_rate(costs, calibration.lengths, running, calibration.prompt_tokens)
    step = demand.step_seconds(rate, setting.max_staleness)
    return {"step_seconds_by_rule": step, "idle_seconds_by_rule": step - demand.busy}


def measured_figures(folder: Path) -> dict[str, float]:
    """Return the means over the steps of a run after the warm-up.

    Args:
        folder: the run folder.
    """
    last_warm_step, *steps = steps_of(folder)[WARM - 1 :]
    seconds = steps[-1]["time"] - last_warm_step["time"]
    return {
        "step_seconds": seconds / len(steps),
        "rollout_seconds": fmean(s["time_rollout"] for s in steps),
        "train_seconds": fmean(s["time_train"] for s in steps),
        "push_seconds": fmean(s["time_sync"] for s in steps),
        "tokens_per_s": sum(s["tokens"] for s in steps) / seconds,
        "staleness": fmean(s["staleness_mean"] for s in steps),
    }


def predict(args: argparse.Namespace, size: Size) -> dict[str, Any]:
    """Make the calibrating runs, and return the content of the forecasts' file."""
    with tempfile.TemporaryDirectory() as name, stage(Path(name), size) as engines:
        calibrations: dict[str, Calibration] = {}
        for kind, setting in CALIBRATING.items():
            say(f"calibrating: {setting.name}")
            run = engines.run(setting, 6 if args.quick else CALIBRATED_STEPS, CALIBRATING_SEED)
            calibration = calibrate(run)
            lengths = next(iter(calibrations.values()), calibration).lengths
            calibrations[kind] = replace(calibration, lengths=lengths)
            say(f"    {calibrations[kind].costs(1)}")
    sleeps = {kind: setting.sleep for kind, setting in CALIBRATING.items()}
    steps = 2 if args.quick else STEPS
    forecasts: dict[str, dict[str, float]] = {}
    for setting in chosen(SETTINGS, args.quick):
        kind = setting.placement
        forecasts[setting.name] = forecast_of(setting, calibrations[kind], sleeps[kind], size, steps)
        say(f"{setting.name}: {forecasts[setting.name]['step_seconds']:.2f} s a step")
    capacity = {
        setting.name: capacity_of(setting, calibrations["capacity"], sleeps["capacity"], size, steps)
        for setting in chosen(CAPACITY, args.quick)
    }
    return {
        "machine": machine(), "size": asdict(size),
        "calibrated_on": {kind: s.name for kind, s in CALIBRATING.items()},
        "costs": {kind: asdict(calibration.costs(1)) for kind, calibration in calibrations.items()},
        "mean_length": calibrations["colocated"].lengths.mean,
        "settings": forecasts, "best": max(forecasts, key=lambda name: forecasts[name]["tokens_per_s"]),
        "capacity": capacity,
    }  # fmt: skip


def chosen(settings: Sequence[Setting], quick: bool) -> Sequence[Setting]:
    """Return all settings, or with `quick` the last one."""
    return settings[-1:] if quick else settings


def measure(args: argparse.Namespace, size: Size) -> dict[str, Any]:
    """Run all settings, and compare them with the saved forecasts. Return the result of the bench.

    Raises:
        SystemExit: the forecasts are for another size.
    """
    predictions = json.loads(args.out.read_text())
    if predictions["size"] != asdict(size):
        sys.exit(f"{args.out}: size = {predictions['size']}; expected {asdict(size)}: run --predict again")
    figures: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name, stage(Path(name), size) as engines:
        for number in range(1 if args.quick else ROUNDS):
            settings = [*chosen(SETTINGS, args.quick)]
            if number < CAPACITY_ROUNDS:
                settings += chosen(CAPACITY, args.quick)
            settings = settings[number * 4 :] + settings[: number * 4]  # no setting is always first
            for setting in settings:
                figures.setdefault(setting.name, []).append(one_run(engines, setting, number, args.quick))
    names = [name for name in figures if name in predictions["settings"]]
    compared = {name: compare(predictions["settings"][name], figures[name]) for name in names}
    capacity = {
        name: compare_idle(predictions["capacity"][name], figures[name])
        for name in figures
        if name in predictions["capacity"]
    }
    return {
        "bench": "plan_check", "quick": args.quick, "machine": machine(), "settings": compared, "capacity": capacity,
        "runs": figures, "summary": summary(compared, capacity, predictions["best"]),
    }  # fmt: skip


def one_run(engines: Stage, setting: Setting, number: int, quick: bool) -> dict[str, float]:
    """Run a setting in the round `number`, whose run.seed is FIRST_SEED plus this number. Return the figures."""
    folder = engines.run(setting, WARM + (2 if quick else STEPS), FIRST_SEED + number)
    figures = measured_figures(folder)
    say(f"round {number + 1}: {setting.name}: " + ", ".join(f"{k} {v:.3g}" for k, v in figures.items()))
    return figures


def compare(forecast: dict[str, float], runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Compare a setting's forecast with its measured runs.

    Returns:
        error: difference of the forecast seconds of a step from the measured median, relative to this median.
        spread: largest minus smallest measured seconds of a step, relative to the median.
        error_of_tokens_per_s: error of the trained tokens per second.
    """
    steps = spread([run["step_seconds"] for run in runs])
    rates = spread([run["tokens_per_s"] for run in runs])
    return {
        "forecast": forecast["step_seconds"], "measured": steps,
        "error": abs(forecast["step_seconds"] / steps["median"] - 1),
        "spread": (steps["max"] - steps["min"]) / steps["median"],
        "forecast_tokens_per_s": forecast["tokens_per_s"], "measured_tokens_per_s": rates,
        "error_of_tokens_per_s": abs(forecast["tokens_per_s"] / rates["median"] - 1),
    }  # fmt: skip


def compare_idle(forecast: dict[str, float], runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Compare the forecast of the trainer's waiting time with the measured runs.

    Returns:
        error: difference of the forecast waiting time from the measured median, relative to this median.
        error_of_step: the same difference, relative to the measured seconds of a step.
        rule_of_measured: seconds of a step by ECHO-2's rule, divided by the measured seconds of a step.
    """
    idle = spread([run["rollout_seconds"] for run in runs])
    step = median(run["step_seconds"] for run in runs)
    difference = abs(forecast["idle_seconds"] - idle["median"])
    return {
        "forecast": forecast["idle_seconds"], "measured": idle, "forecast_step": forecast["step_seconds"],
        "measured_step": step, "error": difference / idle["median"], "error_of_step": difference / step,
        "rule_of_measured": forecast["step_seconds_by_rule"] / step,
    }  # fmt: skip


def summary(compared: dict[str, Any], capacity: dict[str, Any], best: str) -> dict[str, Any]:
    """Return the figures that docs/planning.md requires.

    Args:
        compared: result of `compare` by setting.
        capacity: result of `compare_idle` by setting.
        best: the setting with the most forecast tokens per second.
    """
    errors = [figures["error"] for figures in compared.values()]
    rates = {name: figures["measured_tokens_per_s"]["median"] for name, figures in compared.items()}
    return {
        "median_error": median(errors),
        "largest_error": max(errors),
        "beyond_20_percent_and_spread": [
            name for name, figures in compared.items() if figures["error"] > max(0.2, figures["spread"])
        ],
        "median_error_of_tokens_per_s": median(
            figures["error_of_tokens_per_s"] for figures in compared.values()
        ),
        "chosen": best,
        "chosen_of_best": rates[best] / max(rates.values()),
        "largest_error_of_idle_seconds": max(figures["error"] for figures in capacity.values()),
        "rule_of_measured_step": [figures["rule_of_measured"] for figures in capacity.values()],
        "largest_error_of_idle_share": max(figures["error_of_step"] for figures in capacity.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    part = parser.add_mutually_exclusive_group(required=True)
    part.add_argument(
        "--predict", action="store_true", help="make the calibrating runs, and write the forecasts"
    )
    part.add_argument(
        "--measure", action="store_true", help="run the settings, and compare them with the forecasts"
    )
    parser.add_argument(
        "--out", type=Path, default=FILE, help="file of the forecasts (default: bench/predictions/plan.json)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one setting, few steps: checks only that the bench runs"
    )
    args = parser.parse_args()
    if args.measure and not args.out.exists():
        parser.error(f"--out {args.out}: no such file; expected the forecasts that --predict writes")
    logging.getLogger("rlsys").setLevel(logging.ERROR)  # warnings of simulated runs are irrelevant
    size = Size(groups=4, group=2, longest=32) if args.quick else Size()
    if args.predict:
        result = predict(args, size)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    else:
        result = measure(args, size)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
