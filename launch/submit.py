"""`rlsys submit`: a run as a Slurm job. The job script is stored with the logs, and can be edited and resubmitted."""

from __future__ import annotations

import math
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from launch.backends.slurm import client
from launch.rundir import make_run_folder
from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.imports import module_command

SCRIPT, JOB = Path("logs/submit.sbatch"), Path("logs/job")
"""Files in the run folder: the job script, and the id of the job."""
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|infinite|unlimited", re.IGNORECASE)
_PARTITION = re.compile(r"[^\s,]+(,[^\s,]+)*")
_MARGIN = 10
"""Seconds that are added to the time of a signal, because Slurm may deliver it late."""


@dataclass(frozen=True)
class JobOptions:
    """Options of `rlsys submit`.

    Attributes:
        time: time limit of the job, as sbatch expects it; None for the cluster's default.
        partition: partition, or several with commas; None for the cluster's default.
        extra: further options of sbatch, such as `--qos=high`.
    """

    time: str | None = None
    partition: str | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UserError: sbatch would reject or misinterpret an option.
        """
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise UserError(
                f"--time {self.time!r}: expected minutes, M:S, H:M:S or D-H[:M[:S]], such as 8:00:00"
            )
        if self.partition is not None and not _PARTITION.fullmatch(self.partition):
            raise UserError(
                f"--partition {self.partition!r}: expected the name of a partition, or several separated by commas"
            )
        for option in self.extra:
            if not option.startswith("-"):
                raise UserError(
                    f"--sbatch {option!r}: expected an option of sbatch, such as --sbatch=--qos=high"
                )


def job_script(config: Config, config_file: Path, overrides: list[str], options: JobOptions) -> str:
    """Return the script of a Slurm job that runs `rlsys train`.

    Args:
        config: config of the run.
        config_file: the config file.
        overrides: overrides of config fields on the command line.
        options: options of `rlsys submit`.

    Raises:
        UserError: an option contains characters that are not printable.
    """
    launch = config.launch
    lines = _sbatch_lines(config, options)
    if invalid := [line for line in lines if not line.isprintable()]:
        raise UserError(
            f"{invalid[0]!r}: an option of sbatch must not contain line breaks or control characters"
        )
    command = module_command("rlsys.cli.main", "train", str(config_file), *overrides)
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


def _sbatch_lines(config: Config, options: JobOptions) -> list[str]:
    """Return the options of sbatch, quoted.

    The job gets whole nodes. Slurm requeues it when it is preempted or loses a node. If the run can continue without
    a node, the job survives the loss of a node (--no-kill), and the supervisor decides.
    """
    launch = config.launch
    options_by_name = {
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
    lines = [shlex.quote(f"--{name}={value}") for name, value in options_by_name.items() if value is not None]
    lines += ["--exclusive", "--requeue"]
    if not any(option.startswith("--mem") for option in options.extra):
        lines.append("--mem=0")  # all memory of the nodes, because the partition's default may be small
    if launch.spare_nodes or launch.min_engines is not None:
        lines.append("--no-kill")
    return [*lines, *options.extra]


def submit(config: Config, script: str) -> str:
    """Write the script into the run's logs, submit it to Slurm, and return the id of the job.

    Raises:
        UserError: the run folder cannot be written, or sbatch is missing.
        RunError: sbatch failed.
    """
    path = config.run.dir / SCRIPT
    make_run_folder(config)
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(script, encoding="utf-8")
    except OSError as e:
        raise UserError(f"run.dir = {config.run.dir}: cannot write {SCRIPT}: {e.strerror}") from None
    job = client(["sbatch", "--parsable", str(path)]).strip().split(";")[0]
    (config.run.dir / JOB).write_text(job + "\n", encoding="utf-8")
    return job
