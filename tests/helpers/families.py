"""The samples of one group, as a tree's generator sees them, without a ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rlsys.core.types import Sample


class Siblings:
    """`kept`: how often the generator had them written."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples, self.kept = samples, 0

    async def siblings(self, sample: Sample) -> Sequence[Sample]:
        return self.samples

    @contextmanager
    def growing(self, samples: Iterable[Sample]) -> Iterator[None]:
        yield

    def keep(self, samples: Iterable[Sample]) -> None:
        self.kept += 1
