"""Measure the recipes of examples/recipes, and compare their scores with the recorded ranges.

    python bench/recipes.py [NAME ...] [--seeds 0 1 2 3 4] [--short] [--model FOLDER] [--out FOLDER]
    python bench/recipes.py [NAME ...] --record
    python bench/recipes.py --turn COMMIT --short

A recipe is a folder with recipe.yaml, data.py, sft.yaml (optional), rl.yaml, eval.yaml and expected.json. One run
writes the data and the model, evaluates the model (full form, before a warm start), and runs sft.yaml and rl.yaml
with `run.seed`. OUT/NAME/FORM-SEED has the run folders, and record.json when the run is complete. The same command
continues after a kill: finished records and stages are not run again, and a run folder continues from its checkpoint.

`--short` has fewer steps (`short` of recipe.yaml) and its own recorded range. `--record` writes the scores, curves
and seconds of all finished records into expected.json, and updates the pages. It keeps the seeds of expected.json,
unless the recipe's settings have changed since they were recorded; so seeds can be measured on several days. `--turn`
selects one of the recipes whose short form needs no package and has a range; the commit's hash determines which one.
`--model` runs a recipe with another model, and compares its figures with the recorded ones of the recipe's model.

    score       accuracy or mean reward on the held-out prompts: `base` of the published model, `start` before RL,
                `end` after RL
    interval    95 % interval of the mean by Student's t, over five seeds or more
    signals     means of training metrics over the first and over the last quarter of the RL steps
    range       interval of `end` for one more run: Student's prediction interval, at least as wide as Wilson's
                interval for the number of prompts

The exit code is 1 if a score is below its range (the bench then prints the curve) or if a stage failed, and 2 if a
package, a recipe or a file is missing or different.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import yaml
from april_claim import T_975, interval
from measure import ROOT, machine, say
from recipe_comparison import comparison_lines, signals
from recipe_pages import FOLDER, curve_lines, names, write_pages

from launch.environment import CPU_HOST
from rlsys.config import load_config
from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.evaluation.pass_at_k import wilson
from rlsys.obs.metrics import read_metrics

RUNS = "runs/recipes/"
"""Prefix of the paths in the recipes' configs that this bench replaces with OUT."""


class Model(NamedTuple):
    """A model of recipes.

    Attributes:
        path: the model's folder in the recipes' configs.
        program: program that writes the model; None if the model is in the repository.
        package: whether the program needs a Python package.
    """

    path: str
    program: str | None = None
    package: bool = False


MODELS = {
    "smollm2": Model(RUNS + "models/SmolLM2-135M-Instruct", "examples/recipes/smollm2.py", package=True),
    "quickstart": Model("configs/models/quickstart-moe"),
    "tools": Model(RUNS + "models/quickstart-tools", "examples/tools/model.py"),
}
"""Models, by the value of `model` in recipe.yaml."""
FORMS = ("full", "short")
MIN_SEEDS = 5
"""Smallest number of seeds with an interval."""
GRACE = 60
"""Seconds that a stage has to save a checkpoint when this bench is stopped."""
DIGITS = 4
"""Decimal places of scores."""


@dataclass(frozen=True)
class Recipe:
    """A recipe's settings.

    Attributes:
        folder: the recipe's folder.
        model: key of MODELS.
        score: metric of an `eval` line of metrics.jsonl.
        data: SHA-256 of each data file, by name.
        short: overrides of each stage in the short form.
    """

    folder: Path
    model: str
    score: str
    data: Mapping[str, str]
    short: Mapping[str, list[str]]

    @classmethod
    def read(cls, name: str) -> Recipe:
        """Read NAME/recipe.yaml.

        Raises:
            UserError: there is no such recipe.
        """
        if name not in names():
            raise UserError(f"{name}: no such recipe; expected one of {', '.join(names())}")
        fields = yaml.safe_load((FOLDER / name / "recipe.yaml").read_text(encoding="utf-8"))
        return cls(FOLDER / name, fields["model"], fields["score"], fields.get("data", {}), fields["short"])

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def digest(self) -> str:
        """Return the SHA-256 of everything that a score depends on: data, reward, model and settings."""
        digest = hashlib.sha256()
        files = ("recipe.yaml", "data.py", "reward.py", "sft.yaml", "rl.yaml", "eval.yaml")
        for path in [self.folder / name for name in files if (self.folder / name).is_file()]:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
        return digest.hexdigest()

    @property
    def stages(self) -> tuple[str, ...]:
        return ("sft", "rl") if (self.folder / "sft.yaml").is_file() else ("rl",)

    def expected(self, form: str) -> dict[str, Any]:
        """Return the recorded figures of these settings, or an empty dict if there are none."""
        path = self.folder / "expected.json"
        figures = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return dict(figures.get(form, {})) if figures.get("digest") == self.digest else {}


