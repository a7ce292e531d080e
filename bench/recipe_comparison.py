"""Compare a recipe's run with another model to the recorded runs of the recipe's own model.

The scores alone do not explain why another model ends higher or lower. `comparison_lines` also compares the scores
before training and after the warm start, the groups with a gradient, the truncated responses and the entropy, and
lists the run's warnings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

SIGNALS = {
    "reward": "reward in training",
    "effective_groups": "groups with a gradient, a step",
    "truncated_share": "share of truncated responses",
    "response_len_mean": "tokens of a response",
    "sampled_entropy": "entropy of a token, nats",
    "grad_norm": "gradient norm",
}
"""Title of each compared metric of a step."""
SCORES = {"base": "the published model", "start": "before RL", "end": "after RL"}
"""Title of each score of a record."""
FEW_GROUPS = 0.25
"""Share of groups with a gradient below which most samples do not contribute to training."""
MANY_TRUNCATED = 0.25
"""Share of truncated responses above which `explain` reports them."""
COLLAPSED = 0.1
"""Ratio of the final to the initial entropy below which the entropy has collapsed."""
DIGITS = 4
"""Decimal places of the signals."""


def signals(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the means of each signal over the first and over the last quarter of the steps.

    A signal that is missing in a step is left out.
    """
    quarter = max(1, len(steps) // 4)
    return {
        name: [round(mean(s[name] for s in part), DIGITS) for part in (steps[:quarter], steps[-quarter:])]
        for name in SIGNALS
        if steps and all(name in step for step in steps)
    }


def comparison_lines(record: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the comparison: a table, then explanations.

    Args:
        record: record of the run with the other model (`run` in recipes.py).
        expected: one form of the recipe's expected.json; empty if nothing is recorded.
    """
    recorded_runs = list(expected.get("seeds", {}).values())
    yield f"| | {record['model']} | the recipe's model, {len(recorded_runs)} runs |"
    yield "|---|---|---|"
    for key, title in SCORES.items():
        if key in record:
            scores = [run[key] for run in recorded_runs if key in run]
            yield (
                f"| {record['score']}, {title} | {record[key]:.3f} | {mean(scores):.3f} |"
                if scores
                else (f"| {record['score']}, {title} | {record[key]:.3f} | not yet measured |")
            )
    for name, (first, last) in record["signals"].items():
        runs = [run["signals"][name] for run in recorded_runs if name in run.get("signals", {})]
        recorded = " -> ".join(f"{mean(run[i] for run in runs):.3g}" for i in (0, 1)) if runs else ""
        yield f"| {SIGNALS[name]}, first -> last quarter of the steps | {first:.3g} -> {last:.3g} | {recorded} |"
    explanations = list(explain(record))
    yield from explanations or ["Nothing in this run's signals explains a difference."]


def explain(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each reason for the run's score that its figures suggest.

    Reasons are a warm start without effect, few groups with a gradient, truncated responses, a collapsed entropy, a
    lower score after RL, and the run's warnings.
    """
    figures, score = record["signals"], record["score"]
    if "base" in record and record["start"] <= record["base"]:
        yield (
            f"The warm start did not raise the {score}: {record['base']:.3f} before, {record['start']:.3f} after. "
            "Its steps, learning rate or chat template do not suit this model."
        )
    if "effective_groups" in figures:
        groups, last = record["groups"], figures["effective_groups"][1]
        if last < FEW_GROUPS * groups:
            reward = figures["reward"][1]
            cause = "nearly all responses are right" if reward > 0.5 else "nearly no response is right"
            yield (
                f"At the end {last:.3g} of {groups} groups a step have a gradient (reward {reward:.3f}: {cause})."
            )
    if figures.get("truncated_share", [0, 0])[1] > MANY_TRUNCATED:
        yield (
            f"At the end {figures['truncated_share'][1]:.0%} of the responses are truncated: the model's responses "
            "are longer than rollout.max_response_tokens, or its template has no end token."
        )
    if "sampled_entropy" in figures:
        first, last = figures["sampled_entropy"]
        if last < COLLAPSED * first:
            yield f"The entropy collapsed: {first:.3g} to {last:.3g} nats. trainer.lr may be too high for this model."
    if record["end"] < record["start"]:
        yield f"RL lowered the {score}: {record['start']:.3f} to {record['end']:.3f}."
    for warning in record["warnings"]:
        yield f"Warning at step {warning['step']}: {warning['seen']}. {warning['knob']}."
