"""Scheduling rules: which groups may start, which a step takes, and which tokens are too old. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlsys.core.spans import TokenSpan
from rlsys.core.types import SampleGroup, TokenSequence


def admission_capacity(*, max_staleness: int, trained_steps: int, groups_per_step: int, accepted: int) -> int:
    """Return the number of groups that may start now; 0 or less: none. This is AReaL's admission by version lag.

        (max_staleness + trained_steps + 1) * groups_per_step - accepted

    With max_staleness 0, exactly the groups of the next train step may run. After a restart from an earlier
    checkpoint, no group is admitted until the trainer has caught up: `trained_steps` is that of the checkpoint, but
    `accepted` includes the groups that later steps took before the crash.

    Args:
        max_staleness: largest age of a trained token in train steps.
        trained_steps: number of train steps in the engines' weights.
        groups_per_step: number of groups that a train step takes.
        accepted: number of trained, ready and running groups, without expired, filtered and censored ones.
    """
    return (max_staleness + trained_steps + 1) * groups_per_step - accepted


def choose(ready: Sequence[SampleGroup], count: int) -> list[SampleGroup] | None:
    """Return the first `count` groups in the order of completion; None if fewer are ready."""
    return list(ready[:count]) if len(ready) >= count else None


def choose_in_time(
    ready: Sequence[SampleGroup],
    active: Sequence[SampleGroup],
    count: int,
    slack: Callable[[SampleGroup], int],
) -> list[SampleGroup] | None:
    """Choose `count` groups so that no remaining group becomes too old before a step can take it.

    Groups with the least slack are chosen first (earliest deadline first). The remaining groups must fit into
    later steps: at most k * count groups may have a slack of k or less. Admission ensures that this is possible.

    Args:
        ready: complete groups, in the order of completion.
        active: running groups.
        count: groups of a train step.
        slack: returns the number of later steps that may take the group; 0: only this step may.

    Returns:
        the chosen groups; None if the step must wait, because too few groups are ready, or because a running group
            would become too old.
    """
    if len(ready) < count:
        return None
    order = sorted(ready, key=slack)  # stable: in the order of completion among equals
    remaining = [(slack(g), False) for g in order[count:]] + [(slack(g), True) for g in active]
    for k in {s for s, _ in remaining}:
        late = [running for s, running in remaining if s <= k]
        if len(late) > k * count and any(late):
            return None
    return order[:count]


def too_old(sample: TokenSequence, limit: int, age: Callable[[int], int]) -> list[TokenSpan]:
    """Return the spans of tokens that weights more than `limit` train steps old sampled.

    Args:
        age: returns the age of a weight version in train steps.
    """
    return [TokenSpan(span.start, span.end) for span in sample.spans if age(span.version) > limit]