@dataclass(frozen=True)
class Place:
    """The location of one run of a recipe.

    Attributes:
        out: folder of data, models and runs (`--out`).
        form: one of FORMS.
        seed: run.seed.
        model: folder of `--model`; None: the recipe's own model.
    """

    out: Path
    recipe: Recipe
    form: str
    seed: int
    model: Path | None = None

    @property
    def folder(self) -> Path:
        suffix = f"-{self.model.name}" if self.model else ""
        return self.out / self.recipe.name / f"{self.form}-{self.seed}{suffix}"

    @property
    def base(self) -> Path:
        """Return the folder of the untrained model's evaluation, which is the same for all seeds."""
        return self.out / self.recipe.name / f"base-{self.model.name if self.model else self.recipe.model}"

    @property
    def record(self) -> Path:
        return self.folder / "record.json"

    @property
    def model_folder(self) -> Path:
        return self.model or self.moved(MODELS[self.recipe.model].path)

    def moved(self, path: str) -> Path:
        """Return where this run has a file that the recipe's configs name `path`; all runs share data and models."""
        if not path.startswith(RUNS):
            return ROOT / path
        first, _, rest = path.removeprefix(RUNS).partition("/")
        shared = first == "models" or rest.partition("/")[0] == "data"
        return self.out / first / rest if shared else self.folder / rest

    def overrides(self, stage: str) -> list[str]:
        """Return the overrides of a stage's config that set the paths, the seed and the form of this run."""
        config = yaml.safe_load((self.recipe.folder / f"{stage}.yaml").read_text(encoding="utf-8"))
        model_path = MODELS[self.recipe.model].path
        lines = [
            f"{field}={self.model_folder if value == model_path else self.moved(value)}"
            for field, value in paths(config)
            if value == model_path or value.startswith(RUNS)
        ]
        short = self.recipe.short.get(stage, []) if self.form == "short" else []
        return [*lines, f"run.seed={self.seed}", *short]


