"""TODO"""

from __future__ import annotations

from typing import Literal

from rlsys.core.types import Sample, SampleGroup

ResumeOrder = Literal["oldest", "nearest_done", "longest"]


def resume_key(order: ResumeOrder, sample: Sample, group: SampleGroup) -> tuple[int, ...]:
    """Samples with smaller keys go on first; ties by age.

    oldest: no sample waits behind a younger one. nearest_done: groups that lack the fewest samples, since a group
    is of use only when it is whole; in a group, the longest first. longest: the least budget left, so that the tail
    starts early.
    """
    length = sample.tokens
    if order == "nearest_done":
        missing = sum(not s.status.terminal for s in group.samples)
        return missing, group.group_id, -length, sample.sample_id
    if order == "longest":
        return -length, sample.sample_id
    return (sample.sample_id,)
