"""Limit on requeues of a preempted run that makes no progress, and a check of a requeued job's run folder.

RUN/requeues.json   {progress, without}: the progress at the last requeue, and the number of requeues since it grew
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from rlsys.core.errors import UserError
from rlsys.core.folders import replace_file

FILE_NAME = "requeues.json"


def may_requeue(run_dir: Path, progress: int, limit: int) -> bool:
    """Count this requeue, unless `limit` consecutive ones made no progress; return whether it is allowed.

    `progress`: a number that grows with the data on disk, such as tokens in the ledger.
    """
    last_progress, without = _last(run_dir)
    without = 0 if progress > last_progress else without + 1
    if without > limit:
        return False
    requeues = {"progress": max(progress, last_progress), "without": without}
    replace_file(run_dir / FILE_NAME, json.dumps(requeues).encode(), sync=True)
    return True


def check_folder(run_dir: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Check that a restarted Slurm job finds its run folder: a new folder would start another run, from step 0.

    Raises:
        UserError: it does not.
    """
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    if restarts != "0" and not run_dir.exists():
        raise UserError(
            f"run.dir = {run_dir}: missing on this node, but Slurm has restarted this job "
            f"(SLURM_RESTART_COUNT = {restarts}); expected a folder on a file system that all nodes share"
        )


def _last(run_dir: Path) -> tuple[int, int]:
    """Return progress and count of the last requeue; an unreadable file counts as none."""
    try:
        fields = json.loads((run_dir / FILE_NAME).read_text(encoding="utf-8"))
        return int(fields["progress"]), int(fields["without"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1, 0
