"""Weights on their way over a slow link: files cut into pieces, each sent as what has changed in it, compressed.

The trainer declares the size of each file and the digests of its pieces to every host. So a piece may come from
anybody, in any order and twice: a host keeps and forwards only content with the declared digest.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

PIECE_BYTES = 4 * 2**20
"""A few of them on their way fill a link of 1 Gbit/s over 100 ms; fewer bytes would make more requests."""
_DIGEST_BYTES = 16
_LEVEL = (
    1  # zstd's fastest: higher levels gained a few percent on changes of weights, at a multiple of the time
)

Bytes = NDArray[np.uint8]


class Damaged(Exception):
    """What came is not the piece that it says it is."""


@dataclass(frozen=True)
class Piece:
    """`file`: its number, of `size` bytes, made of numbers of `width` bytes. `place`: which piece of the file.
    `after`: digest of the content."""

    file: int
    size: int
    width: int
    place: int
    after: str

    @property
    def span(self) -> slice:
        """Where in the file it lies."""
        start = self.place * PIECE_BYTES
        return slice(start, min(start + PIECE_BYTES, self.size))

    @property
    def length(self) -> int:
        return self.span.stop - self.span.start


class Payload(NamedTuple):
    """What is sent of a piece. `before`: digest of the content that it changes; empty: it stands alone; that of the
    piece itself: nothing has changed. `data`: compressed."""

    before: str
    data: bytes


@dataclass(frozen=True)
class FileSpec:
    """A file as the trainer declares it.

    Attributes:
        size: in bytes.
        width: bytes per element.
        digests: of each piece, in order.
    """

    size: int
    width: int
    digests: tuple[str, ...]

    def encoded(self) -> list[Any]:
        """Return the specification as JSON values."""
        return [self.size, self.width, list(self.digests)]


def decode_file_spec(encoded: Any) -> FileSpec:
    """Decode a specification.

    Raises:
        ValueError: the value is not a specification.
    """
    match encoded:
        case [int(size), int(width), [*digests]] if size > 0 and width in (1, 2, 4, 8):
            if len(digests) == pieces_in(size) and all(map(_is_digest, digests)):
                return FileSpec(size, width, tuple(digests))
    raise ValueError(f"not the size, width and digests of a file: {encoded!r:.100}")


def decode_locations(encoded: Any) -> list[tuple[int, int]]:
    """Decode the locations of pieces: the number of the file, and of the piece in it.

    Raises:
        ValueError: the value is not a list of locations.
    """
    if not isinstance(encoded, list):
        raise ValueError("not a list of pieces")
    locations = []
    for location in encoded:
        match location:
            case [int(file), int(index)]:
                locations.append((file, index))
            case _:
                raise ValueError(f"not the numbers of a file and of a piece: {location!r:.100}")
    return locations


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{2 * _DIGEST_BYTES}}}", value) is not None


def pieces_in(size: int) -> int:
    """Of a file of so many bytes."""
    return -(-size // PIECE_BYTES)


def digest(content: Bytes) -> str:
    """128 bits of BLAKE2b."""
    return hashlib.blake2b(content.data, digest_size=_DIGEST_BYTES).hexdigest()


def encode(piece: Piece, content: Bytes, old: Bytes | None, before: str) -> Payload:
    """`old`: what the receiver has there now, of digest `before`; None: nothing that is known."""
    if before == piece.after:
        return Payload(before, b"")
    if old is None:
        return Payload("", _compressed(content, piece.width))
    return Payload(before, _compressed(np.bitwise_xor(content, old), piece.width))


def decode(piece: Piece, payload: Payload, old: Bytes | None) -> Bytes:
    """The content. `old`: what is there now, where the payload changes something. Raises Damaged."""
    content = _decompressed(payload.data, piece.length, piece.width)
    if payload.before:
        assert old is not None
        np.bitwise_xor(content, old, out=content)
    if digest(content) != piece.after:
        raise Damaged(f"piece {piece.place} of file {piece.file} has another digest than it should")
    return content


def _compressed(content: Bytes, width: int) -> bytes:
    """First bytes of all numbers first: those of high value hardly differ, and compress."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(_by_byte(content, width).data)


def _decompressed(data: bytes, length: int, width: int) -> Bytes:
    try:
        # The frame says how much comes out of it: nobody makes this host hold more than a piece.
        if (told := zstandard.get_frame_parameters(data).content_size) != length:
            raise Damaged(f"{told} bytes instead of {length}")
        found = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as e:
        raise Damaged(str(e)) from None
    if len(found) != length:
        raise Damaged(f"{len(found)} bytes instead of {length}")
    flat, whole = np.frombuffer(found, np.uint8), length - length % width
    content = np.empty(length, np.uint8)
    content[:whole].reshape(-1, width)[:] = flat[:whole].reshape(width, -1).T
    content[whole:] = flat[whole:]
    return content


def _by_byte(content: Bytes, width: int) -> Bytes:
    whole = len(content) - len(content) % width
    flat = np.empty_like(content)
    flat[:whole].reshape(width, -1)[:] = content[:whole].reshape(-1, width).T
    flat[whole:] = content[whole:]
    return flat
