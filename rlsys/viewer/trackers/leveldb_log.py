"""Read W&B's transaction logs, which are LevelDB logs after a seven-byte header.

A log consists of blocks of 32 KiB. A record in a block is a checksum (4 bytes), a length (2), a kind (1) and data. A
record that does not fit into its block continues in the next one. See github.com/google/leveldb, doc/log_format.md.
"""

from __future__ import annotations

from collections.abc import Iterator

_BLOCK = 32768
_HEADER = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(data: bytes) -> Iterator[bytes]:
    """Yield the data of complete records. A record at the end that a kill has truncated is skipped.

    Args:
        data: content of a log file.
    """
    position, record = _HEADER, b""
    while position + _HEADER <= len(data):
        remaining = _BLOCK - position % _BLOCK
        if remaining < _HEADER:  # the rest of a block is empty
            position += remaining
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        part = data[position + _HEADER : position + _HEADER + length]
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or len(part) < length:
            return
        position += _HEADER + length
        record = part if kind in (_FULL, _FIRST) else record + part
        if kind in (_FULL, _LAST):
            yield record
