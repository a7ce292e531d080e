"""ReplayLog: timing-dependent decisions, which `rollout.repeat` needs in addition to spans and journal."""

from __future__ import annotations

from collections.abc import Iterable

from rlsys.core.types import SampleGroup, TokenSequence
from rlsys.ledger.versions import WeightVersions
from rlsys.ledger.writer import StoreWriter


class ReplayLog:
    """Owns the tables admissions and interrupts, which are append-only."""

    def __init__(self, file: StoreWriter, versions: WeightVersions) -> None:
        self._file = file
        self._versions = versions

    def record_admission(self, group: SampleGroup) -> None:
        """Record that the group was admitted, for the first time or after a restart, under the current version."""
        with self._file.writing():
            insert = "INSERT INTO admissions (group_id, weight_version) VALUES (?, ?)"
            self._file.db.execute(insert, (group.group_id, self._versions.newest))

    def record_interrupts(self, samples: Iterable[TokenSequence]) -> None:
        """Record that these sequences were removed from an engine and parked."""
        rows = [(s.sample_id, s.sequence, s.tokens, self._versions.newest) for s in samples]
        insert = "INSERT INTO interrupts (sample_id, sequence, tokens, weight_version) VALUES (?, ?, ?, ?)"
        with self._file.writing():
            self._file.db.executemany(insert, rows)
