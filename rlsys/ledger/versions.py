"""WeightVersions: unique numbers of weight pushes, and the age of tokens in train steps."""

from __future__ import annotations

from rlsys.core.errors import RunError
from rlsys.core.types import SampleGroup
from rlsys.ledger.store import sqlite_errors
from rlsys.ledger.writer import StoreWriter


class WeightVersions:
    """Issues weight versions. Owns the newest version and the table pushes."""

    def __init__(self, file: StoreWriter) -> None:
        self._file = file
        with sqlite_errors(file.path):
            self._trained_steps: dict[int, int] = dict(
                file.db.execute("SELECT weight_version, train_step FROM pushes")
            )
        self.newest = file.counter("weight_version")
        """The last issued version; 0 before the first push."""

    def new(self, train_step: int) -> int:
        """Issue the next weight version, for the weights after this many train steps."""
        version = self.newest + 1
        with self._file.writing():
            self._file.db.execute("INSERT INTO pushes VALUES (?, ?)", (version, train_step))
            self._file.set_counter("weight_version", version)
        self.newest = version
        self._trained_steps[version] = train_step
        return version

    def trained_steps(self, version: int) -> int:
        """Return the number of train steps that the weights of a version contain.

        Ages are differences of these numbers and not of versions: after a restart the version counter continues
        while the weights are those of the checkpoint, and another push of the same weights must not make tokens
        older.

        Raises:
            RunError: the version was never issued.
        """
        if version not in self._trained_steps:
            raise RunError(f"an engine reported weight version {version}, which was never pushed")
        return self._trained_steps[version]

    def age(self, group: SampleGroup, train_step: int) -> int:
        """Return the age of the group's oldest token in train steps; 0 for a group without tokens.

        The age is `train_step` minus the train steps in the weights that sampled the token.
        """
        versions = {x.version for s in group.samples for q in s.trained_sequences for x in q.spans}
        return max((train_step - self.trained_steps(v) for v in versions), default=0)
