"""WeightVersions: issues the unique numbers of weight pushes, and computes the age of tokens in train steps."""

from __future__ import annotations

from rlsys.core.errors import RunError
from rlsys.core.types import SampleGroup
from rlsys.ledger.store import sqlite_errors
from rlsys.ledger.writer import StoreWriter


class WeightVersions:
    """Owner of the weight versions and of the table pushes."""

    def __init__(self, file: StoreWriter) -> None:
        self._file = file
        with sqlite_errors(file.path):
            self._trained_steps: dict[int, int] = dict(
                file.db.execute("SELECT weight_version, train_step FROM pushes")
            )
        self.newest = file.counter("weight_version")
        """The last issued version; 0 before the first one."""

    def new(self, train_step: int) -> int:
        """Issue the next weight version.

        Args:
            train_step: number of train steps that the weights contain.
        """
        version = self.newest + 1
        with self._file.writing():
            self._file.db.execute("INSERT INTO pushes VALUES (?, ?)", (version, train_step))
            self._file.set_counter("weight_version", version)
        self.newest = version
        self._trained_steps[version] = train_step
        return version

    def trained_steps(self, version: int) -> int:
        """Return the number of train steps that the weights of a version contain.

        Raises:
            RunError: the version was never issued.
        """
        if version not in self._trained_steps:
            raise RunError(
                f"an engine reported weight version {version}; expected one of the {self.newest} pushed versions"
            )
        return self._trained_steps[version]

    def age(self, group: SampleGroup, train_step: int) -> int:
        """Return the age of a group's oldest trained token in train steps; 0 for a group without tokens.

        The age is `train_step` minus the number of train steps in the weights that sampled the token. Versions cannot
        replace train steps here, because a restart pushes the weights of a checkpoint again under a new version,
        which must not make tokens older.
        """
        sequences = [q for sample in group.samples for q in sample.trained_sequences]
        versions = {span.version for q in sequences for span in q.spans}
        return max((train_step - self.trained_steps(v) for v in versions), default=0)
