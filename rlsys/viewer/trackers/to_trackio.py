"""Trackio: its folder is TRACKIO_DIR, else one beside the runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rlsys.viewer.trackers.tracker import PROJECT, Row, TrackedRun, last_steps


class TrackioRun:
    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.place / "trackio"))
        import trackio  # reads TRACKIO_DIR as it is imported

        self._trackio = trackio
        self._project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._name = f"{run.name}-{run.run_id[:6]}"
        self._run = trackio.init(
            project=self._project, name=self._name, resume="allow", config=run.config, embed=False,
            auto_log_cpu=False, auto_log_gpu=False,
        )  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._trackio.SQLiteStorage.get_logs(self._project, self._name)
        return found

    def written(self) -> dict[str, int]:
        return last_steps((int(row["step"]), row) for row in self.rows())

    def write(
        self, kind: str, step: int, time: float, values: dict[str, float], samples: Sequence[Row]
    ) -> None:
        row: dict[str, Any] = {f"{kind}/{name}": value for name, value in values.items()}
        if samples:
            import pandas

            row["samples"] = self._trackio.Table(dataframe=pandas.DataFrame(list(samples)))
        self._run.log(row, step=step)

    def close(self) -> None:
        self._run.finish()


def open_run(run: TrackedRun) -> TrackioRun:
    return TrackioRun(run)
