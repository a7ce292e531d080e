"""Encoding of weights for a slow link: a file is divided into pieces, which are sent as compressed differences.

The trainer declares the size of each file and the digests of its pieces to every host, and a host stores and forwards
only content with a declared digest. So any sender may send a piece, in any order and more than once.
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
"""Size of a piece. A few pieces in flight fill a link of 1 Gbit/s with a round-trip time of 100 ms."""
_DIGEST_BYTES = 16
_LEVEL = 1
"""Compression level of zstd. Higher levels compress differences of weights a few percent better in several times the
time."""

Bytes = NDArray[np.uint8]


class Damaged(Exception):
    """The received content does not have the declared size or digest."""


@dataclass(frozen=True)
class Piece:
    """Piece of a file.

    Attributes:
        file: index of the file in the push.
        size: bytes of the file.
        width: bytes per element of the file.
        index: index of the piece in the file.
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
        """Number of bytes."""
        return self.span.stop - self.span.start


class Payload(NamedTuple):
    """Content of a piece in a request.

    Attributes:
        base: digest of the content to which `data` is the difference (XOR). If it is empty, `data` is the whole
            content. If it is the digest of the piece, the content has not changed, and `data` is empty.
        data: the compressed difference or content.
    """

    base: str
    data: bytes


@dataclass(frozen=True)
class FileSpec:
    """A file as the trainer declares it.

    Attributes:
        size: bytes of the file.
        width: bytes per element.
        digests: digest of each piece, in order.
    """

    size: int
    width: int
    digests: tuple[str, ...]

    def encoded(self) -> list[Any]:
        """Return the specification as JSON values."""
        return [self.size, self.width, list(self.digests)]


def decode_file_spec(encoded: Any) -> FileSpec:
    """Decode a specification from JSON values (FileSpec.encoded).

    Raises:
        ValueError: the value is not a specification, or the number of digests does not fit the size.
    """
    match encoded:
        case [int(size), int(width), [*digests]] if size > 0 and width in (1, 2, 4, 8):
            if len(digests) == pieces_in(size) and all(map(_is_digest, digests)):
                return FileSpec(size, width, tuple(digests))
    raise ValueError(f"files: found {encoded!r:.100}; expected [size, width, one digest for each piece]")


def decode_locations(encoded: Any) -> list[tuple[int, int]]:
    """Decode the locations of pieces from JSON values.

    Returns:
        For each piece, the index of the file and the index of the piece in the file.

    Raises:
        ValueError: the value is not a list of locations.
    """
    if not isinstance(encoded, list):
        raise ValueError(f"pieces: found {encoded!r:.100}; expected a list of [file, index]")
    locations = []
    for location in encoded:
        match location:
            case [int(file), int(index)]:
                locations.append((file, index))
            case _:
                raise ValueError(f"pieces: found {location!r:.100}; expected [file, index], two integers")
    return locations


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{2 * _DIGEST_BYTES}}}", value) is not None


def pieces_in(size: int) -> int:
    """Return the number of pieces of a file of `size` bytes."""
    return -(-size // PIECE_BYTES)


def digest(content: Bytes) -> str:
    """Return the BLAKE2b hash of the content: 128 bits in hexadecimal."""
    return hashlib.blake2b(content.data, digest_size=_DIGEST_BYTES).hexdigest()


def encode(piece: Piece, content: Bytes, old: Bytes | None, base: str) -> Payload:
    """Encode a piece.

    Args:
        piece: the piece.
        content: content of the piece.
        old: the receiver's current content, with digest `base`; None if it is unknown.
        base: digest of the receiver's current content; empty if it is unknown.
    """
    if base == piece.digest:
        return Payload(base, b"")
    if old is None:
        return Payload("", _compress(content, piece.width))
    return Payload(base, _compress(np.bitwise_xor(content, old), piece.width))


def decode(piece: Piece, payload: Payload, old: Bytes | None) -> Bytes:
    """Decode the content of a piece.

    Args:
        piece: the piece.
        payload: the payload; it must not be empty.
        old: the current content; None if the payload is the whole content.

    Raises:
        Damaged: the content does not have the size or the digest of the piece.
    """
    content = _decompress(payload.data, piece.length, piece.width)
    if payload.base:
        assert old is not None
        np.bitwise_xor(content, old, out=content)
    if digest(content) != piece.digest:
        raise Damaged(f"piece {piece.index} of file {piece.file} does not match its digest")
    return content


def _compress(content: Bytes, width: int) -> bytes:
    """Compress the content, with its bytes grouped by their position in an element, because high bytes repeat."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(_group_bytes(content, width).data)


def _decompress(data: bytes, length: int, width: int) -> Bytes:
    """Return the content, `length` bytes, that `_compress` compressed.

    Raises:
        Damaged: the data are invalid, or contain another number of bytes.
    """
    try:
        # Check the size that the frame declares first, so that a sender cannot make this host allocate more memory.
        if (declared_length := zstandard.get_frame_parameters(data).content_size) != length:
            raise Damaged(f"the compressed data declare {declared_length} bytes; expected {length}")
        grouped = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as e:
        raise Damaged(str(e)) from None
    if len(grouped) != length:
        raise Damaged(f"the compressed data contain {len(grouped)} bytes; expected {length}")
    flat, aligned = np.frombuffer(grouped, np.uint8), length - length % width
    content = np.empty(length, np.uint8)
    content[:aligned].reshape(-1, width)[:] = flat[:aligned].reshape(width, -1).T
    content[aligned:] = flat[aligned:]
    return content


def _group_bytes(content: Bytes, width: int) -> Bytes:
    """Return the first byte of every element, then the second of every element, and so on."""
    aligned = len(content) - len(content) % width
    flat = np.empty_like(content)
    flat[:aligned].reshape(width, -1)[:] = content[:aligned].reshape(-1, width).T
    flat[aligned:] = content[aligned:]
    return flat
