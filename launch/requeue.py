"""Limit on requeues of a preempted run that makes no progress, and a check of a requeued job's run folder.

RUN/requeues.json has two fields:

    progress    the progress at the last requeue
    without     number of consecutive requeues without progress
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
    """Return whether the run may be requeued, and if so, count the requeue.

    Args:
        run_dir: the run folder.
        progress: a number that grows with the data on disk, such as the number of tokens in the ledger.
        limit: maximum number of consecutive requeues without progress.
    """
    last_progress, without_progress = _last_requeue(run_dir)
    without_progress = 0 if progress > last_progress else without_progress + 1
    if without_progress > limit:
        return False
    requeues = {"progress": max(progress, last_progress), "without": without_progress}
    replace_file(run_dir / FILE_NAME, json.dumps(requeues).encode(), sync=True)
    return True


def check_folder(run_dir: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Check that a requeued Slurm job has its run folder, because a new folder would start the run from step 0 again.

    Raises:
        UserError: the folder is missing.
    """
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    if restarts != "0" and not run_dir.exists():
        raise UserError(
            f"run.dir = {run_dir}: missing on this node, but Slurm has restarted this job "
            f"(SLURM_RESTART_COUNT = {restarts}); expected a folder on a file system that all nodes share"
        )


def _last_requeue(run_dir: Path) -> tuple[int, int]:
    """Return the progress at the last requeue, and the number of consecutive requeues without progress.

    Returns (-1, 0) if there was no requeue, or the file is invalid.
    """
    try:
        fields = json.loads((run_dir / FILE_NAME).read_text(encoding="utf-8"))
        return int(fields["progress"]), int(fields["without"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1, 0
