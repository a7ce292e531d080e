"""`rlsys submit`: a run as a Slurm job. The script is short, stays with the logs, and can be edited and resent."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.backends.slurm import client
from rlsys.config import Config
from rlsys.core.errors import UserError

SCRIPT, JOB = Path("logs/submit.sbatch"), Path("logs/job")
"""In the run folder: what was sent, and the id that Slurm gave it."""
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|infinite|unlimited", re.IGNORECASE)
_PARTITION = re.compile(r"[^\s,]+(,[^\s,]+)*")
_MARGIN = 10
"""Seconds that Slurm may be late with a signal."""


@dataclass(frozen=True)
class JobOptions:
    """Options of `rlsys submit`; None: the cluster's default."""

    time: str | None = None
    partition: str | None = None
    extra: tuple[str, ...] = ()
    """Further options of sbatch, as `--qos=high`."""

    def __post_init__(self) -> None:
        """Raises UserError for what sbatch would refuse, or take for another thing."""
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise UserError(f"--time {self.time!r}: expected minutes, M:S, H:M:S or D-H[:M[:S]], as 8:00:00")
        if self.partition is not None and not _PARTITION.fullmatch(self.partition):
            raise UserError(
                f"--partition {self.partition!r}: expected a name, or several with commas between"
            )
        for option in self.extra:
            if not option.startswith("-"):
                raise UserError(f"--sbatch {option!r}: expected an option of sbatch, as --sbatch=--qos=high")


def job_script(config: Config, config_file: Path, overrides: list[str], options: JobOptions) -> str:
    """Whole nodes; requeued when the job is preempted or loses a node, and near the time limit by itself. Where the
    run can do without a node, the job outlives its loss, and the supervisor decides (--no-kill)."""
    launch = config.launch
    given = {
        "job-name": f"rlsys-{config.run.dir.name}",
        "nodes": str(launch.nodes + launch.spare_nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(launch.gpus_per_node) if launch.gpus_per_node else None,
        "time": options.time,
        "partition": options.partition,
        "output": str((config.run.dir / "logs" / "slurm-%j.log").absolute()),
        "open-mode": "append",
        "signal": f"B:USR1@{math.ceil(launch.preemption_seconds) + _MARGIN}",
    }
    # sbatch splits its lines at spaces outside of quotes, as a shell does.
    lines = [shlex.quote(f"--{name}={value}") for name, value in given.items() if value is not None]
    lines += ["--exclusive", "--requeue"]
    if launch.spare_nodes or launch.min_engines is not None:
        lines.append("--no-kill")
    lines += options.extra
    if broken := [line for line in lines if not line.isprintable()]:
        raise UserError(f"{broken[0]!r}: an option of sbatch cannot have line breaks or control characters")
    command = [sys.executable, "-m", "rlsys.cli.main", "train", str(config_file), *overrides]
    command += ["launch.backend=slurm", f"launch.nodes={launch.nodes}"]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            f"cd {shlex.quote(os.getcwd())} || exit 1",
            "# exec: Slurm's signals for the batch script must reach the supervisor itself.",
            f"exec {shlex.join(command)}",
            "",
        ]
    )


def submit(config: Config, script: str) -> str:
    """Write the script into the run's logs and hand it to Slurm; the job's id."""
    path = config.run.dir / SCRIPT
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script, encoding="utf-8")
    except OSError as e:
        raise UserError(f"run.dir = {config.run.dir}: cannot write {SCRIPT} into it: {e.strerror}") from None
    job = client(["sbatch", "--parsable", str(path)]).strip().split(";")[0]
    (config.run.dir / JOB).write_text(job + "\n", encoding="utf-8")
    return job
