"""Order in which interrupted samples resume (`rollout.resume_order`)."""

from __future__ import annotations

from typing import Literal

from rlsys.core.types import SampleGroup, TokenSequence

ResumeOrder = Literal["oldest", "nearest_done", "longest"]


def resume_key(order: ResumeOrder, sample: TokenSequence, group: SampleGroup) -> tuple[int, ...]:
    """Return the sort key of a waiting sample. Samples with smaller keys resume first, the older one among equals.

    - oldest: the oldest sample first.
    - nearest_done: groups with the fewest unfinished samples first, because only complete groups are trained;
      within a group, the longest sample first.
    - longest: the longest sample first, so that the tail starts early.
    """
    length = sample.tokens
    if order == "nearest_done":
        missing = sum(not s.status.terminal for s in group.samples)
        return missing, group.group_id, -length, sample.sample_id
    if order == "longest":
        return -length, sample.sample_id
    return (sample.sample_id,)
