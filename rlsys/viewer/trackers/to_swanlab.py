"""SwanLab. Without a key and without SWANLAB_MODE it works offline; `swanlab sync` sends what it kept."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import swanlab
from swanlab.proto.swanlab.record.v1 import record_pb2

from rlsys.viewer.trackers.leveldb_log import records
from rlsys.viewer.trackers.tracker import PROJECT, Row, TrackedRun

_WHOLE = "whole"
"""Of a line: written after all its other names, which SwanLab keeps one by one."""


class SwanlabRun:
    def __init__(self, run: TrackedRun) -> None:
        place = run.place / "swanlab"
        place.mkdir(parents=True, exist_ok=True)
        self._held: dict[str, int] = {}
        for name, step, _ in scalars(sorted(place.glob(f"run-*-{run.run_id}/run-{run.run_id}.swanlab"))):
            self._held[name] = max(step, self._held.get(name, step))
        told = "SWANLAB_MODE" in os.environ or "SWANLAB_API_KEY" in os.environ
        mode: Any = None if told else "offline"
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT), id=run.run_id, name=run.name, resume="allow",
            log_dir=str(place), config=run.config, mode=mode,
        )  # fmt: skip

    def written(self) -> dict[str, int]:
        ends = {kind: f"{kind}/{_WHOLE}" for kind in ("step", "eval")}
        return {kind: self._held[name] for kind, name in ends.items() if name in self._held}

    def write(
        self, kind: str, step: int, time: float, values: dict[str, float], samples: Sequence[Row]
    ) -> None:
        names = {f"{kind}/{name}": value for name, value in values.items()}
        # A kill may have left a part of this line.
        row: dict[str, Any] = {n: v for n, v in names.items() if self._held.get(n, -1) < step}
        if samples:
            lines = [f"reward {s['reward']}: {s['prompt']}{s['response']}" for s in samples]
            row["samples"] = [swanlab.Text(line) for line in lines]
        self._run.log({**row, f"{kind}/{_WHOLE}": 1.0}, step=step)

    def close(self) -> None:
        self._run.finish()


def scalars(files: Sequence[Path]) -> Iterator[tuple[str, int, float]]:
    """(name, train step, value) in SwanLab's files."""
    for path in files:
        for data in records(path.read_bytes()):
            record = record_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "scalar":
                scalar = record.scalar
                yield scalar.key, int(scalar.step), float(scalar.value.number)


def open_run(run: TrackedRun) -> SwanlabRun:
    return SwanlabRun(run)
