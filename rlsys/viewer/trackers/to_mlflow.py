"""MLflow. MLFLOW_TRACKING_URI names its server; without it, MLflow stores its data in a folder next to the runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from rlsys.viewer.trackers.tracker import PROJECT, Row, TrackedRun

_TAG = "rlsys.run"
_BATCH = 1000
"""Largest number of metrics of a call, the API's limit. A line of metrics has fewer."""


class MlflowRun:
    """A run in MLflow (Tracker)."""

    def __init__(self, run: TrackedRun) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder needs no database
            folder = run.storage / "mlflow"
            folder.mkdir(parents=True, exist_ok=True)
            uri = folder.resolve().as_uri()
        self.client = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        number = self._experiment(name)
        runs = self.client.search_runs([number], f"tags.`{_TAG}` = '{run.run_id}'")
        self._is_resumed = bool(runs)
        if runs:
            self.id = runs[0].info.run_id
            self.client.set_terminated(self.id, "RUNNING")
        else:
            self.id = self.client.create_run(number, tags={_TAG: run.run_id}, run_name=run.name).info.run_id
            flat = _flat(run.config)
            self.client.log_batch(self.id, params=[Param(k, str(v)[:500]) for k, v in flat.items()][:100])
        self._checked: set[str] = set()
        """Kinds of lines whose first line since the start of this process was written."""

    def _experiment(self, name: str) -> str:
        """Return the id of an experiment, which is created if it does not exist."""
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self.client.create_experiment(name))
            except MlflowException:  # another run has created it
                experiment = self.client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def last_steps(self) -> dict[str, int]:
        """Return kind of line (step, eval) -> train step of its last complete line.

        MLflow may have only a part of a line. A line is complete if it has the metric _COMPLETE.
        """
        steps = {kind: self._last_step(f"{kind}/{_COMPLETE}") for kind in ("step", "eval")}
        return {kind: step for kind, step in steps.items() if step is not None}

    def _last_step(self, name: str) -> int | None:
        """Return the last train step with this metric; None: there is none."""
        history = self.client.get_metric_history(self.id, name)
        return max((m.step for m in history), default=None)

    def write(
        self, kind: str, step: int, time: float, values: dict[str, float], samples: Sequence[Row]
    ) -> None:
        names = {f"{kind}/{name}": value for name, value in values.items()}
        if kind not in self._checked and self._is_resumed:  # a kill may have left a part of this line
            names = {n: v for n, v in names.items() if (self._last_step(n) or -1) < step}
        self._checked.add(kind)
        names[f"{kind}/{_COMPLETE}"] = 1.0
        milliseconds = round(time * 1000)
        metrics = [Metric(n, v, milliseconds, step) for n, v in names.items()]
        self.client.log_batch(self.id, metrics=metrics[:_BATCH])
        if samples:
            columns = {c: [s[c] for s in samples] for c in samples[0]}
            self.client.log_dict(self.id, columns, f"samples/{step:06d}.json")

    def close(self) -> None:
        self.client.set_terminated(self.id)


_COMPLETE = "whole"
"""Last metric of a line, which is written after all others."""


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested config as name -> value, with names such as `trainer.lr`."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values


def open_run(run: TrackedRun) -> MlflowRun:
    """Open a run in MLflow, which is created if it does not exist."""
    return MlflowRun(run)
