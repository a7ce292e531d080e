"""Encoding of weights for a slow link: files are divided into pieces, each of which is sent as a compressed delta.

The trainer declares the size of each file and the digests of its pieces to every host. So a piece may come from any
sender, in any order and twice: a host stores and forwards only content with the declared digest.
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
"""Bytes of a piece. A few in flight fill a link of 1 Gbit/s with 100 ms; smaller pieces would need more requests."""
_DIGEST_BYTES = 16
_LEVEL = (
    1  # zstd's fastest: higher levels gained a few percent on changes of weights, at a multiple of the time
)

Bytes = NDArray[np.uint8]


class Damaged(Exception):
    """The content differs from the declared piece."""


@dataclass(frozen=True)
class Piece:
    """Piece of a file.

    Attributes:
        file: the number of the file, of `size` bytes, which are elements of `width` bytes.
        index: the number of the piece in the file.
        digest: digest of the content.
    """

    file: int
    size: int
    width: int
    index: int
    digest: str

    @property
    def span(self) -> slice:
        """Range of bytes in the file."""
        start = self.index * PIECE_BYTES
        return slice(start, min(start + PIECE_BYTES, self.size))

    @property
    def length(self) -> int:
        return self.span.stop - self.span.start


class Payload(NamedTuple):
    """Payload of a piece.

    Attributes:
        base: digest of the content that it changes; empty: `data` is the whole content; the piece's own digest: the
            content has not changed.
        data: compressed.
    """

    base: str
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
    raise ValueError(f"file {encoded!r:.100}: expected size, width and digests")


def decode_locations(encoded: Any) -> list[tuple[int, int]]:
    """Decode the locations of pieces: the number of the file, and of the piece in it.

    Raises:
        ValueError: the value is not a list of locations.
    """
    if not isinstance(encoded, list):
        raise ValueError(f"pieces = {encoded!r:.100}: expected a list")
    locations = []
    for location in encoded:
        match location:
            case [int(file), int(index)]:
                locations.append((file, index))
            case _:
                raise ValueError(f"piece {location!r:.100}: expected the numbers of a file and of a piece")
    return locations


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{2 * _DIGEST_BYTES}}}", value) is not None


def pieces_in(size: int) -> int:
    """Return the number of pieces of a file of `size` bytes."""
    return -(-size // PIECE_BYTES)


def digest(content: Bytes) -> str:
    """Return 128 bits of BLAKE2b."""
    return hashlib.blake2b(content.data, digest_size=_DIGEST_BYTES).hexdigest()


def encode(piece: Piece, content: Bytes, old: Bytes | None, base: str) -> Payload:
    """Encode a piece.

    Args:
        old: the receiver's current content, of digest `base`; None: unknown.
    """
    if base == piece.digest:
        return Payload(base, b"")
    if old is None:
        return Payload("", _compress(content, piece.width))
    return Payload(base, _compress(np.bitwise_xor(content, old), piece.width))


def decode(piece: Piece, payload: Payload, old: Bytes | None) -> Bytes:
    """Decode the content.

    Args:
        old: the current content, if the payload changes it.

    Raises:
        Damaged: the content does not match the digest of the piece.
    """
    content = _decompress(payload.data, piece.length, piece.width)
    if payload.base:
        assert old is not None
        np.bitwise_xor(content, old, out=content)
    if digest(content) != piece.digest:
        raise Damaged(f"piece {piece.index} of file {piece.file} does not match its digest")
    return content


def _compress(content: Bytes, width: int) -> bytes:
    """Compress the bytes of all elements grouped by their position, because high bytes hardly differ."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(_group_bytes(content, width).data)


def _decompress(data: bytes, length: int, width: int) -> Bytes:
    try:
        # The frame declares its size, so that a sender cannot make this host allocate more than a piece.
        if (declared_length := zstandard.get_frame_parameters(data).content_size) != length:
            raise Damaged(f"{declared_length} bytes instead of {length}")
        grouped = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as e:
        raise Damaged(str(e)) from None
    if len(grouped) != length:
        raise Damaged(f"{len(grouped)} bytes instead of {length}")
    flat, aligned = np.frombuffer(grouped, np.uint8), length - length % width
    content = np.empty(length, np.uint8)
    content[:aligned].reshape(-1, width)[:] = flat[:aligned].reshape(width, -1).T
    content[aligned:] = flat[aligned:]
    return content


def _group_bytes(content: Bytes, width: int) -> Bytes:
    aligned = len(content) - len(content) % width
    flat = np.empty_like(content)
    flat[:aligned].reshape(width, -1)[:] = content[:aligned].reshape(-1, width).T
    flat[aligned:] = content[aligned:]
    return flat
