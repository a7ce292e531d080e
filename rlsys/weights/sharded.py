"""A sharded push: the trainer ranks that own tensors send them, all at once (rlsys.weights.senders). Collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.engine.bucket_order import Buckets, Described, aligned, description
from rlsys.engine.weight_calls import load_from_senders
from rlsys.tickets import PushTicket
from rlsys.trainer.control import Control
from rlsys.weights.buckets import Areas, Bucket, Flat, as_bytes, overlapped
from rlsys.weights.fp8 import for_engines
from rlsys.weights.receivers import Answers, Receivers
from rlsys.weights.senders import Part, SendersPlan
from rlsys.weights.senders_group import SendersGroup, SendersGroups
from rlsys.weights.shards import Shards
from rlsys.weights.transports import prepare_sglang

Prepare = Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]


class ShardedPush:
    """Every trainer rank has one. Rank 0 asks each engine once; the engines then take all buckets in their order
    (rlsys.engine.bucket_order). All ranks go through the buckets round by round, sending or helping, so nobody waits
    for a rank that waits for an engine that waits for the first: what an engine still wants of a round has been
    gathered before any rank goes on to the next but one.
    """

    def __init__(
        self, config: Config, plan: SendersPlan, shards: Shards, control: Control, rank: int
    ) -> None:
        """Collective."""
        self._config, self._plan, self._shards, self._control = config, plan, shards, control
        self._rank = rank
        self._areas = Areas(shared=False)
        self._groups = SendersGroups(
            control, rank, config.parallel.world_size, config.work_seconds, config.answer_seconds
        )
        mine = [(place, s) for place, s in enumerate(plan.sendings) if s.sender == rank]
        self._place = mine[0][0] if mine else None
        """Of this rank among the senders; None when it only helps."""
        sizes = [self._size(parts) for _, sending in mine for parts in sending.buckets]
        everyones: list[list[int]] = control.gather(sizes)
        self._sizes = tuple(tuple(everyones[sending.sender]) for sending in plan.sendings)
        self.left_out: dict[str, str] = {}
        """Engines that this rank could not give all its tensors to: URL -> why."""

    def prepare(self) -> None:
        """Import what the first push needs."""
        prepare_sglang()

    def push(self, ticket: PushTicket, prepare: Prepare) -> int:
        """Load the trainer's weights into every engine of the ticket; the bytes that this rank gave to each.
        `prepare`: what a sender's tensors pass through on their way.

        An engine that dies meanwhile, or refuses, is `left_out`; it has gone from this push, and its group with it.
        """
        self.left_out = {}
        if not ticket.engines:
            return 0
        with Receivers(ticket.engines, self._config.work_seconds) as receivers:
            group = self._groups.of(receivers)
            if not receivers.present:
                self.left_out = receivers.left_out
                self._groups.leave(group)
                return 0
            answers = self._ask(group, receivers)
            gone = group.meet()

            def send(flat: Flat) -> None:
                assert self._place is not None
                group.send(flat.memory, self._place, gone)

            sent = overlapped(self._gathered(prepare), self._laid, send)
            # What broke a connection is a consequence where the engine itself says why.
            receivers.settle(answers)
            self.left_out = gone | receivers.left_out
        if lost := set().union(*self._control.gather(set(self.left_out))):
            self._groups.leave(group, lost)
        return sent

    def close(self) -> None:
        """Leave the engines' process groups, if there are any."""
        self._groups.close()

    def _ask(self, group: SendersGroup, receivers: Receivers) -> Answers:
        """Rank 0 asks each engine for all buckets; nobody else asks."""
        if self._rank != 0:
            receivers.present = []
            return {}
        ranks, count = tuple(s.sender for s in self._plan.sendings), len(group.members)
        told = [Buckets(ranks, self._sizes, number, count) for number in range(count)]
        return receivers.ask([load_from_senders(group.name, each) for each in told])

    def _gathered(self, prepare: Prepare) -> Iterator[Bucket]:
        """This rank's buckets; between them it helps with others'."""
        for number in range(max(len(s.buckets) for s in self._plan.sendings)):
            for sending in self._plan.sendings:
                if number >= len(sending.buckets):
                    continue
                if sending.sender == self._rank:
                    yield list(prepare(self._shards.collect(sending.buckets[number])))
                else:
                    self._shards.help(sending.buckets[number], sending.sender)

    def _laid(self, bucket: Bucket) -> Flat:
        parts = [(name, tensor.dtype, tensor.shape) for name, tensor in bucket]
        device = bucket[0][1].device
        pieces = []
        for _, tensor in bucket:
            pieces.append(as_bytes(tensor))
            if missing := aligned(tensor.nbytes) - tensor.nbytes:
                pieces.append(torch.zeros(missing, dtype=torch.uint8, device=device))
        said = bytearray(description([_described(name, tensor) for name, tensor in bucket]))
        pieces.append(torch.frombuffer(said, dtype=torch.uint8).to(device))
        return Flat(self._areas.lay_bytes(pieces), parts)

    def _size(self, parts: Iterable[Part]) -> int:
        """Bytes of a bucket, known before there is one."""
        tensors = list(for_engines(self._config, self._shards.like(tuple(parts))))
        data = sum(aligned(tensor.nbytes) for _, tensor in tensors)
        return data + len(description([_described(name, tensor) for name, tensor in tensors]))


def _described(name: str, tensor: Tensor) -> Described:
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
