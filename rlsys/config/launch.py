"""The config sections `run` and `launch`: the folder, the machines and the processes of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlsys.config.section import FilePath, Gigabytes, NonNegative, Positive, Seconds, Section


class ProfileSection(Section):
    steps: Annotated[list[Positive], Field(min_length=1)]
    """Numbers of the train steps to record, from 1. For a large model, a file may have hundreds of MB."""
    ranks: list[NonNegative] = Field(default=[0], min_length=1)
    """Trainer ranks that record; each writes one file per step."""


class RunConfig(Section):
    dir: FilePath = Path("runs/default")
    """Folder of the run, with the resolved config, metrics, rollouts, checkpoints, logs and report. The same command
    with the same folder continues the run."""
    share: Literal["group"] | None = None
    """Other users who may read the folder, including the texts of samples. group: the folder's Unix group. Unset: no
    other user (mode 0700)."""
    trackers: list[Literal["wandb", "mlflow"]] = Field(default_factory=list)
    """Trackers that receive the lines of metrics.jsonl and tables of samples. Each needs its package, for example
    pip install 'rlsys[wandb]'. TensorBoard files are always written."""
    spans: bool = False
    """Send OpenTelemetry spans of samples and train steps by OTLP over HTTP to the address in
    OTEL_EXPORTER_OTLP_ENDPOINT. Needs pip install 'rlsys[otel]'. The metric time_spans reports the cost in
    seconds."""
    profile: ProfileSection | None = None
    """Train steps that torch's profiler records, and the trainer ranks that record. Unset: none."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of prompts, samples and newly initialised weights. Change it to repeat an experiment with other random
    numbers."""


class LaunchConfig(Section):
    deleted: ClassVar = {"silence_seconds": 900.0}

    backend: Literal["local", "slurm", "ray"] = "local"
    """Launcher of the processes: this machine (local), tasks of a Slurm job, or actors of a Ray cluster."""
    nodes: Annotated[int, Field(gt=0, le=65536)] = 1
    """Number of machines. More than one needs the backend slurm or ray, and a run.dir that all of them can access."""
    gpus_per_node: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of GPUs that the run uses on each machine. 0: no GPU, or one machine whose processes see all of its
    devices."""
    gpu_memory_gb: Gigabytes = 80.0
    """Memory of one GPU in GB, for rlsys explain, plan and rehearse, and for the size of an engine's cache."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """Assignment of GPUs. colocated: trainer and engines share the GPUs and take turns. disaggregated: each has
    separate GPUs, and with max_staleness >= 1 engines generate while the trainer works."""
    release_memory: bool = False
    """Release the memory of the engines' weights and caches while the trainer works (colocated engines on GPUs). Use
    it if engines and trainer do not fit into the memory at the same time."""
    grace_seconds: Seconds = 15.0
    """Seconds in which a process can end by itself before it is killed."""
    preemption_seconds: Seconds = 30.0
    """Seconds between the scheduler's SIGTERM or SIGUSR1 and its SIGKILL. The run starts no checkpoint that would
    take longer."""
    max_restarts: NonNegative = 3
    """Maximum number of restarts of a role without a train step in between. One more crash stops the run."""
    min_engines: Positive | None = None
    """Minimum number of engines with which the run starts, and with which it continues after others failed to start
    or crashed too often. The run restarts failed engines from time to time. Unset: all engines."""
    max_engines: Positive | None = None
    """Maximum number of engines, including those that join during the run (rlsys engines join); later ones wait.
    Unset: no limit."""
    spare_nodes: NonNegative = 0
    """Number of machines that `rlsys submit` requests in addition to nodes. A spare machine replaces a lost one, and
    the run continues from its last checkpoint without being queued again; until then the machine is idle. Only for
    the backend slurm; Ray uses any node of its cluster."""
    srun_args: list[str] = Field(default_factory=list)
    """Additional arguments of each role's srun, for example for a container plug-in (backend slurm)."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Loopback port on which Prometheus can read the run's metrics (docs/seeing.md). 0: a free port. Unset: none."""
