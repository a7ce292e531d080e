"""msgpack encoding of the messages between processes of a run."""

from __future__ import annotations

from array import array
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def encode(message: object) -> bytes:
    """Encode a message as msgpack, with 64 bits for each float."""
    return msgspec.msgpack.encode(message, enc_hook=_to_bytes)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a message of type `kind`.

    Raises:
        msgspec.DecodeError: `body` is not the encoding of a `kind`.
    """
    return msgspec.msgpack.decode(body, type=kind, dec_hook=_from_bytes)


def _to_bytes(value: object) -> bytes:
    if isinstance(value, array):
        return value.typecode.encode() + value.tobytes()
    raise NotImplementedError(f"cannot encode {type(value).__name__}; expected a msgspec type or an array")


def _from_bytes(kind: type, value: bytes) -> array[Any]:
    if kind is not array:
        raise NotImplementedError(f"cannot decode {kind.__name__}; expected a msgspec type or an array")
    return array(value[:1].decode(), value[1:])
