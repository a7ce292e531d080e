"""WorkerGroups: the samples of each group in a worker. A tree grows when its whole group is present."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlsys.core.types import Sample, SampleGroup, TokenSequence


@dataclass
class _LocalGroup:
    """The samples of a group in this worker.

    Attributes:
        tree_samples: number of samples that form a tree; 0: no tree.
        complete: set when all samples of the tree are in this worker.
    """

    group: SampleGroup
    tree_samples: int = 0
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerGroups:
    """Owns the groups of the samples in this worker."""

    def __init__(self) -> None:
        self._groups: dict[int, _LocalGroup] = {}

    def add(self, sample: Sample, prompt_index: int, tree_samples: int) -> None:
        """Add a sample that starts in this worker. `tree_samples`: see RunSample."""
        entry = self._groups.setdefault(
            sample.group_id, _LocalGroup(SampleGroup(sample.group_id, prompt_index, []))
        )
        entry.group.samples.append(sample)
        entry.tree_samples = tree_samples
        if len(entry.group.samples) >= tree_samples:
            entry.complete.set()

    def remove(self, sample: Sample) -> None:
        """Remove a sample that has ended, and its group with its last sample."""
        entry = self._groups[sample.group_id]
        entry.group.samples.remove(sample)
        if not entry.group.samples:
            del self._groups[sample.group_id]

    def group_of(self, sample: TokenSequence) -> SampleGroup:
        """Return the sample's group, reduced to the samples that run in this worker."""
        return self._groups[sample.group_id].group

    async def complete(self, sample: Sample) -> Sequence[Sample]:
        """Wait until all samples of the sample's tree are in this worker.

        Returns:
            the samples by index; empty if they form no tree.
        """
        entry = self._groups[sample.group_id]
        await entry.complete.wait()
        samples = entry.group.samples
        return sorted(samples, key=lambda s: s.index) if len(samples) == entry.tree_samples else []
