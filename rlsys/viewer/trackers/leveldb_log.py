"""Reads W&B's transaction logs, which are LevelDB's log format behind seven bytes of their own.

The format: github.com/google/leveldb, doc/log_format.md. Blocks of 32 KiB hold records of a checksum (4 bytes), a
length (2), a kind (1) and data; a record that does not fit into its block goes on in the next.
"""

from __future__ import annotations

from collections.abc import Iterator

_BLOCK = 32768
_HEADER = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(data: bytes) -> Iterator[bytes]:
    """Whole ones; what a kill cut off at the end is left out."""
    at, parts = _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # the rest of a block is empty
            at += left
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
