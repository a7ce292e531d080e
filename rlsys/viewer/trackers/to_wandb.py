"""Weights & Biases. Without a key and WANDB_MODE it works offline, and `wandb sync` uploads the stored data later."""

from __future__ import annotations

import json
import netrc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2

from rlsys.viewer.trackers.leveldb_log import records
from rlsys.viewer.trackers.tracker import PROJECT, Row, TrackedRun, last_steps


class WandbRun:
    """A run in Weights & Biases (Tracker)."""

    def __init__(self, run: TrackedRun) -> None:
        run.storage.mkdir(parents=True, exist_ok=True)
        self._files = list(run.storage.glob(f"wandb/*run-*-{run.run_id}/run-{run.run_id}.wandb"))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), id=run.run_id, name=run.name, resume="allow",
            dir=str(run.storage), config=run.config, mode=_mode(),
        )  # fmt: skip

    def last_steps(self) -> dict[str, int]:
        """Return kind of line -> last train step, from the files of this run's sessions, which every mode has."""
        return last_steps(history(self._files))

    def write(
        self, kind: str, step: int, time: float, values: dict[str, float], samples: Sequence[Row]
    ) -> None:
        row: dict[str, Any] = {f"{kind}/{name}": value for name, value in values.items()}
        if samples:
            columns = list(samples[0])
            row["samples"] = wandb.Table(columns=columns, data=[[s[c] for c in columns] for s in samples])
        # One call commits the whole row. An evaluation after a step is another row, and a kill leaves no partial row.
        self._run.log({**row, "train_step": step, "_timestamp": time})

    def close(self) -> None:
        self._run.finish()


def _mode() -> Any:
    """Return W&B's mode: None if the environment or .netrc determines it, otherwise `offline`."""
    if "WANDB_MODE" in os.environ or "WANDB_API_KEY" in os.environ:
        return None
    try:
        credentials = netrc.netrc().authenticators("api.wandb.ai")
    except (FileNotFoundError, netrc.NetrcParseError):
        credentials = None
    return None if credentials else "offline"


def history(files: Sequence[Path]) -> list[tuple[int, dict[str, Any]]]:
    """Return (train step, values) of each row in W&B's files. Rows that a kill has truncated are skipped."""
    rows = []
    for path in sorted(files):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                if "train_step" in items:
                    step = int(items["train_step"])
                    rows.append((step, {k: v for k, v in items.items() if "/" in k or k == "samples"}))
    return rows


def open_run(run: TrackedRun) -> WandbRun:
    """Open a run in Weights & Biases, which is created if it does not exist."""
    return WandbRun(run)
