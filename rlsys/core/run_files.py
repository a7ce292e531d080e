"""Names of files in a run folder, and the step of its newest checkpoint."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE = "config.yaml"
EVALUATIONS_FOLDER = "evaluations"
ANSWERS_FILE = "answers.jsonl"
"""File of the responses of `rlsys eval`, one a line."""
PROGRESS_FILE = "progress.txt"
"""File with one line: the progress of `rlsys eval` or `rlsys try`."""


def newest_checkpoint_step(run: Path) -> int:
    """Return the train step of a run's newest complete checkpoint; 0 if there is none."""
    manifests = (run / "checkpoints").glob("step-*/manifest.json")
    names = (path.parent.name.removeprefix("step-") for path in manifests)
    return max((int(name) for name in names if name.isdecimal()), default=0)
