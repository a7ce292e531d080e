"""Training requests and results as Tinker's client sends and reads them: Protocol Buffers (tinker 0.38.0).

Field numbers are those of the client's `tinker_public.proto`. Shapes: N tokens of one datum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsys.tenants.wire import (
    BadMessage,
    Value,
    blob,
    double,
    fields,
    integer,
    packed,
    put_bytes,
    put_double,
    put_number,
    signed,
    text,
)

FLOAT32, INT64 = 1, 2
"""Values of the protocol's DType; clients send no others."""
_MAX_PARTS, _MAX_DIMENSIONS = 64, 8
"""Largest numbers of fields of one datum, and of dimensions of a tensor."""
_DTYPES: dict[int, type[np.generic]] = {FLOAT32: np.float32, INT64: np.int64}


class UnsupportedRequest(ValueError):
    """A feature of the protocol that this server does not support."""


@dataclass
class Datum:
    """One sequence: input tokens `ids` `[N]`, and the loss inputs `[N]` by their protocol names."""

    ids: list[int] = field(default_factory=list)
    inputs: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass
class TrainRequest:
    """A forward or forward-backward pass.

    `loss` is the protocol's name of the loss, `params` has its parameters. `seq_id` numbers the requests of a model
    from 1. `raw` has the encoded data.
    """

    model_id: str = ""
    seq_id: int = 0
    loss: str = ""
    params: dict[str, float] = field(default_factory=dict)
    forward_only: bool = False
    raw: list[bytes] = field(default_factory=list)

    def data(self) -> list[Datum]:
        """Decode the data.

        Raises:
            BadMessage: the bytes are malformed.
            UnsupportedRequest: the data has a feature that this server does not support.
        """
        return [_datum(encoded) for encoded in self.raw]


def read_request(data: bytes) -> TrainRequest:
    """Decode a request, except its data.

    Raises:
        BadMessage: the bytes are malformed.
        UnsupportedRequest: a parameter of the loss is not a number.
    """
    request = TrainRequest()
    plain: dict[str, float] = {}
    for number, value in fields(data):
        if number == 1:
            request.model_id = text(value)
        elif number == 2:
            request.seq_id = signed(value)
        elif number == 3:
            request.raw.append(blob(value))
        elif number == 4:
            request.loss = text(value)
        elif number == 5:  # the same as 7, for older servers
            name, encoded = _entry(value)
            plain[name] = 0.0 if encoded is None else double(encoded)
        elif number == 6:
            request.forward_only = bool(integer(value))
        elif number == 7:
            name, encoded = _entry(value)
            request.params[name] = 0.0 if encoded is None else _setting(name, blob(encoded))
    request.params = request.params or plain
    return request


def _entry(value: Value) -> tuple[str, Value | None]:
    """Decode key and value of a map entry; None for a value that is omitted because it is 0 or empty."""
    parts = dict(fields(blob(value), _MAX_PARTS))
    return text(parts.get(1, b"")), parts.get(2)


def _setting(name: str, data: bytes) -> float:
    parts = dict(fields(data, _MAX_PARTS))
    if 2 in parts:
        raise UnsupportedRequest(f"loss_fn_config: {name} is a text; this server's losses take numbers")
    return double(parts.get(1, 0))


def _datum(data: bytes) -> Datum:
    datum = Datum()
    for number, value in fields(data, _MAX_PARTS):
        if number == 1:
            datum.ids += _chunk(blob(value))
        elif number == 2:
            name, encoded = _entry(value)
            datum.inputs[name] = _tensor(name, b"" if encoded is None else blob(encoded))
        elif number in (3, 4):
            raise UnsupportedRequest("datum: this server does not support model_input_spans")
    return datum


def _chunk(data: bytes) -> list[int]:
    for number, value in fields(data):
        if number != 1:
            raise UnsupportedRequest("model_input: an image or a sound; this server reads tokens only")
        encoded = dict(fields(blob(value), _MAX_PARTS)).get(1, b"")
        ids: list[int] = _array("model_input", blob(encoded), np.int32).tolist()
        return ids
    return []


def _tensor(name: str, data: bytes) -> NDArray[Any]:
    dense, shape, kind = b"", [], 0
    for number, value in fields(data, _MAX_PARTS):
        if number == 1:
            dense = blob(value)
        elif number == 2:
            raise UnsupportedRequest(
                f"loss_fn_inputs: {name} is sparse; this server takes one number a position"
            )
        elif number == 3:
            kind = integer(value)
        elif number == 4:
            shape += [signed(value)] if isinstance(value, int) else packed(value, _MAX_DIMENSIONS)
    if kind not in _DTYPES:
        raise BadMessage(f"{name}: dtype {kind}, expected float32 or int64")
    if len(shape) > 1:
        raise UnsupportedRequest(
            f"loss_fn_inputs: {name} has the shape {shape}; this server takes one number a position"
        )
    return _array(name, dense, _DTYPES[kind])


def _array(name: str, data: bytes, dtype: type[np.generic]) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise BadMessage(f"{name}: {len(data)} bytes, not a multiple of the size of {np.dtype(dtype).name}")
    return np.frombuffer(data, dtype)


# -- results ------------------------------------------------------------------------------------------------


def train_result(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Encode a ForwardBackwardOutput: log-probs `[N]` of each datum's targets, and metrics by NAME:REDUCTION."""
    offsets = np.cumsum([0, *(4 * len(values) for values in logprobs)]).astype(np.int64)
    data = b"".join(values.astype(np.float32).tobytes() for values in logprobs)
    batched = put_bytes(1, data) + put_bytes(2, offsets.tobytes()) + put_number(3, FLOAT32)
    record = put_bytes(1, "TorchLossReturn") + put_bytes(2, put_bytes(1, "logprobs") + put_bytes(2, batched))
    out = put_bytes(1, "TorchLossReturn") + put_bytes(2, record + put_number(3, len(logprobs)))
    for name, value in metrics.items():
        out += put_bytes(3, put_bytes(1, name) + put_double(2, value))
    return out


@dataclass(frozen=True)
class SampledSequence:
    """One sampled sequence: tokens, their log-probs, and whether it ended by a stop condition."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    hit_stop: bool


def sample_result(sequences: Sequence[SampledSequence], prompt_logprobs: Sequence[float] | None) -> bytes:
    """Encode a SampleResponse; `prompt_logprobs` has a value for each prompt token, NaN for the first one."""
    out = b""
    for sequence in sequences:
        stop = b"" if sequence.hit_stop else put_number(1, 1)
        ids = np.asarray(sequence.ids, np.int32).tobytes()
        logprobs = np.asarray(sequence.logprobs, np.float32).tobytes()
        out += put_bytes(1, stop + put_bytes(2, ids) + put_bytes(3, logprobs))
    if prompt_logprobs is not None:
        out += put_bytes(2, np.asarray(prompt_logprobs, np.float32).tobytes())
    return out
