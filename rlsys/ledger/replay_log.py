"""ReplayLog: the record of timing-dependent decisions, from which `rollout.repeat` repeats a run."""

from __future__ import annotations

from collections.abc import Iterable

from rlsys.core.types import SampleGroup, TokenSequence
from rlsys.ledger.versions import WeightVersions
from rlsys.ledger.writer import StoreWriter


class ReplayLog:
    """Appends to the tables admissions and interrupts, and owns them."""

    def __init__(self, file: StoreWriter, versions: WeightVersions) -> None:
        self._file = file
        self._versions = versions

    def record_admission(self, group: SampleGroup) -> None:
        """Record that a group was admitted under the newest weight version, for the first time or after a restart."""
        with self._file.writing():
            insert = "INSERT INTO admissions (group_id, weight_version) VALUES (?, ?)"
            self._file.db.execute(insert, (group.group_id, self._versions.newest))

    def record_interrupts(self, sequences: Iterable[TokenSequence]) -> None:
        """Record that sequences were removed from their engines and parked, with their present numbers of tokens."""
        rows = [(q.sample_id, q.sequence, q.tokens, self._versions.newest) for q in sequences]
        insert = "INSERT INTO interrupts (sample_id, sequence, tokens, weight_version) VALUES (?, ?, ?, ?)"
        with self._file.writing():
            self._file.db.executemany(insert, rows)
