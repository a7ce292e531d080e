"""A push in which the ranks that own tensors send them, each in its turn (rlsys.weights.senders). Collective."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from rlsys.config import Config
from rlsys.tickets import PushTicket
from rlsys.weights.buckets import Areas, Flat, stream
from rlsys.weights.groups import Groups
from rlsys.weights.peers import Peers
from rlsys.weights.receivers import Receivers
from rlsys.weights.senders import SendersPlan, Sending
from rlsys.weights.shards import Shards
from rlsys.weights.transports import GroupTransport, prepare_sglang

Prepare = Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]
_ENDED = 0
"""Tag of the message to the next sender."""


class ShardedPush:
    """Every trainer rank has one. A sender owns its process groups with the engines, which last from push to push as
    long as the same engines take part. The next sender gathers its first buckets while the one before it still sends.
    """

    def __init__(self, config: Config, plan: SendersPlan, shards: Shards, rank: int) -> None:
        """Collective."""
        self._plan, self._shards, self._rank = plan, shards, rank
        self._bucket_bytes = int(config.weights.bucket_mb * 2**20)
        self._areas = Areas(shared=False)
        self._seconds = config.work_seconds
        self._groups = Groups(self._seconds, config.answer_seconds)
        # Who comes last waits for all turns before its own.
        self._peers = Peers(self._seconds * len(plan.sendings))
        self.left_out: dict[str, str] = {}
        """Engines that this rank's last turn could not give all its tensors to: URL -> why."""

    def prepare(self) -> None:
        """Import what the first push needs, on the ranks that send."""
        if any(sending.sender == self._rank for sending in self._plan.sendings):
            prepare_sglang()

    def push(self, ticket: PushTicket, prepare: Prepare) -> int:
        """Load the trainer's weights into every engine of the ticket; the bytes that this rank gave to each.
        `prepare`: what a sender's tensors pass through on their way.

        An engine that dies meanwhile, or refuses, is `left_out`: by who saw it, and by who sends after that.
        """
        self.left_out, sent = {}, 0
        if not ticket.engines:
            return 0
        for place, sending in enumerate(self._plan.sendings):
            if sending.sender == self._rank:
                sent = self._send(place, sending, ticket, prepare)
            else:
                self._shards.help(sending)
        self._peers.settle()
        return sent

    def close(self) -> None:
        """Leave the engines' process groups, if there are any."""
        self._groups.close()

    def _send(self, place: int, sending: Sending, ticket: PushTicket, prepare: Prepare) -> int:
        gone: list[str] | None = None  # known when the turn begins
        group: GroupTransport | None = None
        with Receivers(ticket.engines, self._seconds) as receivers:

            def send(flat: Flat) -> None:
                nonlocal gone, group
                if gone is None:
                    gone = self._wait_for_turn(place)
                    receivers.present = [e for e in ticket.engines if e.url not in gone]
                    if receivers.present:
                        group = self._groups.of(receivers)
                if group is not None and receivers.present:
                    group.send(flat, receivers)

            sent = stream(prepare(self._shards.collect(sending)), self._bucket_bytes, self._areas, send)
        self.left_out = receivers.left_out
        if place + 1 < len(self._plan.sendings):
            # Not waited for: the next sender may hear it only after this rank has helped it to gather.
            message = json.dumps([*(gone or ()), *receivers.left_out]).encode()
            self._peers.send(message, self._plan.sendings[place + 1].sender, _ENDED)
        return sent

    def _wait_for_turn(self, place: int) -> list[str]:
        """URLs of the engines that earlier senders have left out."""
        if place == 0:
            return []
        found: list[str] = json.loads(self._peers.receive(self._plan.sendings[place - 1].sender, _ENDED))
        return found
