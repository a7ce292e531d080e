"""Wire format of Protocol Buffers, as far as Tinker's protocol needs it. Pure functions.

A message is a sequence of fields: a key (number << 3 | type), then a value: a varint (0), 8 bytes (1), a length and
bytes (2) or 4 bytes (5). See protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
MAX_FIELDS = 4096
"""Largest number of fields of a message; it bounds the decoding time of a request of up to 32 MiB."""

Value = int | bytes
"""Varints and fixed-size values as integers of their bits; other values as bytes."""


class BadMessage(ValueError):
    """Malformed bytes."""


def fields(data: memoryview | bytes, max_fields: int = MAX_FIELDS) -> Iterator[tuple[int, Value]]:
    """Decode the fields of a message, in order.

    Yields:
        Number and value.

    Raises:
        BadMessage: malformed bytes, or more than `max_fields` fields.
    """
    view, at, count = memoryview(data), 0, 0
    while at < len(view):
        if (count := count + 1) > max_fields:
            raise BadMessage(f"a message of more than {max_fields} fields")
        key, at = _varint(view, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(view, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(view, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise BadMessage(f"field {number} has the unknown type {kind}")
        if size > len(view) - at:
            raise BadMessage(f"field {number} ends {size - (len(view) - at)} bytes after the message")
        part = bytes(view[at : at + size])
        yield number, part if kind == _BYTES else int.from_bytes(part, "little")
        at += size


def packed(data: bytes, max_count: int) -> list[int]:
    """Decode packed varints.

    Raises:
        BadMessage: malformed bytes, or more than `max_count` numbers.
    """
    view, at, numbers = memoryview(data), 0, list[int]()
    while at < len(view):
        if len(numbers) == max_count:
            raise BadMessage(f"more than {max_count} numbers")
        number, at = _varint(view, at)
        numbers.append(number)
    return numbers


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if at + index >= len(view):
            raise BadMessage("the message ends within a number")
        byte = view[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise BadMessage("a number has more than 10 bytes")


def signed(value: Value) -> int:
    """Decode an int32 or int64, which is encoded as the varint of its 64 bits."""
    number = integer(value)
    return number - 2**64 if number >= 2**63 else number


def integer(value: Value) -> int:
    if not isinstance(value, int):
        raise BadMessage("bytes where a number is expected")
    return value


def blob(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise BadMessage("a number where bytes are expected")
    return value


def text(value: Value) -> str:
    try:
        return blob(value).decode()
    except UnicodeDecodeError:
        raise BadMessage("a text that is not UTF-8") from None


def double(value: Value) -> float:
    result: float = struct.unpack("<d", struct.pack("<Q", integer(value)))[0]
    return result


def put_number(number: int, value: int) -> bytes:
    return _encoded(number << 3 | _VARINT) + _encoded(value % 2**64)


def put_double(number: int, value: float) -> bytes:
    return _encoded(number << 3 | _FIXED64) + struct.pack("<d", value)


def put_bytes(number: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _encoded(number << 3 | _BYTES) + _encoded(len(data)) + data


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
