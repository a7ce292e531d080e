"""Generate the measured parts of examples/recipes/**/README.md.

These are the text between two marker comments, and the learning curves as SVG.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from measure import ROOT

from tests.gate.reference import RECIPES_PAGE, recipes_page

FOLDER = ROOT / "examples" / "recipes"
BEGIN, END = "<!-- figures: python bench/recipes.py --record -->", "<!-- end of figures -->"
KEYS = ("base", "start", "end")
UNKNOWN = "not yet measured"
PICTURE = "curve.svg"
GAINS = {
    "shown": "These seeds show a gain by RL.",
    "no gain shown": "These seeds show no gain by RL.",
    UNKNOWN: "The gain by RL is not yet measured.",
}
"""Value of `gain` in expected.json -> sentence."""


def names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(path.parent.name for path in FOLDER.glob("*/recipe.yaml"))


def curve_lines(curve: Sequence[Sequence[float]]) -> list[str]:
    """Return a learning curve as text, one line for each evaluation."""
    return [f"  step {step:>4}  {value:6.3f}  {'#' * round(40 * value)}" for step, value in curve]


def expected_figures(name: str) -> dict[str, Any]:
    """Return the content of a recipe's expected.json, or an empty dict if there is none."""
    path = FOLDER / name / "expected.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def cell(figures: Mapping[str, Any], key: str) -> str:
    """Return the mean and the interval of a score as text.

    Args:
        figures: one form of a recipe's expected.json; empty if nothing is recorded.
        key: the score.
    """
    if key not in figures:
        return "" if figures else UNKNOWN
    mean, interval = figures[key]["mean"], figures[key]["interval"]
    return f"{mean:.3f} ({interval[0]:.3f} to {interval[1]:.3f})" if interval else f"{mean:.3f}"


def index_lines() -> Iterator[str]:
    """Yield the table of all recipes, with the figures of their full forms."""
    yield "| recipe | example of | model | score | base | before RL | after RL | seeds | gain by RL |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in names():
        recipe = yaml.safe_load((FOLDER / name / "recipe.yaml").read_text(encoding="utf-8"))
        figures = expected_figures(name).get("full", {})
        cells = [
            f"[{name}]({name}/README.md)", recipe["peer"], recipe["model"], recipe["score"],
            *(cell(figures, key) for key in KEYS), str(len(figures.get("seeds", ()))), figures.get("gain", UNKNOWN),
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def recipe_lines(expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a recipe's README.md: a row for each run, the intervals, and the learning curve.

    Args:
        expected: content of the recipe's expected.json; empty if nothing is recorded.
    """
    forms = {form: expected[form] for form in ("full", "short") if form in expected}
    if not forms:
        yield f"{UNKNOWN.capitalize()}."
        return
    yield "| form | run.seed | base | before RL | after RL | wall seconds | CPU seconds |"
    yield "|---|---|---|---|---|---|---|"
    for form, figures in forms.items():
        for seed, run in figures["seeds"].items():
            scores = [f"{run[key]:.3f}" if key in run else "" for key in KEYS]
            sums = [
                f"{sum(stage[key] for stage in run['stages'].values()):.0f}"
                for key in ("wall_seconds", "cpu_seconds")
            ]
            yield f"| {' | '.join([form, seed, *scores, *sums])} |"
    for form, figures in forms.items():
        yield ""
        yield f"The {form} form reports the {figures['score']} on {figures['prompts']} held-out prompts."
        yield from result_sentences(figures)
    if "full" in forms:
        yield ""
        yield f"![learning curve]({PICTURE})"


def result_sentences(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about the score after RL and the gain.

    Args:
        figures: one form of a recipe's expected.json.
    """
    end, count = figures["end"], len(figures["seeds"])
    if end["interval"]:
        (low, high), (lowest, highest) = end["interval"], end["range"]
        yield f"After RL, the mean of {count} seeds is {end['mean']:.3f} (95 % interval {low:.3f} to {high:.3f})."
        yield f"The prediction interval of one more run is {lowest:.3f} to {highest:.3f}."
    else:
        yield f"The number of seeds is {count}; an interval needs at least five."
    yield GAINS[figures["gain"]]


def replace_figures(path: Path, lines: Sequence[str]) -> str:
    """Return the text of a page with `lines` between the two marker comments."""
    prefix, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, suffix = rest.partition(END)
    return "\n".join([prefix + BEGIN, *lines, END + suffix])


def pages() -> dict[Path, str]:
    """Return the text of each page with the recorded figures, by path."""
    texts = {FOLDER / "README.md": replace_figures(FOLDER / "README.md", list(index_lines()))}
    for name in names():
        path = FOLDER / name / "README.md"
        texts[path] = replace_figures(path, list(recipe_lines(expected_figures(name))))
    return texts


def write_pages() -> None:
    """Write the pages, the learning curves, and docs/recipes.md, which contains the table of all recipes, too."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    RECIPES_PAGE.write_text(recipes_page(), encoding="utf-8")
    for name in names():
        if figures := expected_figures(name).get("full"):
            draw(figures, FOLDER / name / PICTURE)


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Draw the learning curves of all seeds into an SVG file. Equal figures give a byte-equal file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "recipes", "svg.fonttype": "none"}):
        figure = Figure(figsize=(5, 3), layout="tight")
        axes = figure.subplots()
        for seed, run in figures["seeds"].items():
            axes.plot(*zip(*run["curve"], strict=True), marker="o", label=f"seed {seed}")
        axes.set(xlabel="train step", ylabel=f"{figures['score']}, held out")
        axes.legend()
        figure.savefig(path, metadata={"Date": None})
