"""Whether a preempted run may ask for another session: not after several in a row that brought nothing. And whether
the session that it got finds its folder.

RUN/requeues.json   {progress, without}: the progress at the last requeue, and how many came since it grew
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from launch.rundir import write_whole
from rlsys.core.errors import UserError

FILE_NAME = "requeues.json"


def may_requeue(run_dir: Path, progress: int, most: int) -> bool:
    """Counts this requeue. False when `most` in a row came without progress in between, and nothing is counted then.

    progress: a number that grows with what is on disk for good, as tokens in the ledger.
    """
    before, without = _last(run_dir)
    without = 0 if progress > before else without + 1
    if without > most:
        return False
    write_whole(run_dir / FILE_NAME, json.dumps({"progress": max(progress, before), "without": without}))
    return True


def check_folder(run_dir: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Raises UserError when Slurm has started this job before, but on a node whose disk has the folder: begun again
    here, the run would be another one, from step 0."""
    before = environment.get("SLURM_RESTART_COUNT", "0")
    if before != "0" and not run_dir.exists():
        raise UserError(
            f"run.dir = {run_dir}: not on this node, but Slurm has started this job before "
            f"(SLURM_RESTART_COUNT = {before}); expected a folder that every node sees"
        )


def _last(run_dir: Path) -> tuple[int, int]:
    """An unreadable file counts as none: it is only a limit."""
    try:
        found = json.loads((run_dir / FILE_NAME).read_text(encoding="utf-8"))
        return int(found["progress"]), int(found["without"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1, 0
