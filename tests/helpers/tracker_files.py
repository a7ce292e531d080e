"""What W&B and MLflow hold of a run, read back from the files that they wrote beside its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Held = dict[tuple[str, int], dict[str, float]]
"""(kind of line, train step) -> its values."""


def told_first(run: Path) -> Held:
    """What trackers should hold: of each kind and step the first line, since what was said stays said."""
    first: Held = {}
    for text in (run / "metrics.jsonl").read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # a kill cut it off
            continue
        numbers = {k: v for k, v in line.items() if isinstance(v, int | float) and k not in ("step", "time")}
        if line["kind"] in ("step", "eval"):
            first.setdefault((line["kind"], line["step"]), numbers)
    return first


def held_by_wandb(run: Path) -> Held:
    from rlsys.viewer.trackers.to_wandb import history

    files = list((run.parent / "trackers" / "wandb").glob("*run-*/run-*.wandb"))
    out: Held = {}
    for step, values in history(files):
        kind = next(k for k in ("step", "eval") if any(name.startswith(f"{k}/") for name in values))
        assert (kind, step) not in out, "written twice"
        out[kind, step] = {n.partition("/")[2]: v for n, v in values.items() if n.startswith(f"{kind}/")}
    return out


def held_by_mlflow(run: Path) -> Held:
    from mlflow import MlflowClient

    tracking_folder = run.parent / "trackers" / "mlflow"
    if not tracking_folder.exists():
        return {}
    client = MlflowClient(tracking_uri=tracking_folder.as_uri())
    experiment = client.get_experiment_by_name("rlsys")
    runs = client.search_runs([experiment.experiment_id]) if experiment else []
    out: Held = {}
    for mlflow_run in runs[:1]:
        assert len(runs) == 1, "one run of ours is one of MLflow's"
        for metric in client.get_run(mlflow_run.info.run_id).data.metrics:
            kind, _, key = metric.partition("/")
            for point in client.get_metric_history(mlflow_run.info.run_id, metric):
                values = out.setdefault((kind, point.step), {})
                assert key not in values, "written twice"
                values[key] = point.value
    return {kind_step: {k: v for k, v in values.items() if k != "whole"} for kind_step, values in out.items()}


READERS: dict[str, Callable[[Path], Held]] = {"wandb": held_by_wandb, "mlflow": held_by_mlflow}
