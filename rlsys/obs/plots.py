"""Plots of a report, with one function per figure. matplotlib draws them without a display."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rlsys.obs.metrics import MISMATCH_EDGES, Metrics, merge_counts

BLUE, ORANGE, GREEN, GREY, PURPLE = "#2563eb", "#ea580c", "#059669", "#9ca3af", "#7c3aed"
_SIZE = (6.4, 3.6)
_SMOOTH = 5


def reward(metrics: Metrics) -> Figure:
    """Plot the mean reward per step."""
    figure, axes = _frame("Reward of the trained samples", "mean reward")
    steps, values = _series(metrics.steps, "reward")
    axes.plot(steps, values, color=BLUE, alpha=0.35, linewidth=1, label="step")
    axes.plot(steps, _running_mean(values), color=BLUE, linewidth=2, label=f"mean of {_SMOOTH} steps")
    _legend(axes)
    return figure


def accuracy(metrics: Metrics) -> Figure:
    """Plot the accuracy of evaluations."""
    figure, axes = _frame("Held-out accuracy (greedy)", "accuracy")
    steps, values = _series(metrics.evals, "accuracy")
    axes.plot(steps, values, color=GREEN, linewidth=2, marker="o", markersize=5)
    for i in {0, len(values) - 1} if values else ():
        axes.annotate(
            f"{values[i]:.2f}", (steps[i], values[i]), textcoords="offset points", xytext=(0, 8),
            ha="center", color=GREEN, fontweight="bold",
        )  # fmt: skip
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def lengths(metrics: Metrics) -> Figure:
    """Plot mean, median, 99th percentile and maximum of the lengths of trained responses."""
    figure, axes = _frame("Length of trained responses", "tokens")
    for key, colour, label in (
        ("response_len_max", GREY, "max"),
        ("response_len_p99", ORANGE, "p99"),
        ("response_len_mean", PURPLE, "mean"),
        ("response_len_p50", BLUE, "p50"),
    ):
        axes.plot(*_series(metrics.steps, key), color=colour, linewidth=1.8, label=label)
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def staleness(metrics: Metrics) -> Figure:
    """Plot mean and maximum staleness, and the share of off-policy tokens."""
    figure, axes = _frame("Staleness and off-policy tokens", "train steps")
    axes.plot(*_series(metrics.steps, "staleness_max"), color=GREY, linewidth=1.5, label="staleness, max")
    axes.plot(*_series(metrics.steps, "staleness_mean"), color=BLUE, linewidth=1.8, label="staleness, mean")
    axes.set_ylim(bottom=0)
    share = axes.twinx()
    steps, values = _series(metrics.steps, "off_policy_share")
    share.fill_between(steps, values, color=ORANGE, alpha=0.25, linewidth=0, label="off-policy tokens")
    share.set_ylim(0, 1)
    share.set_ylabel("share of trained tokens", color=ORANGE)
    share.yaxis.set_major_formatter(PercentFormatter(1.0))
    share.spines[["top", "left"]].set_visible(False)
    axes.set_zorder(share.get_zorder() + 1)
    axes.patch.set_visible(False)
    handles = [h for a in (axes, share) for h in a.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, framealpha=0.8, edgecolor="none", fontsize=9)
    return figure


def time_split(metrics: Metrics) -> Figure:
    """Plot the duration of a step by phase."""
    figure, axes = _frame("Time per step by phase", "seconds")
    colours = {"rollout": BLUE, "train": PURPLE, "sync": ORANGE}
    complete = [s for s in metrics.steps if all(s.get(f"time_{part}") is not None for part in colours)]
    axes.stackplot(
        [s["step"] for s in complete],
        *([s[f"time_{part}"] for s in complete] for part in colours),
        colors=list(colours.values()), labels=list(colours), alpha=0.85,
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def mismatch(metrics: Metrics) -> Figure:
    """Plot the histogram of |logp - mu| over the whole run. Its first bin includes differences of 0."""
    title = "Trainer vs. engine, tokens of the current weight version"
    figure, axes = _frame(title, "tokens", "|logp - mu| (nats)")
    counts = merge_counts(s["mismatch_hist"] for s in metrics.steps if s.get("mismatch_hist"))
    if any(counts):
        axes.stairs(counts, MISMATCH_EDGES, fill=True, color=BLUE, alpha=0.8)
        nonempty = [i for i, count in enumerate(counts) if count]
        axes.set_xlim(MISMATCH_EDGES[nonempty[0]] / 2, MISMATCH_EDGES[nonempty[-1] + 1] * 2)
        axes.set_yscale("log")
    axes.set_xscale("log")
    return figure


FIGURES: dict[str, Callable[[Metrics], Figure]] = {
    "reward": reward,
    "accuracy": accuracy,
    "lengths": lengths,
    "staleness": staleness,
    "time_split": time_split,
    "mismatch": mismatch,
}


def _frame(title: str, ylabel: str, xlabel: str = "train step") -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=12, fontweight="bold", loc="left")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if xlabel == "train step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _legend(axes: Axes) -> None:
    axes.legend(framealpha=0.8, edgecolor="none", fontsize=9)


def _series(entries: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return the steps of the entries, and their values of `key`; NaN, which interrupts a line, if one is missing."""
    steps = [int(e["step"]) for e in entries]
    return steps, [math.nan if e.get(key) is None else float(e[key]) for e in entries]


def _running_mean(values: list[float]) -> list[float]:
    """Return for each value the mean of the last _SMOOTH values up to it, without NaNs."""
    means = []
    for end in range(1, len(values) + 1):
        window = [v for v in values[max(0, end - _SMOOTH) : end] if not math.isnan(v)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means
