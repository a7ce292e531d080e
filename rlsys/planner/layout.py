"""Layout: assignment of trainer ranks and engines to nodes and GPUs.

Trainer ranks start on node 0, because rank 0, the rollout process and the supervisor communicate by loopback.
Colocated engines also start on node 0 and share the GPUs; disaggregated engines use the remaining GPUs. Ranks and
engines fill the GPUs in order, so nodes may have different numbers of them. An engine is on several nodes only if it
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
        node: Index of the node.
        count: Number of processes.
        gpus: Index of each process's GPU among the node's GPUs of the run; empty without GPUs.
    """

    node: int
    count: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Nodes and GPUs of all roles.

    Attributes:
        trainer: Trainer ranks on each node.
        engines: Tensor-parallel ranks of each engine on each of its nodes.
    """

    trainer: list[NodeShare]
    engines: list[list[NodeShare]]


def lay_out(config: Config) -> Layout:
    """Compute the layout of a config.

    Raises:
        UserError: the roles need more GPUs than the nodes have, or an engine does not fit whole nodes.
    """
    return _on_gpus(config) if config.launch.gpus_per_node else _on_cpus(config)


def push_plan(config: Config, layout: Layout) -> PushPlan:
    """Return the plan of weight updates.

    Raises:
        UserError: weights.method cannot send the weights to an engine of this layout.
    """
    (trainer,) = _locations([layout.trainer])
    engines = _locations(layout.engines)
    chains = config.engine.chains
    return plan_push(trainer, engines, config.weights.method, gpus=on_cuda(config), chains=chains)


def _locations(units: list[list[NodeShare]]) -> list[list[DeviceLocation]]:
    """Return the locations of the processes of each unit, the trainer or an engine.

    Without GPUs, the device of a process is its number on the node.
    """
    next_index: dict[int, int] = {}
    unit_locations = []
    for shares in units:
        locations = []
        for share in shares:
            first = next_index.get(share.node, 0)
            next_index[share.node] = first + share.count
            devices = share.gpus or range(first, first + share.count)
            locations += [DeviceLocation(share.node, device) for device in devices]
        unit_locations.append(locations)
    return unit_locations


def _on_cpus(config: Config) -> Layout:
    """Distribute roles over nodes without GPUs.

    Disaggregated engines have nodes of their own, if there are several nodes.
    """
    nodes, world, count = config.launch.nodes, config.parallel.world_size, config.engine.count
    own_nodes = min(count, nodes - 1) if config.launch.placement == "disaggregated" else 0
    trainer_nodes = min(world, nodes - own_nodes)
    base, remainder = divmod(world, trainer_nodes)
    first_engine_node, engine_nodes = (nodes - own_nodes, own_nodes) if own_nodes else (0, nodes)
    return Layout(
        [NodeShare(node, base + (node < remainder)) for node in range(trainer_nodes)],
        [[NodeShare(first_engine_node + i % engine_nodes, config.engine.tp_of(i))] for i in range(count)],
    )


def _on_gpus(config: Config) -> Layout:
    """Distribute roles over GPUs.

    Raises:
        UserError: the roles need more GPUs than the nodes have.
    """
    launch, world = config.launch, config.parallel.world_size
    per_node = launch.gpus_per_node
    total = launch.nodes * per_node
    if world > total:
        raise UserError(
            f"launch.nodes * gpus_per_node = {total} GPUs: expected at least {world}, one for each trainer rank of "
            "parallel"
        )
    next_gpu = world if launch.placement == "disaggregated" else 0
    engines = []
    for index in range(config.engine.count):
        tp = config.engine.tp_of(index)
        start = _engine_start(next_gpu, tp, per_node)
        next_gpu = start + tp
        if next_gpu > total:
            suffix = f" and {world} trainer ranks" if launch.placement == "disaggregated" else ""
            raise UserError(
                f"engine.count = {config.engine.count} engines of {_sizes(config)}{suffix} do not fit launch.nodes "
                f"* gpus_per_node = {launch.nodes} * {per_node} GPUs: no GPUs are free for engine {index}"
            )
        engines.append(_shares(start, tp, per_node))
    return Layout(_shares(0, world, per_node), engines)


def _sizes(config: Config) -> str:
    """Return the setting of the engines' sizes, for messages."""
    engine = config.engine
    pools = ", ".join(f"{p.name} {p.count} x tp {p.tp or engine.tp}" for p in engine.pools)
    return f"engine.pools = [{pools}]" if pools else f"engine.tp = {engine.tp}"


def _engine_start(first: int, tp: int, per_node: int) -> int:
    """Return the smallest index from `first` on of a GPU at which an engine can start.

    Args:
        first: index of the first free GPU over all nodes.
        tp: number of GPUs of the engine.
        per_node: number of GPUs per node.

    Raises:
        UserError: the engine is larger than a node, and does not fill whole nodes.
    """
    remaining = per_node - first % per_node
    if tp > per_node and tp % per_node:
        raise UserError(
            f"engine.tp = {tp}: expected at most launch.gpus_per_node = {per_node}, or a multiple of it"
        )
    fits = remaining >= tp or (tp > per_node and remaining == per_node)
    return first if fits else first + remaining


def _shares(start: int, count: int, per_node: int) -> list[NodeShare]:
    """Return `count` consecutive GPUs from `start` on, by node.

    Args:
        start: index of the first GPU over all nodes.
        count: number of GPUs.
        per_node: number of GPUs per node.
    """
    shares = []
    while count:
        node, first = divmod(start, per_node)
        n = min(count, per_node - first)
        shares.append(NodeShare(node, n, tuple(range(first, first + n))))
        start += n
        count -= n
    return shares


def on_cuda(config: Config) -> bool:
    """Return whether the run's processes use GPUs: launch.gpus_per_node is set, or this host has GPUs."""
    return config.launch.gpus_per_node > 0 or have_cuda()
