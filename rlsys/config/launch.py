"""The config sections `run` and `launch`: the run's folder, and where its processes start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlsys.config.section import FilePath, Gigabytes, NonNegative, Positive, Seconds, Section


class ProfileSection(Section):
    steps: Annotated[list[Positive], Field(min_length=1)]
    """Train steps, from 1. Each file may have hundreds of MB for a large model."""
    ranks: list[NonNegative] = Field(default=[0], min_length=1)
    """Trainer ranks that write a file for each step."""


class RunConfig(Section):
    dir: FilePath = Path("runs/default")
    """The run's folder: resolved config, metrics, rollouts, checkpoints, logs and report. The same command with
    the same folder continues the run."""
    share: Literal["group"] | None = None
    """Further readers of the folder, texts of samples included: `group`, the folder's Unix group. Unset: nobody
    (mode 0700)."""
    trackers: list[Literal["wandb", "mlflow"]] = Field(default_factory=list)
    """Trackers that get every line of metrics.jsonl and tables of samples. Each needs its package:
    pip install 'rlsys[wandb]'. TensorBoard files are always written."""
    spans: bool = False
    """Send OpenTelemetry spans of samples and train steps, by OTLP over HTTP, to where OTEL_EXPORTER_OTLP_ENDPOINT
    says. Needs pip install 'rlsys[otel]'. time_spans says what they cost."""
    profile: ProfileSection | None = None
    """Train steps that torch's profiler records, on chosen trainer ranks. Unset: none."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of prompts, samples and weights that no folder gives. Change it to repeat an experiment with other
    random numbers."""


class LaunchConfig(Section):
    deleted: ClassVar = {"silence_seconds": 900.0}

    backend: Literal["local", "slurm", "ray"] = "local"
    """Launcher of the processes: this machine (local), tasks of a Slurm job, or actors of a Ray cluster."""
    nodes: Annotated[int, Field(gt=0, le=65536)] = 1
    """Machines of the run. More than one needs the backend slurm or ray, and a run.dir that all of them see."""
    gpus_per_node: Annotated[int, Field(ge=0, le=1024)] = 0
    """GPUs of the run on each machine. 0: processes see all devices of their machine (one machine, or no
    GPU)."""
    gpu_memory_gb: Gigabytes = 80.0
    """Memory of one GPU in GB, for rlsys explain, plan and rehearse, and for the size of an engine's cache."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """colocated: trainer and engines share the GPUs and take turns. disaggregated: each has its own GPUs, and
    with max_staleness >= 1 generation goes on while the trainer works."""
    release_memory: bool = False
    """Colocated on GPUs: engines give back the memory of weights and cache while the trainer works. Use it when
    both do not fit at once."""
    grace_seconds: Seconds = 15.0
    """Seconds a process gets to end by itself before it is killed."""
    preemption_seconds: Seconds = 30.0
    """Seconds between the scheduler's SIGTERM or SIGUSR1 and its SIGKILL. A checkpoint that would take longer
    is not begun."""
    max_restarts: NonNegative = 3
    """Restarts of a role without a train step in between. One more death stops the run."""
    min_engines: Positive | None = None
    """Fewest engines to begin with, and to go on with when others do not start or die too often, which are tried
    again from time to time. Unset: all of them."""
    max_engines: Positive | None = None
    """Most engines, with those that join while the run goes on (rlsys engines join); further ones wait. Unset: any
    number."""
    spare_nodes: NonNegative = 0
    """Machines that `rlsys submit` asks for beyond nodes. One of them takes the place of a node that is lost, and the
    run goes on from its last checkpoint without being queued again; until then it costs its price and does nothing.
    Only for the backend slurm: Ray takes any node that it has."""
    srun_args: list[str] = Field(default_factory=list)
    """Further arguments of each role's srun, for example of a container plug-in (backend slurm)."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on loopback where Prometheus reads the run (docs/seeing.md). 0 finds a free one; unset: none."""
