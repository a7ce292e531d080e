"""Scheduling rules: which groups may start, which a step takes, and which tokens are too old. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlsys.core.spans import TokenSpan
from rlsys.core.types import SampleGroup, TokenSequence


def admission_capacity(*, max_staleness: int, trained_steps: int, groups_per_step: int, accepted: int) -> int:
    """Return the number of groups that may start now; 0 or less: none. AReaL's admission by version lag.

        (max_staleness + trained_steps + 1) * groups_per_step - accepted

    With max_staleness 0, exactly the groups of the next train step may run. After a restart, groups that later
    steps took before the crash count as accepted, while `trained_steps` is the checkpoint's: no group is
    admitted until the trainer has caught up.

    Args:
        trained_steps: train steps contained in the engines' weights.
        accepted: groups trained, ready or running; expired, filtered and censored ones do not count.
    """
    return (max_staleness + trained_steps + 1) * groups_per_step - accepted


def choose(ready: Sequence[SampleGroup], count: int) -> list[SampleGroup] | None:
    """Return the first groups to finish; None if there are too few."""
    return list(ready[:count]) if len(ready) >= count else None


def choose_in_time(
    ready: Sequence[SampleGroup],
    active: Sequence[SampleGroup],
    count: int,
    slack: Callable[[SampleGroup], int],
) -> list[SampleGroup] | None:
    """Choose as `choose`, but so that no group grows too old.

    None while waiting for a running group can prevent it. Groups with the least slack are chosen first. The
    remaining groups must fit into later steps: at most k * count groups with a slack of k or less (earliest
    deadline first). Admission ensures that this is possible.

    Args:
        slack: number of further steps that may take the group, 0 if only this step can.
    """
    if len(ready) < count:
        return None
    order = sorted(ready, key=slack)  # stable: of equals, the first to finish
    remaining = [(slack(g), False) for g in order[count:]] + [(slack(g), True) for g in active]
    for k in {s for s, _ in remaining}:
        late = [running for s, running in remaining if s <= k]
        if len(late) > k * count and any(late):
            return None
    return order[:count]


def too_old(sample: TokenSequence, limit: int, age: Callable[[int], int]) -> list[TokenSpan]:
    """Return the tokens sampled by weights more than `limit` steps old.

    Args:
        age: age of a weight version in train steps.
    """
    return [TokenSpan(span.start, span.end) for span in sample.spans if age(span.version) > limit]
