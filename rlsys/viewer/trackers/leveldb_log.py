"""Reader of W&B's transaction logs, which are LevelDB logs after a seven-byte header.

The format: github.com/google/leveldb, doc/log_format.md. Blocks of 32 KiB contain records of a checksum (4 bytes), a
length (2), a kind (1) and data; a record that does not fit into its block continues in the next.
"""

from __future__ import annotations

from collections.abc import Iterator

_BLOCK = 32768
_HEADER = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(data: bytes) -> Iterator[bytes]:
    """Yield complete records; a record that a kill truncated at the end is skipped."""
    at, parts = _HEADER, b""
    while at + _HEADER <= len(data):
        remaining = _BLOCK - at % _BLOCK
        if remaining < _HEADER:  # the rest of a block is empty
            at += remaining
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]
        piece = data[at + _HEADER : at + _HEADER + length]
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or len(piece) < length:
            return
        at += _HEADER + length
        parts = piece if kind in (_FULL, _FIRST) else parts + piece
        if kind in (_FULL, _LAST):
            yield parts
