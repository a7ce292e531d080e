"""A sharded push as both sides know it: which bucket an engine takes next, and what a bucket says of itself.

All trainer ranks that send do so at once, each from its own tensors, bucket by bucket. In step `t` of round `r` the
sender at place `p` gives its bucket `r` to engine `(p + t) % engines`. Both sides go by round and step, so each waits
only for what the other does at the same step or did before: nobody waits in a circle, even where a send returns only
when it was received. In every step each sender gives to one engine and each engine takes from some senders.

Of an engine one rank takes a bucket and hands it to the others (`taker`), so a link carries a part of the model only.

A bucket is tensors, each from a multiple of 16 bytes on; then a JSON list of name, dtype and shape of each; then the
length of that list, 8 bytes. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

ALIGNED = 16
"""Bytes: a tensor of any dtype may begin at a multiple."""
_LENGTH = 8
Described = tuple[str, str, tuple[int, ...]]
"""Name, dtype in torch's words, shape."""


@dataclass(frozen=True)
class Buckets:
    """What an engine is told of a push. `sizes`: of each sender, by its place, the bytes of its buckets, in order.
    `ranks`: the senders' ranks in the process group. `engine`: the engine's own number of `engines`."""

    ranks: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    engine: int
    engines: int

    def encoded(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> Buckets:
        """Raises ValueError for anything else."""
        try:
            told: dict[str, Any] = json.loads(text)
            sizes = tuple(tuple(map(int, of_sender)) for of_sender in told["sizes"])
            found = cls(tuple(map(int, told["ranks"])), sizes, int(told["engine"]), int(told["engines"]))
        except (KeyError, TypeError) as e:
            raise ValueError(f"no list of buckets: {e!r}") from None
        if len(found.ranks) != len(sizes) or not 0 <= found.engine < found.engines:
            raise ValueError("a list of buckets whose numbers do not agree")
        return found

    def order(self) -> Iterator[tuple[int, int]]:
        """(place of the sender, bytes) of each bucket, as this engine takes them."""
        turn = sorted(range(len(self.ranks)), key=lambda p: ((self.engine - p) % self.engines, p))
        for number in range(max(map(len, self.sizes), default=0)):
            yield from ((p, self.sizes[p][number]) for p in turn if number < len(self.sizes[p]))


def taker(place: int, tp: int) -> int:
    """The tensor-parallel rank of an engine that takes the buckets of the sender at this place."""
    return place % tp


def aligned(size: int) -> int:
    """The bytes that a tensor of `size` bytes takes in a bucket."""
    return size + -size % ALIGNED


def description(tensors: Sequence[Described]) -> bytes:
    """The end of a bucket."""
    said = json.dumps(tensors, separators=(",", ":")).encode()
    return said + len(said).to_bytes(_LENGTH, "little")


def described(end: bytes) -> int | None:
    """How many bytes the description takes, by the last 8 of a bucket; None of one that was never filled."""
    said = int.from_bytes(end[-_LENGTH:], "little")
    return said + _LENGTH if said else None


def read_description(said: bytes) -> list[Described]:
    """Raises ValueError for anything else."""
    found = json.loads(said[:-_LENGTH])
    return [(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in found]
