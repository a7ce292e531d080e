"""Encode and decode the wire format of Protocol Buffers, as far as Tinker's protocol needs it. Pure functions.

A message is a sequence of fields. A field is a key, which is the varint of (number << 3 | type), and a value:

    type   value
    0      a varint
    1      8 bytes
    2      a varint with the length, and as many bytes
    5      4 bytes

See protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
MAX_FIELDS = 4096
"""Largest number of fields of a message. It bounds the decoding time of a request of up to 32 MiB."""

Value = int | bytes
"""A value of type 0, 1 or 5 as the integer of its bits; a value of type 2 as bytes."""


class BadMessage(ValueError):
    """Raised for malformed bytes."""


def fields(data: memoryview | bytes, max_fields: int = MAX_FIELDS) -> Iterator[tuple[int, Value]]:
    """Decode the fields of a message, in order.

    Args:
        data: the message.
        max_fields: largest number of fields.

    Yields:
        Number and value of a field.

    Raises:
        BadMessage: the bytes are malformed, or have more than `max_fields` fields.
    """
    view, position, count = memoryview(data), 0, 0
    while position < len(view):
        if (count := count + 1) > max_fields:
            raise BadMessage(f"a message of more than {max_fields} fields; expected at most {max_fields}")
        key, position = _varint(view, position)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, position = _varint(view, position)
            yield number, value
            continue
        if kind == _BYTES:
            size, position = _varint(view, position)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise BadMessage(f"field {number} has the type {kind}; expected 0, 1, 2 or 5")
        remaining = len(view) - position
        if size > remaining:
            raise BadMessage(
                f"field {number} has {size} bytes; expected at most {remaining}, the rest of the message"
            )
        part = bytes(view[position : position + size])
        yield number, part if kind == _BYTES else int.from_bytes(part, "little")
        position += size


def packed(data: bytes, max_count: int) -> list[int]:
    """Decode packed varints.

    Args:
        data: the varints.
        max_count: largest number of varints.

    Raises:
        BadMessage: the bytes are malformed, or have more than `max_count` numbers.
    """
    view, position, numbers = memoryview(data), 0, list[int]()
    while position < len(view):
        if len(numbers) == max_count:
            raise BadMessage(f"more than {max_count} numbers in a list; expected at most {max_count}")
        number, position = _varint(view, position)
        numbers.append(number)
    return numbers


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    """Decode the varint at a position. Return its value, and the position after it."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(view):
            raise BadMessage(f"the message ends within the number at byte {position}; expected further bytes")
        byte = view[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise BadMessage(f"the number at byte {position} has more than {_MAX_VARINT_BYTES} bytes")


def signed(value: Value) -> int:
    """Return a value as a signed int32 or int64, which is encoded as the varint of its 64 bits."""
    number = integer(value)
    return number - 2**64 if number >= 2**63 else number


def integer(value: Value) -> int:
    """Return a value as an unsigned integer. Raises BadMessage for bytes."""
    if not isinstance(value, int):
        raise BadMessage(f"a field has the bytes {value[:20]!r}; expected a number")
    return value


def blob(value: Value) -> bytes:
    """Return a value as bytes. Raises BadMessage for a number."""
    if not isinstance(value, bytes):
        raise BadMessage(f"a field has the number {value}; expected bytes")
    return value


def text(value: Value) -> str:
    """Return a value as text. Raises BadMessage for a number, and for bytes that are not UTF-8."""
    try:
        return blob(value).decode()
    except UnicodeDecodeError:
        raise BadMessage(f"a field has the text {blob(value)[:20]!r}; expected UTF-8") from None


def double(value: Value) -> float:
    """Return the number whose 64 bits are the value. Raises BadMessage for bytes."""
    result: float = struct.unpack("<d", struct.pack("<Q", integer(value)))[0]
    return result


def put_number(number: int, value: int) -> bytes:
    """Encode the field `number` as a varint."""
    return _to_varint(number << 3 | _VARINT) + _to_varint(value % 2**64)


def put_double(number: int, value: float) -> bytes:
    """Encode the field `number` as 8 bytes."""
    return _to_varint(number << 3 | _FIXED64) + struct.pack("<d", value)


def put_bytes(number: int, value: bytes | str) -> bytes:
    """Encode the field `number` as a length and bytes."""
    data = value.encode() if isinstance(value, str) else value
    return _to_varint(number << 3 | _BYTES) + _to_varint(len(data)) + data


def _to_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
