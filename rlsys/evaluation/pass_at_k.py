"""pass@k of several responses to each prompt, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959964
"""Standard deviations of the two-sided 95 % interval of a normal distribution."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, 1 - C(n - correct, k) / C(n, k).

    It is the probability that at least one of k responses, drawn from the n, is correct (Chen et al. 2021,
    "Evaluating Large Language Models Trained on Code", section 2.1).

    Args:
        n: number of responses.
        correct: number of correct responses among them.
        k: number of drawn responses.

    Raises:
        ValueError: `k` or `correct` is out of range.
    """
    if not (0 < k <= n and 0 <= correct <= n):
        raise ValueError(
            f"k = {k}, correct = {correct} and n = {n}: expected 1 <= k <= n and 0 <= correct <= n"
        )
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Return the bounds of the 95 % confidence interval of a mean of independent values in [0, 1] (Wilson 1927).

    The interval is for values that are 0 or 1. For other values, which vary less, it is wider than necessary.

    Args:
        mean: mean of the values.
        count: number of values.
    """
    z2 = Z * Z / count
    middle = (mean + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(mean * (1 - mean) / count + z2 / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def reported_ks(samples: int) -> list[int]:
    """Return the values of k to report: the powers of two up to `samples`, and `samples`."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def pass_at_k_metrics(correct: Sequence[Sequence[bool]], samples: int) -> dict[str, float]:
    """Return the metrics `pass_{k}`, `pass_{k}_low` and `pass_{k}_high` for each k of `reported_ks`.

    A prompt with fewer than k judged responses is ignored for this k, and a k without prompts is omitted.

    Args:
        correct: for each prompt, whether each judged response is correct.
        samples: number of responses per prompt.
    """
    metrics: dict[str, float] = {}
    for k in reported_ks(samples):
        values = [pass_at_k(len(r), sum(r), k) for r in correct if len(r) >= k]
        if values:
            mean = sum(values) / len(values)
            low, high = wilson(min(1.0, mean), len(values))
            metrics |= {f"pass_{k}": mean, f"pass_{k}_low": low, f"pass_{k}_high": high}
    return metrics
