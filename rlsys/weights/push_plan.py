"""Assignment of trainer ranks to engine ranks and transports, over all nodes. Pure, without torch.

memory   An engine rank opens memory of a trainer rank on the same GPU (CUDA IPC); without GPUs, on the same host. The
         plan chooses these pairs first, because NCCL does not allow two ranks of one GPU in a group.
group    One trainer rank and all ranks of the engines on other GPUs form a process group.
relay    Trainer rank 0 sends pieces to the first engine of a chain, and each engine to the next: for engines behind a
         slow link (rlsys/weights/relay_push.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from rlsys.core.errors import UserError


@dataclass(frozen=True, order=True)
class DeviceLocation:
    """Location of a rank.

    Attributes:
        node: index of a node of the run.
        device: index of a GPU of the node; without GPUs any number.
    """

    node: int
    device: int

    def __str__(self) -> str:
        return f"GPU {self.device} of node {self.node}"


@dataclass(frozen=True)
class PushPlan:
    """Transports of a run's weight updates.

    Engines that are neither in `memory` nor in `chains`, for example engines that join later, get weights through the
    process group; without a group, from the memory of trainer rank 0.

    Attributes:
        memory: index of an engine -> for each of its ranks, the trainer rank whose memory it opens.
        group: whether there is a process group.
        sender: trainer rank that is rank 0 of the group.
        chains: for each relay chain, the indices of its engines in their order.
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
        """Trainer ranks that send to an engine, including engines that join later."""
        first = {0} if self.chains else set()
        by_memory = {rank for ranks in self.memory.values() for rank in ranks}
        return {self.sender if self.group else 0, *first, *by_memory}

    def is_relayed(self, engine: int | None) -> bool:
        """Return whether the engine with index `engine` is in a chain; False for None."""
        return any(engine in chain for chain in self.chains)

    def owners(self, engine: int | None, tp: int) -> tuple[int, ...] | None:
        """Return the trainer ranks that serve an engine by memory.

        Args:
            engine: index of the engine; None for an engine that joined later.
            tp: tensor-parallel size of the engine.

        Returns:
            One trainer rank for each rank of the engine; None if the engine is in the group.
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

        auto        memory between ranks of one GPU (without GPUs, of one machine), else a group
        broadcast   like auto, but without GPUs always a group
        sharded     always a group, of all trainer ranks (rlsys.weights.shard_plan)
        others      an empty plan: the method does not use it

    Args:
        trainer: location of each trainer rank.
        engines: locations of each engine's ranks.
        method: weights.method.
        gpus: whether ranks compute on GPUs.
        chains: for each relay chain, the indices of its engines. They get weights by relay with `auto` and
            `broadcast`.

    Raises:
        UserError: a group would contain two ranks of one GPU, or an engine in a chain is on several machines.
    """
    if method == "sharded":
        if gpus:
            _check_separate_gpus(trainer, engines)
        return PushPlan({}, group=True)
    if method not in ("auto", "broadcast"):
        return PushPlan({}, group=False)
    relayed = {index for chain in chains for index in chain}
    for index in relayed:
        _check_single_node(index, engines[index])
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
    """Return PushPlan.memory for GPUs: the engines of which each rank shares its GPU with a trainer rank."""
    rank_by_location = {location: rank for rank, location in enumerate(trainer)}
    return {
        index: tuple(rank_by_location[location] for location in locations)
        for index, locations in enumerate(engines)
        if all(location in rank_by_location for location in locations)
    }


def _same_host(
    trainer: Sequence[DeviceLocation], engines: Sequence[Sequence[DeviceLocation]]
) -> dict[int, tuple[int, ...]]:
    """Return PushPlan.memory without GPUs: the engines on hosts with trainer ranks, assigned to these round-robin."""
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
    """Return the first trainer rank that shares no GPU with a member of the group.

    Raises:
        UserError: there is none, or two members share a GPU.
    """
    check_group(members)
    for rank, location in enumerate(trainer):
        if location not in members:
            return rank
    raise UserError(
        f"every trainer rank, for example on {trainer[0]}, shares its GPU with an engine that also uses other GPUs, "
        "but an NCCL group that sends weights cannot contain two ranks of one GPU. Place each engine either on the "
        "trainer's GPUs only or on other GPUs only, or use weights.method=disk"
    )


def _check_single_node(index: int, locations: Sequence[DeviceLocation]) -> None:
    """Check that an engine in a chain is on one machine, because its ranks read the weights from shared memory."""
    if len(nodes := {location.node for location in locations}) > 1:
        raise UserError(
            f"engine.pools: relay = true requires each engine to be on one machine, but engine-{index} is on "
            f"{len(nodes)} machines; use a smaller tp, or relay = false"
        )


def _check_separate_gpus(
    trainer: Sequence[DeviceLocation], engines: Sequence[Sequence[DeviceLocation]]
) -> None:
    """Check that trainer ranks and engines share no GPU, because any trainer rank may send to any engine."""
    trainer_locations = set(trainer)
    for index, locations in enumerate(engines):
        if shared_location := next(
            (location for location in locations if location in trainer_locations), None
        ):
            raise UserError(
                f"weights.method = sharded: the trainer and engine-{index} both use {shared_location}, and an NCCL "
                "group cannot contain two ranks of one GPU; use weights.method=auto"
            )
