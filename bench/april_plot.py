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
    """Draw one panel per cost: tokens per second of each mode, medians with the range of the repeats."""
    costs = result["costs"]
    figure = Figure(figsize=(4.8 * len(costs), 3.8), layout="constrained")
    for axes, cost in zip(figure.subplots(1, len(costs), squeeze=False)[0], costs, strict=True):
        bars(axes, costs[cost])
        axes.set_title(f"{cost}: {TITLES[cost]}", fontsize=10)
    figure.suptitle(
        f"Trained tokens per second, {result['batch']} samples a step; "
        f"response: mean {result['true_mean_length']:.0f}, longest {result['longest']} tokens",
        fontsize=11,
    )
    return figure


def bars(axes: Axes, modes: dict[str, Any]) -> None:
    rates = [modes[name]["trained_tokens_per_s"] for name in modes]
    medians = [r["median"] for r in rates]
    spans = [[r["median"] - r["min"] for r in rates], [r["max"] - r["median"] for r in rates]]
    containers = axes.barh(
        list(modes), medians, xerr=spans, capsize=3, color=[COLOURS.get(name, APRIL) for name in modes]
    )
    bound = modes.get("saturated", {"trained_tokens_per_s": {"median": max(medians)}})
    saturated = bound["trained_tokens_per_s"]["median"]
    axes.bar_label(containers, [f" {m:.0f} ({m / saturated:.0%})" for m in medians], fontsize=8, padding=3)
    axes.axvline(saturated, color=COLOURS["saturated"], linewidth=1, linestyle="--")
    axes.set_xlim(0, 1.35 * max(medians))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="output of `bench/april.py --json`")
    parser.add_argument("figure", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.result.read_text())).savefig(args.figure, dpi=150)


if __name__ == "__main__":
    main()
