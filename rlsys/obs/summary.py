"""Metrics of a run -> the figures that gates and people read. Pure."""

from __future__ import annotations

from typing import Any

from rlsys.obs.metrics import Metrics, merge_counts, mismatch_quantile


def summarise(metrics: Metrics) -> dict[str, Any]:
    """Keys in a fixed order, None where the run has not got that far; seconds, and nats for log-prob gaps.

    `*_abs_logprob_diff` compare trainer and engine on tokens of the current weight version; the quantile and
    the maximum are upper edges of histogram bins. `tokens_lost` is the ledger's count, never a remainder.
    """
    steps, evals = metrics.steps, metrics.evals
    tokens = _sum(steps, "tokens")
    off_policy_tokens = sum(_get(s, "tokens") * _get(s, "off_policy_share") for s in steps)
    return {
        "steps": metrics.last_step,
        "wall_seconds": round(metrics.wall_seconds, 1),
        "eval_accuracy_before": evals[0]["accuracy"] if evals else None,
        "eval_accuracy_after": evals[-1]["accuracy"] if len(evals) > 1 else None,
        "eval_prompts": evals[-1].get("prompts") if evals else None,
        "reward_first": steps[0].get("reward") if steps else None,
        "reward_last": steps[-1].get("reward") if steps else None,
        "trained_tokens": int(tokens),
        "tokens_per_s": _ratio(tokens, _sum(steps, "time_step")),
        "off_policy_share": _ratio(off_policy_tokens, tokens),
        "resumed_samples": int(_sum(steps, "resumed_samples")),
        **_mismatch(steps),
        "tokens_lost": int(_get(steps[-1], "lost")) if steps else None,
        "staleness_max": max((_get(s, "staleness_max") for s in steps), default=None),
        "expired_groups": int(_get(steps[-1], "expired")) if steps else None,
        "censored_groups": int(_get(steps[-1], "censored")) if steps else None,
        "cache_share": steps[-1].get("cache_share") if steps else None,
        **{f"{part}_seconds": round(_sum(steps, f"time_{part}"), 1) for part in ("rollout", "train", "sync")},
        "sessions": sum(r["event"] in ("start", "resume") for r in metrics.runs),
        "finished": bool(metrics.runs) and metrics.runs[-1]["event"] == "end",
        "torn_lines": metrics.torn_lines,
    }


def _mismatch(steps: list[dict[str, Any]]) -> dict[str, float | None]:
    seen = [s for s in steps if s.get("mismatch_hist")]
    counts = merge_counts(s["mismatch_hist"] for s in seen)
    compared = sum(counts)
    if not compared:
        return dict.fromkeys(("mean_abs_logprob_diff", "p999_abs_logprob_diff", "max_abs_logprob_diff"))
    return {
        "mean_abs_logprob_diff": sum(s["mismatch_mean"] * sum(s["mismatch_hist"]) for s in seen) / compared,
        "p999_abs_logprob_diff": mismatch_quantile(counts, 0.999),
        "max_abs_logprob_diff": mismatch_quantile(counts, 1.0),
    }


def _get(entry: dict[str, Any], key: str) -> float:
    """0 where an entry lacks the key or holds null (not a finite number)."""
    return float(entry.get(key) or 0.0)


def _sum(entries: list[dict[str, Any]], key: str) -> float:
    return sum(_get(e, key) for e in entries)


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None
