"""Names of files in a run folder."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE = "config.yaml"
EVALUATIONS_FOLDER = "evaluations"
ANSWERS_FILE = "answers.jsonl"
"""Responses of an evaluation by `rlsys eval`."""
PROGRESS_FILE = "progress.txt"
"""Progress of an evaluation by `rlsys eval`, or of `rlsys try`: one line."""


def newest_checkpoint_step(run: Path) -> int:
    """Return the train step of a run's newest complete checkpoint; 0 if there is none."""
    manifests = (run / "checkpoints").glob("step-*/manifest.json")
    names = (path.parent.name.removeprefix("step-") for path in manifests)
    return max((int(name) for name in names if name.isdecimal()), default=0)
