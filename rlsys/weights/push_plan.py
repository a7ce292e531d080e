"""Assignment of trainer ranks to engine ranks and transports, over all nodes. Pure, without torch.

memory   the engine's rank opens memory of a trainer rank: of the GPU that both compute on (CUDA IPC), or, without
         GPUs, of the host. These pairs are chosen first. NCCL does not allow two ranks of one GPU in a group.
group    a process group of one trainer rank and all ranks of these engines: for engines on other GPUs.
relay    chunks from trainer rank 0 to the first engine of a chain, and from each engine to the next: for engines
         behind a slow link (rlsys/weights/relay_push.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from rlsys.core.errors import UserError


@dataclass(frozen=True, order=True)
class DeviceLocation:
    """Location of a rank: a node of the run, and a GPU of that node (without GPUs: any number)."""

    node: int
    device: int

    def __str__(self) -> str:
        return f"GPU {self.device} of node {self.node}"


@dataclass(frozen=True)
class PushPlan:
    """Transports of a run's weight updates.

    Engines without memory transport, also those that join later, get weights through a process group with
    trainer rank `sender` as rank 0 if `group` is set, else from the memory of trainer rank 0.

    Attributes:
        memory: engine -> for each of its ranks, the trainer rank whose memory it opens.
        group: whether there is a process group.
        sender: its trainer rank.
        chains: engines that are reached by relay, in the order of each chain.
    """

    memory: dict[int, tuple[int, ...]]
    group: bool
    sender: int = 0
    chains: tuple[tuple[int, ...], ...] = ()

    @property
    def shared(self) -> bool:
        """Return whether several trainer ranks serve one engine."""
        return any(len(set(ranks)) > 1 for ranks in self.memory.values())

    @property
    def senders(self) -> set[int]:
        """Trainer ranks that send to any engine, also to one that joins later."""
        first = {0} if self.chains else set()
        by_memory = {rank for ranks in self.memory.values() for rank in ranks}
        return {self.sender if self.group else 0, *first, *by_memory}

    def is_relayed(self, engine: int | None) -> bool:
        """Return whether the engine is in a chain."""
        return any(engine in chain for chain in self.chains)

    def owners(self, engine: int | None, tp: int) -> tuple[int, ...] | None:
        """Return the trainer ranks that serve an engine by memory; None if it is in the group.

        Args:
            engine: index in the layout; None for an engine that joined later.
            tp: its tensor-parallel size.
        """
        if engine is not None and engine in self.memory:
            return self.memory[engine]
        return None if self.group else (0,) * tp


def plan_push(
    trainer: Sequence[DeviceLocation],
    engines: Sequence[Sequence[DeviceLocation]],
    method: str,
    *,
    gpus: bool,
    chains: tuple[tuple[int, ...], ...] = (),
) -> PushPlan:
    """Choose the transport of each engine.

    `auto` uses memory between ranks of one GPU (without GPUs, of one machine), else a group; `broadcast` the same,
    but without GPUs groups only; `sharded` groups only, one for each sender (rlsys.weights.shard_plan).

    Args:
        trainer: location of each trainer rank.
        engines: locations of each engine's ranks.
        method: weights.method.
        gpus: whether ranks compute on GPUs.
        chains: engines that are reached by relay, whatever the method for all others is.

    Raises:
        UserError: a group would contain two ranks of one GPU, or an engine in a chain is on several machines.
    """
    if method == "sharded":
        if gpus:
            _refuse_shared(trainer, engines)
        return PushPlan({}, group=True)
    if method not in ("auto", "broadcast"):
        return PushPlan({}, group=False)
    relayed = {index for chain in chains for index in chain}
    for index in relayed:
        _refuse_spread(index, engines[index])
    if gpus:
        shared = _same_gpu(trainer, engines)
    else:
        shared = _same_host(trainer, engines) if method == "auto" else {}
    shared = {index: ranks for index, ranks in shared.items() if index not in relayed}
    members = [
        location
        for index, locations in enumerate(engines)
        if index not in shared and index not in relayed
        for location in locations
    ]
    # Without GPUs, an engine that joins opens the memory of rank 0 if all others open memory.
    group = gpus or method == "broadcast" or bool(members)
    return PushPlan(shared, group=group, sender=_sender(trainer, members) if gpus else 0, chains=chains)


def check_group(members: Sequence[DeviceLocation]) -> None:
    """Check that no two ranks of a process group compute on one GPU.

    Raises:
        UserError: two ranks share a GPU.
    """
    locations = set()
    for location in members:
        if location in locations:
            raise UserError(f"two ranks of one NCCL group are on {location}; expected at most one per GPU")
        locations.add(location)


def _same_gpu(
    trainer: Sequence[DeviceLocation], engines: Sequence[Sequence[DeviceLocation]]
) -> dict[int, tuple[int, ...]]:
    rank_by_location = {location: rank for rank, location in enumerate(trainer)}
    return {
        index: tuple(rank_by_location[location] for location in locations)
        for index, locations in enumerate(engines)
        if all(location in rank_by_location for location in locations)
    }


def _same_host(
    trainer: Sequence[DeviceLocation], engines: Sequence[Sequence[DeviceLocation]]
) -> dict[int, tuple[int, ...]]:
    """Assign trainer ranks of the same host round-robin: on a host, any rank can open the memory of any other."""
    ranks_by_node = {
        node: cycle([rank for rank, location in enumerate(trainer) if location.node == node])
        for node in {location.node for location in trainer}
    }
    return {
        index: tuple(next(ranks_by_node[location.node]) for location in locations)
        for index, locations in enumerate(engines)
        if all(location.node in ranks_by_node for location in locations)
    }


def _sender(trainer: Sequence[DeviceLocation], members: Sequence[DeviceLocation]) -> int:
    """Return the first rank that shares no GPU with a member."""
    check_group(members)
    for rank, location in enumerate(trainer):
        if location not in members:
            return rank
    raise UserError(
        f"each trainer rank, first on {trainer[0]}, shares its GPU with an engine that also uses other GPUs, and an "
        "NCCL group that sends weights cannot contain two ranks of one GPU. Place each engine either on the "
        "trainer's GPUs only or on other GPUs only, or use weights.method=disk"
    )


def _refuse_spread(index: int, locations: Sequence[DeviceLocation]) -> None:
    """Check that an engine in a chain is on one machine: its ranks read the weights from one process's memory."""
    if len(nodes := {location.node for location in locations}) > 1:
        raise UserError(
            f"engine.pools: relay = true requires each engine to be on one machine, but engine-{index} is on "
            f"{len(nodes)}; use a smaller tp, or no relay"
        )


def _refuse_shared(trainer: Sequence[DeviceLocation], engines: Sequence[Sequence[DeviceLocation]]) -> None:
    """Check that trainer ranks and engines share no GPU, since any trainer rank may send."""
    trainer_locations = set(trainer)
    for index, locations in enumerate(engines):
        if shared_location := next(
            (location for location in locations if location in trainer_locations), None
        ):
            raise UserError(
                f"weights.method = sharded: the trainer and engine-{index} both use {shared_location}, and an NCCL "
                "group cannot contain two ranks of one GPU; use weights.method=auto"
            )
