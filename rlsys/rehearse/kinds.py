"""Selection of representative ranks, and their rehearsal requests. Pure, without torch.

Ranks of one pipeline stage have the same number of layers, heads and experts, so that one represents all. Stages
differ: the first has the embedding, often dense layers, and most micro-batches in flight; the last has the head.
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
    """Rehearsal request for a rank.

    `skew`: tokens of the busiest experts over the mean. `micro_batches`: of the update; by default just enough to
    fill the pipeline.
    """

    rank: int
    skew: float = 1.0
    micro_batches: int | None = None


def stage_of(config: Config, rank: int) -> int:
    """Return the pipeline stage of a rank: Megatron numbers ranks stage by stage."""
    return rank // (config.parallel.world_size // config.parallel.pp)


def one_rank(config: Config, rank: int) -> list[int]:
    """Return `[rank]`.

    Raises:
        UserError: the rank is not in the layout.
    """
    size = config.parallel.world_size
    if not 0 <= rank < size:
        raise UserError(f"--rank {rank}: expected 0 to {size - 1}, the ranks of parallel")
    return [rank]


def kinds_of_rank(config: Config, hf: HFConfig, every_stage: bool = False) -> list[int]:
    """Return the first rank of the first, the fullest middle and the last stage, or of `every_stage`."""
    p = config.parallel
    in_stage = p.world_size // p.pp
    middle = range(1, p.pp - 1)
    stages = [0, *middle, p.pp - 1] if every_stage else [0, *fullest(config, hf, middle), p.pp - 1]
    return [stage * in_stage for stage in sorted(set(stages))]


def fullest(config: Config, hf: HFConfig, stages: range) -> list[int]:
    """Return the stage with the most expert layers; in a tie the first, which has the most micro-batches in
    flight."""
    layers = stage_layers(hf.layers, config.parallel.pp)[0]
    experts = {s: sum(hf.moe_layers[s * layers : (s + 1) * layers]) for s in stages}
    return [max(stages, key=lambda s: (experts[s], -s))] if stages else []


def name_of_kind(stage: int, stages: int) -> str:
    if stages == 1:
        return "only stage"
    return {0: "first stage", stages - 1: "last stage"}.get(stage, f"stage {stage}")


def micro_batches(config: Config, request: Request) -> int:
    """Return a number of micro-batches with which stage s of p has p - s in flight; two without a pipeline.

    An interleaved pipeline has more in flight, and processes them in rounds of p.
    """
    p = config.parallel
    if request.micro_batches is not None:
        return request.micro_batches
    return 2 * p.pp if p.vpp > 1 else max(2, p.pp)


def node_of(config: Config) -> Callable[[int], int]:
    """Return a function from a rank to its node: ranks fill nodes in order (rlsys.planner.layout).

    Without launch.gpus_per_node there is one node.
    """
    per_node = config.launch.gpus_per_node or config.parallel.world_size
    return lambda rank: rank // per_node
