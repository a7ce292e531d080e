"""Rehearsal of one rank, as `python -m rlsys.rehearse.rank`.

The process reads a request as JSON from stdin, writes progress to stderr, and writes the figures as JSON to stdout.
It is a separate process, because the stand-ins and the fake world affect the whole process.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import megatron_patches
from rlsys.config import Config, load_config
from rlsys.convert.config import HFConfig
from rlsys.convert.hash_shares import hash_shares
from rlsys.core.errors import RlsysError
from rlsys.obs.role import end_with_parent
from rlsys.rehearse import world
from rlsys.rehearse.figures import HOST, Figures
from rlsys.rehearse.kinds import Request, micro_batches, node_of, stage_of

if TYPE_CHECKING:
    from rlsys.rehearse.step import Rehearsal

ON_GPU = ("gloo_uneven", "gloo_device")
"""Megatron patches for gloo. A rehearsal of GPUs does not apply them, because NCCL does not need them."""


def report_progress(text: str) -> None:
    """Print a line of progress."""
    print(f"rlsys: {text}", file=sys.stderr, flush=True)


def rehearse(config: Config, request: Request) -> Figures:
    """Rehearse build, scoring pass, one update and the gathering of full tensors of a rank.

    Permanently replaces the process groups of this process.

    Raises:
        UserError: The layout does not fit the model.
        PatchError: The source of a replaced function has changed.
    """
    gpu = config.launch.gpus_per_node > 0
    megatron_patches.apply(without=ON_GPU if gpu else ())
    world.enter(request.rank, config.parallel.world_size)
    from rlsys.rehearse.stand_ins import When, installed  # imports megatron
    from rlsys.rehearse.step import Rehearsal
    from rlsys.rehearse.tensors import FakeTensors

    fake = FakeTensors()
    rehearsal = Rehearsal(config, node_of(config), fake, report_progress)
    conditions: set[When] = {"always", "fake", "gpu"} if gpu else {"always", "fake"}
    with installed(conditions, rehearsal.setting(request.skew)):
        rehearsal.build()
        rehearsal.step(micro_batches(config, request))
    return figures(config, request, rehearsal, dict(fake.guessed), gpu)


def figures(
    config: Config, request: Request, rehearsal: Rehearsal, guessed: dict[str, int], gpu: bool
) -> Figures:
    """Collect the figures of a rehearsal.

    Args:
        config: The config.
        request: The request.
        rehearsal: The rehearsal, after its step.
        guessed: See FakeTensors.guessed.
        gpu: Whether the layout is for GPUs.
    """
    meter, trainer, p = rehearsal.meter, rehearsal.trainer, config.parallel
    live = dict(meter.memory.nonzero)
    offloaded_share = config.trainer.offload_optimizer if gpu else 0.0
    for bytes_by_kind in (live, *(phase.peak for phase in meter.phases)):
        move_to_host(bytes_by_kind, offloaded_share)
    notes = []
    if config.model.fp8_trainer:
        notes.append(f"model.fp8 = {config.model.fp8} is rehearsed in bfloat16")
    if config.algo.critic is not None:
        notes.append("the critic of algo.critic, a second model on the same ranks, is not rehearsed")
    return Figures(
        rank=request.rank,
        world=p.world_size,
        stage=stage_of(config, request.rank),
        stages=p.pp,
        layers=sum(len(cast("Any", module.decoder).layers) for module in trainer.modules),
        parameters=sum(parameter.numel() for _, parameter in trainer.named_parameters()),
        micro_batches=len(rehearsal.batch),
        tokens=math.prod(meter.from_neighbour[:1]) * p.cp * p.tp,
        longest=max(rehearsal.batch[0].sequence_lengths),
        live_bytes=live,
        phases=meter.phases,
        collectives=meter.collectives.calls,
        guessed=guessed,
        hashed=hashed_bytes(config, trainer.served_config, request.rank, gpu),
        resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        notes=notes,
    )


def hashed_bytes(config: Config, model: HFConfig, rank: int, gpu: bool) -> int:
    """Return the number of bytes that a rank hashes in a weight update that is not sharded.

    Args:
        config: The config.
        model: Configuration of the served model.
        rank: Global rank.
        gpu: Whether the layout is for GPUs.
    """
    shares = hash_shares(model, config.parallel.world_size, experts_together=not gpu)
    width = 4 if config.model.dtype == "float32" else 2
    return shares.elements[rank] * width * len(config.engine.tps)


def move_to_host(bytes_by_kind: dict[str, int], share: float) -> None:
    """Count a share of the optimizer state as host memory (trainer.offload_optimizer).

    A rehearsal runs without CUDA, where Megatron itself offloads nothing.
    """
    host_bytes = int(bytes_by_kind.get("optimizer", 0) * share)
    if host_bytes:
        bytes_by_kind["optimizer"] -= host_bytes
        bytes_by_kind[HOST] = bytes_by_kind.get(HOST, 0) + host_bytes


def main() -> None:
    end_with_parent()  # an interrupted `rlsys rehearse` leaves no rank behind
    warnings.filterwarnings("ignore")
    raw = json.load(sys.stdin)
    try:
        config = load_config(Path(raw["config"]), raw["overrides"])
        result = rehearse(config, Request(**raw["request"]))
    except RlsysError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        sys.exit(e.exit_code)
    print(json.dumps(result.as_json()))


if __name__ == "__main__":
    main()
