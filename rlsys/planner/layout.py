"""Config -> who works on which node and which of its GPUs. Pure.

Trainer ranks come first, because rank 0 talks to the rollout process over loopback: both are on node 0, where the
supervisor is. Colocated engines begin there as well and share the GPUs; disaggregated ones take what is left.
Ranks and engines fill the GPUs in order, so that splits may be uneven; an engine never lies across a boundary
between nodes unless it needs whole nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.config import Config
from rlsys.core.devices import have_cuda
from rlsys.core.errors import UserError
from rlsys.weights.push_plan import DeviceLocation, PushPlan, plan_push


@dataclass(frozen=True)
class NodeShare:
    """`count` processes (trainer ranks, or an engine's tensor-parallel ranks) on one node.

    `gpus` are indices into what the scheduler gives the run on that node, one a process; empty without GPUs.
    """

    node: int
    count: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    trainer: list[NodeShare]
    engines: list[list[NodeShare]]
    """Of each engine, the nodes that it is on."""


def lay_out(config: Config) -> Layout:
    """Raises UserError, with both numbers, when the nodes do not hold what the config asks for."""
    return _on_gpus(config) if config.launch.gpus_per_node else _on_cpus(config)


def push_plan(config: Config, layout: Layout) -> PushPlan:
    """Who gives weights to whom. Raises UserError when they cannot reach an engine."""
    trainer, engines = _places([layout.trainer])[0], _places(layout.engines)
    chains = config.engine.chains
    return plan_push(trainer, engines, config.weights.method, gpus=on_cuda(config), chains=chains)


def _places(units: list[list[NodeShare]]) -> list[list[DeviceLocation]]:
    """Of every process of each unit. Without a plan for GPUs they are counted, as the processes themselves do it."""
    taken: dict[int, int] = {}
    out = []
    for shares in units:
        places = []
        for share in shares:
            first = taken.get(share.node, 0)
            taken[share.node] = first + share.count
            devices = share.gpus or range(first, first + share.count)
            places += [DeviceLocation(share.node, device) for device in devices]
        out.append(places)
    return out


def _on_cpus(config: Config) -> Layout:
    """Nodes without GPUs are shared freely; disaggregated engines have nodes of their own if there are several."""
    nodes, world, count = config.launch.nodes, config.parallel.world_size, config.engine.count
    own = min(count, nodes - 1) if config.launch.placement == "disaggregated" else 0
    for_trainer = min(world, nodes - own)
    base, more = divmod(world, for_trainer)
    first, width = (nodes - own, own) if own else (0, nodes)
    return Layout(
        [NodeShare(n, base + (n < more)) for n in range(for_trainer)],
        [[NodeShare(first + i % width, config.engine.tp_of(i))] for i in range(count)],
    )


def _on_gpus(config: Config) -> Layout:
    launch, world = config.launch, config.parallel.world_size
    per_node = launch.gpus_per_node
    total = launch.nodes * per_node
    if world > total:
        raise UserError(
            f"parallel makes {world} trainer ranks, but launch.nodes * gpus_per_node = {total} GPUs"
        )
    at = world if launch.placement == "disaggregated" else 0
    engines = []
    for index in range(config.engine.count):
        tp = config.engine.tp_of(index)
        start = _engine_start(at, tp, per_node)
        at = start + tp
        if at > total:
            others = f" beside {world} trainer ranks" if launch.placement == "disaggregated" else ""
            raise UserError(
                f"engine.count = {config.engine.count} engines of {_sizes(config)}{others} do not fit "
                f"launch.nodes * gpus_per_node = {launch.nodes} * {per_node} GPUs: engine {index} finds no place"
            )
        engines.append(_shares(start, tp, per_node))
    return Layout(_shares(0, world, per_node), engines)


def _sizes(config: Config) -> str:
    """Of its engines, in words."""
    e = config.engine
    pools = ", ".join(f"{p.name} {p.count} x tp {p.tp or e.tp}" for p in e.pools)
    return f"engine.pools = [{pools}]" if pools else f"engine.tp = {e.tp}"


def _engine_start(at: int, tp: int, per_node: int) -> int:
    """The first GPU from `at` on where an engine may begin."""
    left = per_node - at % per_node
    if tp > per_node and tp % per_node:
        raise UserError(f"engine.tp = {tp} needs whole nodes, but launch.gpus_per_node = {per_node}")
    fits = left >= tp or (tp > per_node and left == per_node)
    return at if fits else at + left


def _shares(start: int, count: int, per_node: int) -> list[NodeShare]:
    """GPUs start .. start + count - 1 of all nodes in a row, cut at the boundaries between nodes."""
    out = []
    while count:
        node, first = divmod(start, per_node)
        n = min(count, per_node - first)
        out.append(NodeShare(node, n, tuple(range(first, first + n))))
        start, count = start + n, count - n
    return out


def on_cuda(config: Config) -> bool:
    """Whether the run's processes compute on GPUs: planned ones, or those that are here."""
    return config.launch.gpus_per_node > 0 or have_cuda()
