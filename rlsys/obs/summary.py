"""Summary of a run's metrics, for people and for automatic checks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rlsys.obs.metrics import Metrics, censored_by_cause, merge_counts, mismatch_quantile


def summarise(metrics: Metrics) -> dict[str, Any]:
    """Return the summary, with its keys in a fixed order.

    Times are in seconds, and differences of log-probs in nats. A value is None if it was not measured, which does not
    mean 0. `*_abs_logprob_diff` compare trainer and engine on tokens of the current weight version; quantile and
    maximum are upper edges of histogram bins. `tokens_lost` is the ledger's count.
    """
    steps, evals = metrics.steps, metrics.evals
    first, last = (steps[0], steps[-1]) if steps else ({}, {})
    tokens = _sum(steps, "tokens")
    off_policy = [s["tokens"] * s["off_policy_share"] for s in steps if s.get("off_policy_share") is not None]
    return {
        "steps": metrics.last_step,
        "wall_seconds": round(metrics.wall_seconds, 1),
        "eval_accuracy_before": evals[0]["accuracy"] if evals else None,
        "eval_accuracy_after": evals[-1]["accuracy"] if len(evals) > 1 else None,
        "eval_prompts": evals[-1].get("prompts") if evals else None,
        "eval_left_out": evals[-1].get("left_out") if evals else None,
        "loss_first": first.get("loss"),
        "loss_last": last.get("loss"),
        "reward_first": first.get("reward"),
        "reward_last": last.get("reward"),
        "trained_tokens": tokens,
        "tokens_per_s": _ratio(tokens, _sum(steps, "time_step")),
        "off_policy_share": _ratio(sum(off_policy), tokens) if off_policy else None,
        "resumed_samples": _sum(steps, "resumed_samples"),
        **_mismatch(steps),
        "tokens_lost": last.get("lost"),
        "staleness_max": max((s["staleness_max"] for s in steps if "staleness_max" in s), default=None),
        "expired_groups": last.get("expired"),
        "censored_groups": last.get("censored"),
        "censored_samples": _censored(steps) if "censored" in last else None,
        "cache_share": last.get("cache_share"),
        **{f"{part}_seconds": _sum(steps, f"time_{part}") for part in ("rollout", "train", "sync")},
        "warnings": len(metrics.warnings),
        "sessions": sum(r["event"] in ("start", "resume") for r in metrics.runs),
        "finished": bool(metrics.runs) and metrics.runs[-1]["event"] == "end",
        "torn_lines": metrics.torn_lines,
    }


def _mismatch(steps: list[dict[str, Any]]) -> dict[str, float | None]:
    steps_with_histogram = [s for s in steps if s.get("mismatch_hist")]
    counts = merge_counts(s["mismatch_hist"] for s in steps_with_histogram)
    total = sum(counts)
    if not total:
        return dict.fromkeys(("mean_abs_logprob_diff", "p999_abs_logprob_diff", "max_abs_logprob_diff"))
    return {
        "mean_abs_logprob_diff": sum(
            s["mismatch_mean"] * sum(s["mismatch_hist"]) for s in steps_with_histogram
        )
        / total,
        "p999_abs_logprob_diff": mismatch_quantile(counts, 0.999),
        "max_abs_logprob_diff": mismatch_quantile(counts, 1.0),
    }


def _censored(steps: list[dict[str, Any]]) -> dict[str, int]:
    """Return the number of censored samples by cause, over all rollout processes.

    Each process counts from 0, so a count below the previous one comes from a new process.
    """
    totals, previous = Counter[str](), dict[str, int]()
    for counts in map(censored_by_cause, steps):
        for cause, n in counts.items():
            previous_count = previous.get(cause, 0)
            totals[cause] += n - previous_count if n >= previous_count else n
        previous = counts
    return dict(totals)


def _sum(entries: list[dict[str, Any]], key: str) -> float | None:
    """Return the sum of the values of a key that are not None; None if there are none."""
    values = [e[key] for e in entries if e.get(key) is not None]
    return round(sum(values), 3) if values else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
