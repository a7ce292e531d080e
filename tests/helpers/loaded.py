"""The groups of a take with their tokens, which a trainer reads from the run's segments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rlsys.core.types import SampleGroup
from rlsys.segments.records import SegmentReader


def load_tokens(run: Path, groups: Iterable[SampleGroup]) -> list[SampleGroup]:
    """Return `groups`, whose samples have no tokens yet, with the tokens from the segments of run folder `run`."""
    groups = list(groups)
    assert not any(s.response_ids or s.mu or s.routes or s.behaviour for g in groups for s in g.samples)
    with SegmentReader(run) as segments:
        return [replace(g, samples=[segments.load(s) for s in g.samples]) for g in groups]
