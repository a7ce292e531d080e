"""Layout: assignment of trainer ranks and engines to nodes and GPUs. Pure.

Trainer ranks come first, because rank 0 and the rollout process communicate by loopback: both are on node 0, as is
the supervisor. Colocated engines also start there and share the GPUs; disaggregated ones use the remaining GPUs.
Ranks and engines fill the GPUs in order, so that splits may be uneven; an engine spans several nodes only if it
needs whole nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.config import Config
from rlsys.core.devices import have_cuda
from rlsys.core.errors import UserError
from rlsys.weights.push_plan import DeviceLocation, PushPlan, plan_push


@dataclass(frozen=True)
class NodeShare:
    """Processes of a role (trainer ranks, or an engine's tensor-parallel ranks) on one node.

    Attributes:
        node: index of the node.
        count: number of processes.
        gpus: one index per process, relative to the GPUs that the scheduler gave the run there; empty without
            GPUs.
    """

    node: int
    count: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Nodes and GPUs of all roles."""

    trainer: list[NodeShare]
    engines: list[list[NodeShare]]
    """The nodes of each engine."""


def lay_out(config: Config) -> Layout:
    """Compute the layout of a config.

    Raises:
        UserError: the nodes are too few; the message has both numbers.
    """
    return _on_gpus(config) if config.launch.gpus_per_node else _on_cpus(config)


def push_plan(config: Config, layout: Layout) -> PushPlan:
    """Return the plan of weight updates.

    Raises:
        UserError: the weights cannot reach an engine.
    """
    trainer, engines = _locations([layout.trainer])[0], _locations(layout.engines)
    chains = config.engine.chains
    return plan_push(trainer, engines, config.weights.method, gpus=on_cuda(config), chains=chains)


def _locations(units: list[list[NodeShare]]) -> list[list[DeviceLocation]]:
    """Return the location of every process of each unit. Without GPUs, processes are numbered per node."""
    next_index: dict[int, int] = {}
    out = []
    for shares in units:
        locations = []
        for share in shares:
            first = next_index.get(share.node, 0)
            next_index[share.node] = first + share.count
            devices = share.gpus or range(first, first + share.count)
            locations += [DeviceLocation(share.node, device) for device in devices]
        out.append(locations)
    return out


def _on_cpus(config: Config) -> Layout:
    """Distribute roles over nodes without GPUs; disaggregated engines have separate nodes if there are several."""
    nodes, world, count = config.launch.nodes, config.parallel.world_size, config.engine.count
    engine_nodes = min(count, nodes - 1) if config.launch.placement == "disaggregated" else 0
    for_trainer = min(world, nodes - engine_nodes)
    base, remainder = divmod(world, for_trainer)
    first, width = (nodes - engine_nodes, engine_nodes) if engine_nodes else (0, nodes)
    return Layout(
        [NodeShare(n, base + (n < remainder)) for n in range(for_trainer)],
        [[NodeShare(first + i % width, config.engine.tp_of(i))] for i in range(count)],
    )


def _on_gpus(config: Config) -> Layout:
    """Distribute roles over GPUs."""
    launch, world = config.launch, config.parallel.world_size
    per_node = launch.gpus_per_node
    total = launch.nodes * per_node
    if world > total:
        raise UserError(
            f"parallel needs {world} trainer ranks: expected at least as many GPUs, found launch.nodes * "
            f"gpus_per_node = {total}"
        )
    at = world if launch.placement == "disaggregated" else 0
    engines = []
    for index in range(config.engine.count):
        tp = config.engine.tp_of(index)
        start = _engine_start(at, tp, per_node)
        at = start + tp
        if at > total:
            suffix = f" and {world} trainer ranks" if launch.placement == "disaggregated" else ""
            raise UserError(
                f"engine.count = {config.engine.count} engines of {_sizes(config)}{suffix} do not fit launch.nodes "
                f"* gpus_per_node = {launch.nodes} * {per_node} GPUs: no GPUs are free for engine {index}"
            )
        engines.append(_shares(start, tp, per_node))
    return Layout(_shares(0, world, per_node), engines)


def _sizes(config: Config) -> str:
    """Describe the sizes of the engines."""
    e = config.engine
    pools = ", ".join(f"{p.name} {p.count} x tp {p.tp or e.tp}" for p in e.pools)
    return f"engine.pools = [{pools}]" if pools else f"engine.tp = {e.tp}"


def _engine_start(first: int, tp: int, per_node: int) -> int:
    """Return the first GPU from `first` on at which an engine may start."""
    remaining = per_node - first % per_node
    if tp > per_node and tp % per_node:
        raise UserError(f"engine.tp = {tp} needs whole nodes, but launch.gpus_per_node = {per_node}")
    fits = remaining >= tp or (tp > per_node and remaining == per_node)
    return first if fits else first + remaining


def _shares(start: int, count: int, per_node: int) -> list[NodeShare]:
    """Return `count` consecutive GPUs from `start` on, split at the boundaries between nodes."""
    out = []
    while count:
        node, first = divmod(start, per_node)
        n = min(count, per_node - first)
        out.append(NodeShare(node, n, tuple(range(first, first + n))))
        start, count = start + n, count - n
    return out


def on_cuda(config: Config) -> bool:
    """Return whether the run's processes use GPUs: planned ones, or those of this host."""
    return config.launch.gpus_per_node > 0 or have_cuda()
