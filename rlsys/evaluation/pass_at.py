"""pass@k of several responses to each prompt, with its interval. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959964
"""Two-sided 95 % of a normal distribution."""


def pass_at(n: int, right: int, k: int) -> float:
    """Chance that of k responses, drawn from n of which `right` are right, at least one is.

    1 - C(n - right, k) / C(n, k): without bias for any k <= n (Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", section 2.1). Raises ValueError for other sizes.
    """
    if not (0 < k <= n and 0 <= right <= n):
        raise ValueError(f"pass@{k} of {right} right ones among {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """95 % interval of a mean of `count` independent values in [0, 1] (Wilson 1927).

    Exact in its form for values that are 0 or 1; for others, which spread less, it is wider than needed.
    """
    z2 = Z * Z / count
    middle = (mean + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(mean * (1 - mean) / count + z2 / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def ks(samples: int) -> list[int]:
    """The k that are told of so many responses: powers of two, and all of them."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def pass_figures(right: Sequence[Sequence[bool]], samples: int) -> dict[str, float]:
    """`right[i]`: of each judged response to prompt i. `pass_k`, `pass_k_low` and `pass_k_high` for each k.

    A prompt with fewer than k judged responses does not count for that k; a k that no prompt counts for is left out.
    """
    out: dict[str, float] = {}
    for k in ks(samples):
        values = [pass_at(len(r), sum(r), k) for r in right if len(r) >= k]
        if values:
            mean = sum(values) / len(values)
            low, high = wilson(min(1.0, mean), len(values))
            out |= {f"pass_{k}": mean, f"pass_{k}_low": low, f"pass_{k}_high": high}
    return out
