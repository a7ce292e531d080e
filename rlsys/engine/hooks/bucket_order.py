"""Order and format of the buckets of a sharded push, for senders and engines.

The sending trainer ranks work concurrently, each with its own tensors, bucket by bucket. In step `t` of round `r`,
sender `p` sends its bucket `r` to engine `(p + t) % engines`. In each step every sender sends to one engine, and an
engine may receive from several senders. Both sides follow rounds and steps, so each waits only for the same or an
earlier step of the other. There is no circular wait, even if a send returns only after its bucket was received.

One rank of an engine receives a bucket and broadcasts it to the others (`receiver_rank`), so each rank's link carries
only a part of the model.

A bucket consists of

1. the tensors, each at a multiple of 16 bytes;
2. a JSON list of the name, dtype and shape of each tensor;
3. the length of this list in 8 bytes.

This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

ALIGNMENT = 16
"""Alignment of tensors in bytes; sufficient for any dtype."""
_LENGTH = 8
TensorSpec = tuple[str, str, tuple[int, ...]]
"""Name, torch's name of the dtype, shape."""


@dataclass(frozen=True)
class Buckets:
    """Description of a push for one engine.

    Args:
        ranks: Each sender's rank in the process group.
        sizes: For each sender, the sizes of its buckets in bytes, in order.
        engine: Index of the engine.
        engines: Number of engines.
    """

    ranks: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    engine: int
    engines: int

    def encode(self) -> str:
        """Encode as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> Buckets:
        """Decode the JSON of `encode`.

        Raises:
            ValueError: The text is not JSON, lacks a field, or has contradictory fields.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            sizes = tuple(tuple(map(int, sender_sizes)) for sender_sizes in fields["sizes"])
            buckets = cls(
                tuple(map(int, fields["ranks"])), sizes, int(fields["engine"]), int(fields["engines"])
            )
        except (KeyError, TypeError) as e:
            raise ValueError(
                f"buckets: {e!r}; expected an object of ranks, sizes, engine and engines"
            ) from None
        if len(buckets.ranks) != len(sizes) or not 0 <= buckets.engine < buckets.engines:
            raise ValueError(
                f"buckets: {len(buckets.ranks)} ranks, {len(sizes)} lists of sizes, engine {buckets.engine} of "
                f"{buckets.engines}; expected as many lists as ranks, and an engine below the number of engines"
            )
        return buckets

    def order(self) -> Iterator[tuple[int, int]]:
        """Yield (index of the sender, size in bytes) of each bucket, in the order of receipt by this engine."""
        senders = sorted(range(len(self.ranks)), key=lambda p: ((self.engine - p) % self.engines, p))
        for number in range(max(map(len, self.sizes), default=0)):
            yield from ((p, self.sizes[p][number]) for p in senders if number < len(self.sizes[p]))


def receiver_rank(sender: int, tp: int) -> int:
    """Return the tensor-parallel rank of an engine that receives the buckets of a sender."""
    return sender % tp


def aligned_size(size: int) -> int:
    """Return the number of bytes that a tensor of `size` bytes occupies in a bucket."""
    return size + -size % ALIGNMENT


def encode_description(tensors: Sequence[TensorSpec]) -> bytes:
    """Encode the description at the end of a bucket."""
    text = json.dumps(tensors, separators=(",", ":")).encode()
    return text + len(text).to_bytes(_LENGTH, "little")


def description_size(end: bytes) -> int | None:
    """Return the description's size in bytes, from the last 8 bytes of a bucket; None for a bucket of zeros."""
    length = int.from_bytes(end[-_LENGTH:], "little")
    return length + _LENGTH if length else None


def decode_description(data: bytes) -> list[TensorSpec]:
    """Decode the bytes of `encode_description`.

    Raises:
        ValueError: The bytes are no description.
    """
    tensors = json.loads(data[:-_LENGTH])
    return [(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in tensors]
