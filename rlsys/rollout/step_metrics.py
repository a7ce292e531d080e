"""What the groups of one train step look like. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlsys.types import SampleGroup, Status


def step_metrics(groups: Sequence[SampleGroup], age: Callable[[int], int]) -> dict[str, float]:
    """Metrics of taken groups. `age(weight_version)`: train steps between those weights and the current ones.

    Lengths in tokens; `staleness_*` is the age of a group's oldest token, in train steps; `off_policy_share` is
    the share of trained tokens that other weights than the current ones sampled.
    """
    samples = [s for g in groups for s in g.samples]
    lengths = sorted(len(s.response_ids) for s in samples)
    tokens = sum(lengths)
    spans = [span for s in samples for span in s.spans]
    off_policy = sum(span.end - span.start for span in spans if age(span.version))
    staleness = [max((age(x.version) for s in g.samples for x in s.spans), default=0) for g in groups]
    return {
        "reward": sum(s.reward or 0.0 for s in samples) / len(samples),
        "response_len_mean": tokens / len(samples),
        "response_len_p50": quantile(lengths, 0.5),
        "response_len_p99": quantile(lengths, 0.99),
        "response_len_max": lengths[-1],
        "tokens": tokens,
        "off_policy_share": off_policy / tokens if tokens else 0.0,
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
        "resumed_samples": sum(s.resumes > 0 for s in samples),
        "truncated_share": sum(s.status is Status.TRUNCATED for s in samples) / len(samples),
    }


def quantile(ordered: Sequence[int], q: float) -> int:
    """The smallest value that at least a share `q` of `ordered` does not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
