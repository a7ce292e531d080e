"""Small messages between the trainer ranks that serve one engine: memory handles, and the result of a push."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class RankChannel:
    """A gloo group of all trainer ranks.

    `send` does not wait for the receiver. Messages with the same tag between two ranks arrive in order.
    """

    def __init__(self, seconds: float) -> None:
        """Create the group (collective). `seconds`: time limit of an engine's response, which a rank may wait for."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=4 * seconds))
        self._in_flight: list[tuple[dist.Work, Tensor]] = []

    def send(self, message: bytes, target: int, tag: int) -> None:
        """Send a message without waiting for its receipt."""
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for part in (torch.tensor([len(message)]), body):
            work = dist.isend(part, target, group=self._group, tag=tag)
            assert work is not None
            self._in_flight.append((work, part))

    def receive(self, source: int, tag: int) -> bytes:
        """Wait for the next message from rank `source` with this tag, and return it."""
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, source, group=self._group, tag=tag)
        body = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(body, source, group=self._group, tag=tag)
        return body.numpy().tobytes()

    def flush(self) -> None:
        """Wait until all sent messages have been received."""
        for work, _ in self._in_flight:
            work.wait()
        self._in_flight.clear()
