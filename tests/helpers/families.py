"""A fake of the interface through which tree generators access the samples of a group, without a ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rlsys.core.types import Sample


class Siblings:
    """The samples of one group. `keep_count`: number of calls to `keep`."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples, self.keep_count = samples, 0

    async def siblings(self, sample: Sample) -> Sequence[Sample]:
        return self.samples

    @contextmanager
    def growing(self, samples: Iterable[Sample]) -> Iterator[None]:
        yield

    def keep(self, samples: Iterable[Sample]) -> None:
        self.keep_count += 1
