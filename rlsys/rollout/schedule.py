"""Which groups may start, which samples go on first, which groups a step takes, and what is too old. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlsys.core.spans import TokenSpan
from rlsys.core.types import Sample, SampleGroup


def admission_capacity(*, max_staleness: int, trained_steps: int, groups_per_step: int, accepted: int) -> int:
    """Groups that may start now; not above 0 when none may. AReaL's admission by version lag.

        (max_staleness + trained_steps + 1) * groups_per_step - accepted

    `trained_steps`: train steps that the engines' weights contain. `accepted`: groups trained, ready or
    running; what was expired, filtered or censored makes room. With max_staleness 0, exactly the groups of the
    next train step may run. After a restart, groups that later steps took before the crash count as accepted,
    while `trained_steps` is the checkpoint's: nothing is let in until the trainer has caught up.
    """
    return (max_staleness + trained_steps + 1) * groups_per_step - accepted


def choose(ready: Sequence[SampleGroup], wanted: int) -> list[SampleGroup] | None:
    """The first to finish; None while there are too few."""
    return list(ready[:wanted]) if len(ready) >= wanted else None


def choose_in_time(
    ready: Sequence[SampleGroup],
    active: Sequence[SampleGroup],
    wanted: int,
    slack: Callable[[SampleGroup], int],
) -> list[SampleGroup] | None:
    """As `choose`, so that nothing grows too old: None while waiting for a running group can still prevent it.

    `slack`: how many further steps may take the group, 0 for one that only this step can. Those with the least are
    chosen first. The groups that are left must fit into the steps to come: at most k * wanted groups with a slack
    of k or less (earliest deadline first). Admission makes sure that this is possible.
    """
    if len(ready) < wanted:
        return None
    order = sorted(ready, key=slack)  # stable: of equals, the first to finish
    rest = [(slack(g), False) for g in order[wanted:]] + [(slack(g), True) for g in active]
    for k in {s for s, _ in rest}:
        late = [running for s, running in rest if s <= k]
        if len(late) > k * wanted and any(late):
            return None
    return order[:wanted]


def too_old(sample: Sample, limit: int, age: Callable[[int], int]) -> list[TokenSpan]:
    """Tokens sampled by weights that are more than `limit` steps old. `age`: of a weight version, in train steps."""
    return [TokenSpan(span.start, span.end) for span in sample.spans if age(span.version) > limit]
