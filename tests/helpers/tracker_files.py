"""Metrics of a run in W&B and MLflow, read from the files that they wrote next to the run folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

TrackedValues = dict[tuple[str, int], dict[str, float]]
"""(kind of line, train step) -> its values."""


def first_values(run: Path) -> TrackedValues:
    """Return the values that trackers must hold: those of the first line per kind and step."""
    first: TrackedValues = {}
    for text in (run / "metrics.jsonl").read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # a kill truncated the line
            continue
        numbers = {k: v for k, v in line.items() if isinstance(v, int | float) and k not in ("step", "time")}
        if line["kind"] in ("step", "eval"):
            first.setdefault((line["kind"], line["step"]), numbers)
    return first


def read_wandb(run: Path) -> TrackedValues:
    from rlsys.viewer.trackers.to_wandb import history

    files = list((run.parent / "trackers" / "wandb").glob("*run-*/run-*.wandb"))
    out: TrackedValues = {}
    for step, values in history(files):
        kind = next(k for k in ("step", "eval") if any(name.startswith(f"{k}/") for name in values))
        assert (kind, step) not in out, "the tracker holds a step twice"
        out[kind, step] = {n.partition("/")[2]: v for n, v in values.items() if n.startswith(f"{kind}/")}
    return out


def read_mlflow(run: Path) -> TrackedValues:
    from mlflow import MlflowClient

    tracking_folder = run.parent / "trackers" / "mlflow"
    if not tracking_folder.exists():
        return {}
    client = MlflowClient(tracking_uri=tracking_folder.as_uri())
    experiment = client.get_experiment_by_name("rlsys")
    runs = client.search_runs([experiment.experiment_id]) if experiment else []
    out: TrackedValues = {}
    for mlflow_run in runs[:1]:
        assert len(runs) == 1, "MLflow holds several runs for one run"
        for metric in client.get_run(mlflow_run.info.run_id).data.metrics:
            kind, _, key = metric.partition("/")
            for point in client.get_metric_history(mlflow_run.info.run_id, metric):
                values = out.setdefault((kind, point.step), {})
                assert key not in values, "the tracker holds a step twice"
                values[key] = point.value
    return {kind_step: {k: v for k, v in values.items() if k != "whole"} for kind_step, values in out.items()}


READERS: dict[str, Callable[[Path], TrackedValues]] = {"wandb": read_wandb, "mlflow": read_mlflow}
