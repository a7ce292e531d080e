"""Write the metrics of a run to its trackers: `python -m rlsys.viewer.trackers.follow RUN`, or `rlsys track RUN`.

`rlsys train` starts it as a separate process, so that a failure or a hang of a tracker's package cannot affect the
run. The process writes the lines of metrics.jsonl until its standard input is closed, and then the remaining lines.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsys.config import Config, load_run_config
from rlsys.core.errors import RlsysError, UserError
from rlsys.core.run_files import CONFIG_FILE
from rlsys.ledger.samples import Order, SampleQuery
from rlsys.obs.metrics import MetricsTail, run_id
from rlsys.obs.role import run_role
from rlsys.viewer.reading import RunTexts
from rlsys.viewer.trackers.tracker import Row, TrackedRun, Tracker, check_trackers, open_tracker

POLL_SECONDS = 1.0
SAMPLES = 16
"""Number of samples in a table."""

ORDERS: tuple[Order, ...] = ("worst", "best")

log = logging.getLogger("rlsys.viewer.trackers")


class Follower:
    """Writes the metrics of one run to several trackers.

    The first line of metrics, which defines the run's id, opens the trackers.

    Attributes:
        lines: name of a tracker -> number of written lines.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Check the run and the trackers.

        Args:
            folder: run folder.
            names: names of the trackers.

        Raises:
            UserError: the folder is not a run folder, or a package is not installed.
        """
        if not (folder / CONFIG_FILE).is_file():
            raise UserError(f"{folder}: not a run folder: contains no {CONFIG_FILE}")
        check_trackers(names)
        self._folder, self._names = folder, names
        self._config: Config = load_run_config(folder)
        self._tail = MetricsTail(folder)
        self._trackers: dict[str, Tracker] = {}
        self._last_steps: dict[str, dict[str, int]] = {}
        """Name of a tracker -> last train step of each kind of line that it has."""
        self.lines = dict.fromkeys(names, 0)

    def catch_up(self) -> None:
        """Write the lines that a tracker lacks. The line of a step that is trained again is not replaced."""
        for entry in self._tail.read():
            if not self._trackers:
                self._open(entry["time"])
            if entry["kind"] in ("step", "eval"):
                self._write(entry)

    def _open(self, start_time: float) -> None:
        name = self._folder.resolve().name
        config: dict[str, Any] = self._config.model_dump(mode="json")
        run = TrackedRun(self._folder, run_id(name, start_time), name, config)
        for tracker in self._names:
            self._trackers[tracker] = open_tracker(tracker, run)
            self._last_steps[tracker] = self._trackers[tracker].last_steps()

    def _write(self, entry: dict[str, Any]) -> None:
        """Write a line to the trackers that lack it."""
        kind, step, time = entry["kind"], int(entry["step"]), entry["time"]
        trackers = [n for n in self._names if self._last_steps[n].get(kind, -1) < step]
        if not trackers:
            return
        values = {
            name: value
            for name, value in entry.items()
            if isinstance(value, int | float) and name not in ("step", "time")
        }
        rows = self._rows(step) if kind == "step" and step % self._config.eval.interval == 0 else []
        for name in trackers:
            self._trackers[name].write(kind, step, time, values, rows)
            self._last_steps[name][kind] = step
            self.lines[name] += 1

    def _rows(self, step: int) -> list[Row]:
        """Return the worst and the best samples of a step; none if the ledger is not available."""
        texts = RunTexts(self._folder)
        try:
            views = [
                view
                for order in ORDERS
                for view in texts.reader.samples(SampleQuery(step=step, order=order, limit=SAMPLES // 2))
            ]
            return [
                {
                    "step": step, "group": view.sample.group_id, "sample": view.sample.sample_id,
                    "prompt": texts.prompt(view), "response": texts.response(view),
                    "reward": view.sample.reward, "answer": view.sample.answer or "", "tokens": view.tokens,
                    "resumes": view.sample.resumes,
                }
                for view in views
            ]  # fmt: skip
        except RlsysError as e:
            log.warning("no samples of step %d: %s", step, e)
            return []

    def close(self) -> None:
        """Close all trackers."""
        for tracker in self._trackers.values():
            tracker.close()


def follow(folder: Path, names: Sequence[str], end_descriptor: int | None) -> dict[str, int]:
    """Write the metrics of a run to its trackers.

    Args:
        folder: run folder.
        names: names of the trackers.
        end_descriptor: file descriptor that is closed when no more lines will follow; None: write only the existing
            lines.

    Returns:
        Name of a tracker -> number of written lines.
    """
    follower = Follower(folder, names)
    try:
        while end_descriptor is not None:
            follower.catch_up()
            readable, _, _ = select.select([end_descriptor], [], [], POLL_SECONDS)
            if readable and not os.read(end_descriptor, 1):
                break
        follower.catch_up()
    finally:
        follower.close()
    return follower.lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write the metrics of a run to its trackers. Started by rlsys train."
    )
    parser.add_argument("run", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    names = load_run_config(args.run).run.trackers
    run_role(lambda: log.info("lines written: %s", follow(args.run, names, sys.stdin.fileno())))


if __name__ == "__main__":
    main()
