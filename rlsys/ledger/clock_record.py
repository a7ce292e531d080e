"""What the clock decided, beside spans and journal: `rollout.repeat` needs no more to run the same again."""

from __future__ import annotations

from collections.abc import Iterable

from rlsys.core.types import Sample, SampleGroup
from rlsys.ledger.versions import WeightVersions
from rlsys.ledger.writer import StoreWriter


class ClockRecord:
    """Owns the tables admissions and interrupts, which are only added to."""

    def __init__(self, file: StoreWriter, versions: WeightVersions) -> None:
        self._file = file
        self._versions = versions

    def admitted(self, group: SampleGroup) -> None:
        """The group may start, or go on after a restart, under the current weight version."""
        with self._file.writing():
            insert = "INSERT INTO admissions (group_id, weight_version) VALUES (?, ?)"
            self._file.db.execute(insert, (group.group_id, self._versions.newest))

    def interrupted(self, samples: Iterable[Sample]) -> None:
        """These sequences were in an engine and are parked now."""
        rows = [(s.sample_id, s.sequence, s.tokens, self._versions.newest) for s in samples]
        insert = "INSERT INTO interrupts (sample_id, sequence, tokens, weight_version) VALUES (?, ?, ?, ?)"
        with self._file.writing():
            self._file.db.executemany(insert, rows)
