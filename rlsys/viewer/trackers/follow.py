"""Feeds a run's trackers from its metrics.jsonl: `python -m rlsys.viewer.trackers.follow RUN`, or `rlsys track RUN`.

A process of its own: what a tracker's package does, hangs in or dies of is no business of the run. It goes on until
the run has ended or its standard input is closed, and then writes what is left.
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

LOOK_SECONDS = 1.0
SAMPLES = 16
"""Rows of a table."""

ORDERS: tuple[Order, ...] = ("worst", "best")

log = logging.getLogger("rlsys.viewer.trackers")


class Follower:
    """One run folder, several trackers: opened with the first line of metrics, which gives the run its id."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Raises UserError: no run, or a package is missing."""
        if not (folder / CONFIG_FILE).is_file():
            raise UserError(f"{folder}: not a run folder: no {CONFIG_FILE} in it")
        check_trackers(names)
        self._folder, self._names = folder, names
        self._config: Config = load_run_config(folder)
        self._tail = MetricsTail(folder)
        self._trackers: dict[str, Tracker] = {}
        self._written: dict[str, dict[str, int]] = {}
        self.lines = dict.fromkeys(names, 0)
        """Written, by tracker."""

    def catch_up(self) -> None:
        """Write every line that a tracker lacks. A step that is trained again was written before: what it said then
        stays."""
        for entry in self._tail.read():
            if not self._trackers:
                self._open(entry["time"])
            if entry["kind"] in ("step", "eval"):
                self._write(entry)

    def _open(self, began: float) -> None:
        name = self._folder.resolve().name
        config: dict[str, Any] = self._config.model_dump(mode="json")
        run = TrackedRun(self._folder, run_id(name, began), name, config)
        for tracker in self._names:
            self._trackers[tracker] = open_tracker(tracker, run)
            self._written[tracker] = self._trackers[tracker].written()

    def _write(self, entry: dict[str, Any]) -> None:
        kind, step, time = entry["kind"], int(entry["step"]), entry["time"]
        lack = [n for n in self._names if self._written[n].get(kind, -1) < step]
        if not lack:
            return
        values = {
            name: value
            for name, value in entry.items()
            if isinstance(value, int | float) and name not in ("step", "time")
        }
        rows = self._rows(step) if kind == "step" and step % self._config.eval.every == 0 else []
        for name in lack:
            self._trackers[name].write(kind, step, time, values, rows)
            self._written[name][kind] = step
            self.lines[name] += 1

    def _rows(self, step: int) -> list[Row]:
        """Of the step's samples, the worst and the best; none when the ledger cannot be asked."""
        texts = RunTexts(self._folder)
        try:
            found = [
                seen
                for order in ORDERS
                for seen in texts.reader.samples(SampleQuery(step=step, order=order, limit=SAMPLES // 2))
            ]
            return [
                {
                    "step": step, "group": seen.sample.group_id, "sample": seen.sample.sample_id,
                    "prompt": texts.prompt(seen), "response": texts.response(seen),
                    "reward": seen.sample.reward, "answer": seen.sample.answer or "", "tokens": seen.tokens,
                    "resumes": seen.sample.resumes,
                }
                for seen in found
            ]  # fmt: skip
        except RlsysError as e:
            log.warning("no samples of step %d: %s", step, e)
            return []

    def close(self) -> None:
        for tracker in self._trackers.values():
            tracker.close()


def follow(folder: Path, names: Sequence[str], until: int | None) -> dict[str, int]:
    """Lines written, by tracker. `until`: a file descriptor whose end says that no more will come; None: what is
    there is all."""
    follower = Follower(folder, names)
    try:
        while until is not None:
            follower.catch_up()
            heard, _, _ = select.select([until], [], [], LOOK_SECONDS)
            if heard and not os.read(until, 1):
                break
        follower.catch_up()
    finally:
        follower.close()
    return follower.lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Feeds a run's trackers; started by rlsys train.")
    parser.add_argument("run", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    names = load_run_config(args.run).run.trackers
    run_role(lambda: log.info("lines written: %s", follow(args.run, names, sys.stdin.fileno())))


if __name__ == "__main__":
    main()
