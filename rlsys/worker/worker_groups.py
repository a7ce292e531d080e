"""Which samples of each group run in a worker. A tree grows once all of its group are here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlsys.core.types import Sample, SampleGroup


@dataclass
class _Here:
    """`together`: so many samples make a whole group for a tree; 0: none is grown in it any more."""

    group: SampleGroup
    together: int = 0
    whole: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerGroups:
    """Owns who is here."""

    def __init__(self) -> None:
        self._here: dict[int, _Here] = {}

    def add(self, sample: Sample, prompt_index: int, together: int) -> None:
        here = self._here.setdefault(sample.group_id, _Here(SampleGroup(sample.group_id, prompt_index, [])))
        here.group.samples.append(sample)
        here.together = together
        if len(here.group.samples) >= together:
            here.whole.set()

    def remove(self, sample: Sample) -> None:
        here = self._here[sample.group_id]
        here.group.samples.remove(sample)
        if not here.group.samples:
            del self._here[sample.group_id]

    def of(self, sample: Sample) -> SampleGroup:
        """Those of its samples that run here: all that are not done."""
        return self._here[sample.group_id].group

    async def whole(self, sample: Sample) -> Sequence[Sample]:
        """All samples of its group, in their order, once they are here; none where no tree is to grow."""
        here = self._here[sample.group_id]
        await here.whole.wait()
        samples = here.group.samples
        return sorted(samples, key=lambda s: s.index) if len(samples) == here.together else []
