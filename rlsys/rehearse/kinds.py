"""Selection of representative ranks, and their rehearsal requests. Pure, without torch.

Ranks of one pipeline stage have the same number of layers, heads and experts, so that one of them represents all.
Stages differ: the first has the embedding, often dense layers, and the most micro-batches in flight; the last has the
head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import stage_layers
from rlsys.core.errors import UserError


@dataclass(frozen=True)
class Request:
    """Request to rehearse a rank.

    Attributes:
        rank: Global rank.
        skew: Number of tokens of the busiest experts, divided by the mean.
        micro_batches: Number of micro-batches of the update; None: the smallest number that fills the pipeline.
    """

    rank: int
    skew: float = 1.0
    micro_batches: int | None = None


def stage_of(config: Config, rank: int) -> int:
    """Return the pipeline stage of a rank. Megatron numbers the ranks of one stage after those of another."""
    return rank // (config.parallel.world_size // config.parallel.pp)


def one_rank(config: Config, rank: int) -> list[int]:
    """Return `[rank]` if the layout has this rank.

    Raises:
        UserError: The layout has no such rank.
    """
    size = config.parallel.world_size
    if not 0 <= rank < size:
        raise UserError(f"--rank {rank}: expected 0 to {size - 1}, the ranks of parallel")
    return [rank]


def kinds_of_rank(config: Config, hf: HFConfig, every_stage: bool = False) -> list[int]:
    """Return the first rank of each representative pipeline stage.

    These are the first, the fullest middle and the last stage; with `every_stage` all stages.
    """
    p = config.parallel
    ranks_per_stage = p.world_size // p.pp
    middle = range(1, p.pp - 1)
    stages = [0, *middle, p.pp - 1] if every_stage else [0, *fullest(config, hf, middle), p.pp - 1]
    return [stage * ranks_per_stage for stage in sorted(set(stages))]


def fullest(config: Config, hf: HFConfig, stages: range) -> list[int]:
    """Return the stage of `stages` with the most layers with experts, as a list; empty without stages.

    Of equal stages, it is the first, which has the most micro-batches in flight.
    """
    layers = stage_layers(hf.layers, config.parallel.pp)[0]
    experts = {s: sum(hf.moe_layers[s * layers : (s + 1) * layers]) for s in stages}
    return [max(stages, key=lambda s: (experts[s], -s))] if stages else []


def name_of_kind(stage: int, stages: int) -> str:
    """Return the readable name of a pipeline stage."""
    if stages == 1:
        return "only stage"
    return {0: "first stage", stages - 1: "last stage"}.get(stage, f"stage {stage}")


def micro_batches(config: Config, request: Request) -> int:
    """Return the number of micro-batches to rehearse.

    By default it is the smallest number with which stage s of p stages has p - s micro-batches in flight, but at
    least 2. An interleaved pipeline has more in flight, and processes them in rounds of p: it gets two rounds.
    """
    p = config.parallel
    if request.micro_batches is not None:
        return request.micro_batches
    return 2 * p.pp if p.vpp > 1 else max(2, p.pp)


def node_of(config: Config) -> Callable[[int], int]:
    """Return a function that returns the node of a rank.

    Ranks fill nodes in order (rlsys.planner.layout). Without launch.gpus_per_node, all ranks are on node 0.
    """
    per_node = config.launch.gpus_per_node or config.parallel.world_size
    return lambda rank: rank // per_node
