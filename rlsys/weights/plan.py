"""Which trainer rank gives its weights to which engine rank, and by which way, over all nodes. Pure, without torch.

memory   the engine's rank opens memory of a trainer rank: of the GPU that both compute on (CUDA IPC), or, where there
         are no GPUs, of the host. These pairs are found first. NCCL refuses two ranks of one GPU in a group.
group    a process group of one trainer rank and all ranks of these engines: for who shares no GPU with the trainer.
relay    pieces from trainer rank 0 to the first engine of a chain, and from each engine to the next: for engines that
         the trainer reaches over a slow link only (rlsys/weights/relayed.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from rlsys.core.errors import UserError


@dataclass(frozen=True, order=True)
class Place:
    """Where a rank computes: a node of the run, a GPU of that node (without GPUs: any number)."""

    node: int
    device: int

    def __str__(self) -> str:
        return f"GPU {self.device} of node {self.node}"


@dataclass(frozen=True)
class PushPlan:
    """`memory`: engine -> for each of its ranks, the trainer rank whose memory it opens. All others, also those
    that join later, are reached by a process group whose rank 0 is trainer rank `sender` where `group` says so,
    else by the memory of trainer rank 0. `chains`: engines that are reached by relay, each in the order of a chain.
    """

    memory: dict[int, tuple[int, ...]]
    group: bool
    sender: int = 0
    chains: tuple[tuple[int, ...], ...] = ()

    @property
    def shared(self) -> bool:
        """Whether several trainer ranks serve one engine."""
        return any(len(set(ranks)) > 1 for ranks in self.memory.values())

    @property
    def senders(self) -> set[int]:
        """The trainer ranks that send to any engine, also to one that joins later."""
        first = {0} if self.chains else set()
        by_memory = {rank for ranks in self.memory.values() for rank in ranks}
        return {self.sender if self.group else 0, *first, *by_memory}

    def relayed(self, engine: int | None) -> bool:
        """Whether it is in a chain."""
        return any(engine in chain for chain in self.chains)

    def owners(self, engine: int | None, tp: int) -> tuple[int, ...] | None:
        """The trainer ranks that serve it by memory; None for one of the group. `engine` None: in no layout."""
        if engine is not None and engine in self.memory:
            return self.memory[engine]
        return None if self.group else (0,) * tp


def plan_push(
    trainer: Sequence[Place],
    engines: Sequence[Sequence[Place]],
    method: str,
    *,
    gpus: bool,
    chains: tuple[tuple[int, ...], ...] = (),
) -> PushPlan:
    """Of trainer ranks and of each engine's ranks at these places. `method`: weights.method. `chains`: engines that
    are reached by relay, whatever the method for all others is.

    `tensor` goes by memory alone; `broadcast` by memory between ranks of one GPU, else by a group; `sharded` by
    groups alone, one for each sender (rlsys.weights.shard_plan). Raises UserError for an engine that cannot be
    reached so, and where a group would hold two ranks of one GPU.
    """
    if method == "sharded":
        if gpus:
            _refuse_shared(trainer, engines)
        return PushPlan({}, group=True)
    if method not in ("tensor", "broadcast"):
        return PushPlan({}, group=False)
    relayed = {index for chain in chains for index in chain}
    for index in relayed:
        _refuse_spread(index, engines[index])
    shared = _same_gpu(trainer, engines) if gpus else _same_host(trainer, engines)
    shared = {index: ranks for index, ranks in shared.items() if index not in relayed}
    if method == "tensor":
        for index in range(len(engines)):
            if index not in shared and index not in relayed:
                _refuse_memory(index, trainer, engines[index], gpus)
        return PushPlan(shared, group=False, chains=chains)
    if not gpus:
        shared = {}
    members = [
        place
        for index, places in enumerate(engines)
        if index not in shared and index not in relayed
        for place in places
    ]
    return PushPlan(shared, group=True, sender=_sender(trainer, members) if gpus else 0, chains=chains)


def check_group(members: Sequence[Place]) -> None:
    """Raises UserError when two ranks of one process group compute on one GPU."""
    seen = set()
    for place in members:
        if place in seen:
            raise UserError(f"two ranks of one NCCL group on {place}")
        seen.add(place)


def _same_gpu(trainer: Sequence[Place], engines: Sequence[Sequence[Place]]) -> dict[int, tuple[int, ...]]:
    at = {place: rank for rank, place in enumerate(trainer)}
    return {
        index: tuple(at[place] for place in places)
        for index, places in enumerate(engines)
        if all(place in at for place in places)
    }


def _same_host(trainer: Sequence[Place], engines: Sequence[Sequence[Place]]) -> dict[int, tuple[int, ...]]:
    """Any rank of a host can open the memory of any other: they take turns, so that each holds an equal part."""
    turns = {
        node: cycle([rank for rank, place in enumerate(trainer) if place.node == node])
        for node in {place.node for place in trainer}
    }
    return {
        index: tuple(next(turns[place.node]) for place in places)
        for index, places in enumerate(engines)
        if all(place.node in turns for place in places)
    }


def _sender(trainer: Sequence[Place], members: Sequence[Place]) -> int:
    """The first rank that shares no GPU with a member."""
    check_group(members)
    for rank, place in enumerate(trainer):
        if place not in members:
            return rank
    raise UserError(
        f"weights.method = broadcast: every trainer rank shares a GPU with a rank of an engine that has others "
        f"elsewhere, first on {trainer[0]}; NCCL takes one rank of a GPU in a group. Place each engine either on "
        "GPUs of the trainer only or on other GPUs only, or use weights.method=disk"
    )


def _refuse_spread(index: int, places: Sequence[Place]) -> None:
    """Its ranks take the weights from the memory of the process that got them."""
    if len(nodes := {place.node for place in places}) > 1:
        raise UserError(
            f"engine.pools: relay = true needs engines on one machine each, but engine-{index} is on "
            f"{len(nodes)}; use a smaller tp, or weights.method=broadcast without relay"
        )


def _refuse_shared(trainer: Sequence[Place], engines: Sequence[Sequence[Place]]) -> None:
    """Any trainer rank may be a sender."""
    theirs = set(trainer)
    for index, places in enumerate(engines):
        if here := next((place for place in places if place in theirs), None):
            raise UserError(
                f"weights.method = sharded makes groups of trainer ranks and engines, but {here} is used by both (by "
                f"engine-{index}), and NCCL takes one rank of a GPU in a group; use weights.method=broadcast"
            )


def _refuse_memory(index: int, trainer: Sequence[Place], places: Sequence[Place], gpus: bool) -> None:
    nodes = {place.node for place in trainer}
    where = next(place for place in places if (place not in trainer if gpus else place.node not in nodes))
    what = "the memory of a GPU that both use" if gpus else "one machine's memory"
    there = str(where) if gpus else f"node {where.node}"
    raise UserError(
        f"weights.method = tensor passes through {what}, but engine-{index} is on {there}, where no trainer rank is; "
        "use weights.method=broadcast, or disk"
    )
