"""Draw a result of bench/april.py: `python bench/april_plot.py RESULT.json FIGURE.png`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

TITLES = {"gpu-like": "a fixed time per forward pass", "cpu": "the raw CPU engine"}
COLOURS = {
    "saturated": "#9ca3af",
    "synchronous": "#ea580c",
    "synchronous-2N": "#ea580c",
    "asynchronous": "#7c3aed",
}
APRIL = "#2563eb"


def draw(result: dict[str, Any]) -> Figure:
    """Return a figure with one panel for each cost of a forward pass (`cpu`, `gpu-like`).

    A panel shows the trained tokens per second of each mode: the median, and the range of the repeats.

    Args:
        result: output of `bench/april.py --json`.
    """
    costs = result["costs"]
    figure = Figure(figsize=(4.8 * len(costs), 3.8), layout="constrained")
    for axes, cost in zip(figure.subplots(1, len(costs), squeeze=False)[0], costs, strict=True):
        draw_bars(axes, costs[cost])
        axes.set_title(f"{cost}: {TITLES[cost]}", fontsize=10)
    figure.suptitle(
        f"Trained tokens per second, {result['batch']} samples a step; "
        f"response: mean {result['true_mean_length']:.0f}, longest {result['longest']} tokens",
        fontsize=11,
    )
    return figure


def draw_bars(axes: Axes, modes: dict[str, Any]) -> None:
    """Draw a bar for each mode, labelled with its rate and its share of the rate of `saturated`.

    Without the mode `saturated`, the largest rate takes its place.
    """
    rates = [modes[name]["trained_tokens_per_s"] for name in modes]
    medians = [rate["median"] for rate in rates]
    ranges = [
        [rate["median"] - rate["min"] for rate in rates],
        [rate["max"] - rate["median"] for rate in rates],
    ]
    bars = axes.barh(
        list(modes), medians, xerr=ranges, capsize=3, color=[COLOURS.get(name, APRIL) for name in modes]
    )
    saturated = modes["saturated"]["trained_tokens_per_s"]["median"] if "saturated" in modes else max(medians)
    axes.bar_label(bars, [f" {m:.0f} ({m / saturated:.0%})" for m in medians], fontsize=8, padding=3)
    axes.axvline(saturated, color=COLOURS["saturated"], linewidth=1, linestyle="--")
    axes.set_xlim(0, 1.35 * max(medians))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="output of `bench/april.py --json`")
    parser.add_argument("figure", type=Path, help="image file to write")
    args = parser.parse_args()
    draw(json.loads(args.result.read_text())).savefig(args.figure, dpi=150)


if __name__ == "__main__":
    main()
