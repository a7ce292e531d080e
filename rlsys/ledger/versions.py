"""Weight versions: numbers of pushes, each handed out once, and how old they make a token."""

from __future__ import annotations

from rlsys.core.errors import RunError
from rlsys.core.types import SampleGroup
from rlsys.ledger.store import sqlite_errors
from rlsys.ledger.writer import StoreWriter


class WeightVersions:
    """Owns the newest one and the table pushes."""

    def __init__(self, file: StoreWriter) -> None:
        self._file = file
        with sqlite_errors(file.path):
            self._trained_steps: dict[int, int] = dict(
                file.db.execute("SELECT weight_version, train_step FROM pushes")
            )
        self.newest = file.counter("weight_version")
        """The version handed out last; 0 before the first push."""

    def new(self, train_step: int) -> int:
        """The next weight version, for the weights after this many train steps."""
        version = self.newest + 1
        with self._file.writing():
            self._file.db.execute("INSERT INTO pushes VALUES (?, ?)", (version, train_step))
            self._file.set_counter("weight_version", version)
        self.newest = version
        self._trained_steps[version] = train_step
        return version

    def trained_steps(self, version: int) -> int:
        """Train steps that the weights of a version contain. Raises RunError for one that was never handed out.

        Ages are differences of these: after a restart the version counter goes on but the weights go back,
        and pushing the same weights again makes no token older.
        """
        if version not in self._trained_steps:
            raise RunError(f"an engine reported weight version {version}, which was never pushed to it")
        return self._trained_steps[version]

    def age(self, group: SampleGroup, train_step: int) -> int:
        """Train steps between the weights that sampled the group's oldest token and the weights after `train_step`
        steps; 0 for a group without tokens.
        """
        versions = {x.version for s in group.samples for q in s.trained_sequences for x in q.spans}
        return max((train_step - self.trained_steps(v) for v in versions), default=0)
