"""Small messages between the trainer ranks that serve one engine: handles of memory one way, an answer back."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class Peers:
    """A gloo group of all trainer ranks. A message is sent at once and received when its turn comes; those with one
    tag, between two ranks, keep their order.
    """

    def __init__(self, seconds: float) -> None:
        """Collective. `seconds`: what an engine's answer may take, which some wait for and others pass on."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=4 * seconds))
        self._under_way: list[tuple[dist.Work, Tensor]] = []

    def send(self, message: bytes, to: int, tag: int) -> None:
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for part in (torch.tensor([len(message)]), body):
            work = dist.isend(part, to, group=self._group, tag=tag)
            assert work is not None
            self._under_way.append((work, part))

    def receive(self, source: int, tag: int) -> bytes:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, source, group=self._group, tag=tag)
        body = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(body, source, group=self._group, tag=tag)
        return body.numpy().tobytes()

    def settle(self) -> None:
        """Wait until what was sent has been received."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()