def paths(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (field, value) for each text in nested sections of a config, such as ("run.dir", "runs/x").

    Texts in lists are left out.
    """
    for key, value in config.items():
        if isinstance(value, str):
            yield prefix + key, value
        elif isinstance(value, dict):
            yield from paths(value, f"{prefix}{key}.")


def command(argv: Sequence[str], log: Path) -> dict[str, float]:
    """Run a command of this Python to its end, and append its output to `log`.

    A keeper ends the command even if this process is killed.

    Returns:
        wall seconds, and CPU seconds of the command and all its descendants.

    Raises:
        UserError: the command's exit code is 2; the message is its error.
        RunError: the exit code is neither 0 nor 2.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start, used = time.monotonic(), cpu_seconds()
    keeper = [sys.executable, "-m", "launch.keeper", "--grace", f"{GRACE}", "--", sys.executable]
    with (
        log.open("ab") as out,
        subprocess.Popen(
            [*keeper, *argv], cwd=ROOT, env={**os.environ, **CPU_HOST, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            process.wait()
        finally:
            process.communicate()  # closes the keeper's input, so that it ends the command
    if process.returncode == 2:
        raise UserError(error_of(log).rpartition("error: ")[2])
    if process.returncode:
        raise RunError(f"{log}: exit code {process.returncode}: {error_of(log)}")
    return {
        "wall_seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(cpu_seconds() - used, 1),
    }


def error_of(log: Path) -> str:
    """Return the last line of a log with `error: `; without such a line the last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
    return next((line for line in reversed(lines) if "error: " in line.lower()), lines[-1])


def cpu_seconds() -> float:
    """Return the CPU seconds of all descendants that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file completely or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def prepare(place: Place) -> None:
    """Write the data and the model of a run, unless they exist.

    Raises:
        UserError: a package or the folder of `--model` is missing, or data have other digests than recipe.yaml.
    """
    recipe, log = place.recipe, place.out / "prepare.log"
    program = MODELS[recipe.model].program
    if not place.model and program and not place.model_folder.is_dir():
        command([program, str(place.model_folder)], log)
    if not place.model_folder.is_dir():
        raise UserError(f"--model {place.model_folder}: no such folder; expected a Hugging Face folder")
    folder = place.out / recipe.name / "data"
    if recipe.data and not all((folder / name).is_file() for name in recipe.data):
        command([str(recipe.folder / "data.py"), str(folder)], log)
    for name, digest in recipe.data.items():
        actual = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if actual != digest:
            raise UserError(f"{folder / name}: sha256 is {actual}; expected {digest} (recipe.yaml)")


def run_stage(stage: str, place: Place) -> dict[str, Any]:
    """Run or continue a stage, unless it is complete.

    Returns:
        wall_seconds and cpu_seconds; with `resumed`, they exclude the time before a kill.
    """
    seconds_file, run = place.folder / f"{stage}.json", place.folder / stage
    if seconds_file.is_file():
        return dict(json.loads(seconds_file.read_text(encoding="utf-8")))
    resumed = run.is_dir()
    word, config = ("sft" if stage == "sft" else "train"), str(place.recipe.folder / f"{stage}.yaml")
    say(f"{place.folder}: {stage}{' continues' if resumed else ''} (progress: {stage}.log)")
    seconds: dict[str, Any] = command(
        ["-m", "rlsys.cli.main", word, config, *place.overrides(stage)], place.folder / f"{stage}.log"
    )
    seconds |= {"resumed": True} if resumed else {}
    write_json(seconds_file, seconds)
    return seconds


def base_score(place: Place) -> dict[str, Any]:
    """Evaluate the untrained model, unless another seed has done so.

    Returns:
        `eval`, the figures of the evaluation, and the seconds.
    """
    score_file = place.base / "score.json"
    if not score_file.is_file():
        say(f"{place.base}: eval")
        lines = [line for line in place.overrides("eval") if not line.startswith("run.")]
        seconds = command(
            [
                "-m", "rlsys.cli.main", "eval", str(place.recipe.folder / "eval.yaml"),
                *rl_paths(place), *lines, f"run.dir={place.base}",
            ],
            place.base / "eval.log",
        )  # fmt: skip
        newest = max((place.base / "evaluations").iterdir(), key=lambda path: path.stat().st_mtime)
        entry = read_metrics(newest).evals[-1]
        write_json(
            score_file, {"eval": {k: v for k, v in entry.items() if isinstance(v, int | float)}, **seconds}
        )
    return dict(json.loads(score_file.read_text(encoding="utf-8")))


def rl_paths(place: Place) -> list[str]:
    """Return the overrides of the data fields of rl.yaml, the base of eval.yaml."""
    return [line for line in place.overrides("rl") if line.startswith("data.")]


def run(place: Place) -> dict[str, Any]:
    """Return the record of a run. If there is none, make the run first."""
    if place.record.is_file():
        return dict(json.loads(place.record.read_text(encoding="utf-8")))
    prepare(place)
    recipe = place.recipe
    scores: dict[str, float] = {}
    stages: dict[str, Any] = {}
    if "sft" in recipe.stages and place.form == "full":
        base = base_score(place)
        scores["base"] = base["eval"][recipe.score]
        stages["base"] = {key: base[key] for key in ("wall_seconds", "cpu_seconds")}
    for stage in recipe.stages:
        stages[stage] = run_stage(stage, place)
    metrics = read_metrics(place.folder / "rl")
    curve = [[e["step"], round(e[recipe.score], DIGITS)] for e in metrics.evals]
    record = {
        "recipe": recipe.name, "form": place.form, "seed": place.seed, "model": place.model_folder.name,
        "digest": recipe.digest, "score": recipe.score, "prompts": metrics.evals[-1]["prompts"],
        **scores, "start": curve[0][1], "end": curve[-1][1], "curve": curve,
        "rewards": [round(s["reward"], DIGITS) for s in metrics.steps], "signals": signals(metrics.steps),
        "groups": load_config(recipe.folder / "rl.yaml", place.overrides("rl")).rollout.groups_per_step,
        "warnings": [{key: w[key] for key in ("step", "name", "seen", "knob")} for w in metrics.warnings],
        "stages": stages, "machine": machine(),
    }  # fmt: skip
    write_json(place.record, record)
    for stage in recipe.stages:  # checkpoints have gigabytes, and a complete run does not need them
        shutil.rmtree(place.folder / stage / "checkpoints", ignore_errors=True)
    return record


def prediction(values: Sequence[float], prompts: int) -> list[float]:
    """Return the range of the score of one more run.

    The range is the 95 % prediction interval by Student's t, at least as wide as Wilson's interval.

    Args:
        values: scores of runs, between 0 and 1.
        prompts: number of prompts of a score.
    """
    n, middle = len(values), mean(values)
    half = T_975[n - 2] * stdev(values) * (1 + 1 / n) ** 0.5
    low, high = wilson(middle, prompts)
    return [
        round(max(0.0, min(low, middle - half)), DIGITS),
        round(min(1.0, max(high, middle + half)), DIGITS),
    ]


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of expected.json for the records of one form.

    With fewer than MIN_SEEDS records, intervals and range are None.
    """
    figures: dict[str, Any] = {}
    for key in ("base", "start", "end"):
        values = [r[key] for r in records if key in r]
        if not values:
            continue
        enough = MIN_SEEDS <= len(values) <= len(T_975) + 1
        bounds = interval(values) if enough else None
        figures[key] = {
            "mean": round(mean(values), DIGITS),
            "interval": [round(x, DIGITS) for x in bounds] if bounds else None,
        }
        if key == "end":
            figures[key]["range"] = prediction(values, records[0]["prompts"]) if enough else None
    start, end = figures["start"]["interval"], figures["end"]["interval"]
    figures["gain"] = "not yet measured" if not start else "shown" if end[0] > start[1] else "no gain shown"
    keys = ("base", "start", "end", "curve", "signals", "stages", "warnings", "machine")
    figures["seeds"] = {str(r["seed"]): {k: r[k] for k in keys if k in r} for r in records}
    return figures


def write_expected(recipe: Recipe, out: Path) -> None:
    """Write the figures of all records of the recipe's own model into expected.json.

    Seeds of expected.json without a record are kept. Records and seeds of other settings are dropped.
    """
    files = sorted((out / recipe.name).glob("*/record.json"))
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    model_name = Path(MODELS[recipe.model].path).name
    forms = {}
    for form in FORMS:
        previous = recipe.expected(form)
        by_seed = {
            int(seed): {"seed": int(seed), "prompts": previous["prompts"], **figures}
            for seed, figures in previous.get("seeds", {}).items()
        }
        by_seed |= {
            r["seed"]: r
            for r in records
            if (r["form"], r["model"], r["digest"]) == (form, model_name, recipe.digest)
        }
        if by_seed:
            figures = summary([by_seed[seed] for seed in sorted(by_seed)])
            prompts = next(iter(by_seed.values()))["prompts"]
            forms[form] = {"score": recipe.score, "prompts": prompts, **figures}
    if forms:
        write_json(recipe.folder / "expected.json", {"model": model_name, "digest": recipe.digest, **forms})
    counts = ", ".join(f"{len(figures['seeds'])} seeds {form}" for form, figures in forms.items())
    say(f"{recipe.name}: {counts or 'no record'}")


def regression(record: Mapping[str, Any], expected: Mapping[str, Any], own_model: bool) -> bool:
    """Print the result of a record. Return whether the score is below the recorded range.

    Args:
        record: the record.
        expected: one form of the recipe's expected.json; empty if nothing is recorded.
        own_model: whether the run used the recipe's own model; another model has no range.
    """
    title = (
        f"{record['recipe']} {record['form']} seed {record['seed']}: {record['score']} {record['end']:.3f}"
    )
    bounds = expected.get("end", {}).get("range")
    if not own_model:
        print(f"{title} with {record['model']}: no regression is judged for another model")
        print("\n".join([*curve_lines(record["curve"]), *comparison_lines(record, expected)]))
        return False
    if not bounds:
        print(f"{title}; no range recorded: not yet measured")
        return False
    low, high = bounds
    if record["end"] >= low:
        print(f"{title}, {'within' if record['end'] <= high else 'above'} {low:.3f} to {high:.3f}")
        return False
    print(f"{title}, REGRESSION: expected {low:.3f} to {high:.3f}")
    print("\n".join(curve_lines(record["curve"])))
    return True


def turn(commit: str, candidates: Sequence[str]) -> list[str]:
    """Return the candidate that the commit's hash selects, as a list; an empty list without candidates."""
    return [candidates[int(commit, 16) % len(candidates)]] if candidates else []


def without_package() -> list[str]:
    """Return the names of the recipes that need no package and whose short form has a range."""
    recipes = map(Recipe.read, names())
    return [
        r.name
        for r in recipes
        if not MODELS[r.model].package and r.expected("short").get("end", {}).get("range")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="values of run.seed (default: 0)")
    parser.add_argument("--short", action="store_true", help="the short form")
    parser.add_argument("--model", type=Path, help="Hugging Face folder instead of the recipe's model")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "recipes", help="folder of data, models and runs"
    )
    parser.add_argument("--record", action="store_true", help="write expected.json from the finished records")
    parser.add_argument(
        "--turn",
        metavar="COMMIT",
        help="only the recipe that this commit's hash selects, among those without a package",
    )
    args = parser.parse_args()
    out, form = args.out.resolve(), FORMS[args.short]
    model = args.model and args.model.resolve()
    code, regressions = 0, 0
    try:
        selected = [
            Recipe.read(name)
            for name in (turn(args.turn, without_package()) if args.turn else args.names or names())
        ]
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    if not selected:
        print("no recipe that needs no package has a recorded range of its short form: nothing to compare")
    for recipe in selected:
        if args.record:
            write_expected(recipe, out)
            continue
        try:
            for seed in args.seeds:
                record = run(Place(out, recipe, form, seed, model))
                regressions += regression(record, recipe.expected(form), own_model=model is None)
        except RlsysError as e:  # a failed recipe does not stop the others
            print(f"error: {recipe.name}: {e}", file=sys.stderr)
            code = max(code, e.exit_code)
    if args.record:
        write_pages()
    return 1 if regressions else code


if __name__ == "__main__":
    sys.exit(main())
