"""Decode training requests and encode results in Tinker's protocol, as Protocol Buffers (tinker 0.38.0).

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
"""Largest number of fields of a datum, and of dimensions of a tensor."""
_DTYPES: dict[int, type[np.generic]] = {FLOAT32: np.float32, INT64: np.int64}


class UnsupportedRequest(ValueError):
    """Raised for a feature of the protocol that this server does not support."""


@dataclass
class Datum:
    """One sequence.

    Attributes:
        ids: input tokens `[N]`.
        inputs: name of a loss input in the protocol -> its values `[N]`.
    """

    ids: list[int] = field(default_factory=list)
    inputs: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass
class TrainRequest:
    """A request for a forward or forward-backward pass.

    Attributes:
        seq_id: number of the request in its model, from 1.
        loss: name of the loss in the protocol.
        params: parameters of the loss.
        raw: encoded data, one entry per datum.
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
        elif number == 5:  # the same parameters as in 7, for older servers
            name, encoded = _entry(value)
            plain[name] = 0.0 if encoded is None else double(encoded)
        elif number == 6:
            request.forward_only = bool(integer(value))
        elif number == 7:
            name, encoded = _entry(value)
            request.params[name] = 0.0 if encoded is None else _loss_parameter(name, blob(encoded))
    request.params = request.params or plain
    return request


def _entry(value: Value) -> tuple[str, Value | None]:
    """Decode the key and the value of a map entry. The value is None if it is omitted, because it is 0 or empty."""
    parts = dict(fields(blob(value), _MAX_PARTS))
    return text(parts.get(1, b"")), parts.get(2)


def _loss_parameter(name: str, data: bytes) -> float:
    """Decode a parameter of the loss.

    Raises:
        UnsupportedRequest: the parameter is not a number.
    """
    parts = dict(fields(data, _MAX_PARTS))
    if 2 in parts:
        raise UnsupportedRequest(f"loss_fn_config: {name} is a text; expected a number")
    return double(parts.get(1, 0))


def _datum(data: bytes) -> Datum:
    """Decode a datum. Raises as `TrainRequest.data`."""
    datum = Datum()
    for number, value in fields(data, _MAX_PARTS):
        if number == 1:
            datum.ids += _chunk(blob(value))
        elif number == 2:
            name, encoded = _entry(value)
            datum.inputs[name] = _tensor(name, b"" if encoded is None else blob(encoded))
        elif number in (3, 4):
            raise UnsupportedRequest("datum: model_input_spans is not supported; expected model_input")
    return datum


def _chunk(data: bytes) -> list[int]:
    """Decode the token ids of a chunk of model_input."""
    for number, value in fields(data):
        if number != 1:
            raise UnsupportedRequest("model_input: an image or a sound; expected tokens only")
        encoded = dict(fields(blob(value), _MAX_PARTS)).get(1, b"")
        ids: list[int] = _array("model_input", blob(encoded), np.int32).tolist()
        return ids
    return []


def _tensor(name: str, data: bytes) -> NDArray[Any]:
    """Decode the values `[N]` of a loss input. `name`: name of the input, for errors."""
    dense, shape, kind = b"", [], 0
    for number, value in fields(data, _MAX_PARTS):
        if number == 1:
            dense = blob(value)
        elif number == 2:
            raise UnsupportedRequest(f"loss_fn_inputs: {name} is sparse; expected one number per token")
        elif number == 3:
            kind = integer(value)
        elif number == 4:
            shape += [signed(value)] if isinstance(value, int) else packed(value, _MAX_DIMENSIONS)
    if kind not in _DTYPES:
        raise BadMessage(
            f"loss_fn_inputs: {name} has dtype {kind}; expected {FLOAT32} (float32) or {INT64} (int64)"
        )
    if len(shape) > 1:
        raise UnsupportedRequest(
            f"loss_fn_inputs: {name} has the shape {shape}; expected one number per token"
        )
    return _array(name, dense, _DTYPES[kind])


def _array(name: str, data: bytes, dtype: type[np.generic]) -> NDArray[Any]:
    """Return the numbers in `data` as an array. `name`: name of the field, for errors."""
    item_bytes = np.dtype(dtype).itemsize
    if len(data) % item_bytes:
        raise BadMessage(
            f"{name} has {len(data)} bytes; expected a multiple of {item_bytes}, the size of {np.dtype(dtype).name}"
        )
    return np.frombuffer(data, dtype)


# -- results ------------------------------------------------------------------------------------------------


def train_result(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Encode a ForwardBackwardOutput.

    Args:
        logprobs: log-probs `[N]` of the targets of each datum.
        metrics: NAME:REDUCTION -> value.
    """
    offsets = np.cumsum([0, *(4 * len(values) for values in logprobs)]).astype(np.int64)
    data = b"".join(values.astype(np.float32).tobytes() for values in logprobs)
    batched = put_bytes(1, data) + put_bytes(2, offsets.tobytes()) + put_number(3, FLOAT32)
    record = put_bytes(1, "TorchLossReturn") + put_bytes(2, put_bytes(1, "logprobs") + put_bytes(2, batched))
    encoded = put_bytes(1, "TorchLossReturn") + put_bytes(2, record + put_number(3, len(logprobs)))
    for name, value in metrics.items():
        encoded += put_bytes(3, put_bytes(1, name) + put_double(2, value))
    return encoded


@dataclass(frozen=True)
class SampledSequence:
    """A sampled sequence. `hit_stop`: whether a stop condition ended it, instead of the limit of tokens."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    hit_stop: bool


def sample_result(sequences: Sequence[SampledSequence], prompt_logprobs: Sequence[float] | None) -> bytes:
    """Encode a SampleResponse.

    Args:
        sequences: the sampled sequences.
        prompt_logprobs: log-prob of each prompt token, NaN for the first one; None: not requested.
    """
    encoded = b""
    for sequence in sequences:
        stop = b"" if sequence.hit_stop else put_number(1, 1)
        ids = np.asarray(sequence.ids, np.int32).tobytes()
        logprobs = np.asarray(sequence.logprobs, np.float32).tobytes()
        encoded += put_bytes(1, stop + put_bytes(2, ids) + put_bytes(3, logprobs))
    if prompt_logprobs is not None:
        encoded += put_bytes(2, np.asarray(prompt_logprobs, np.float32).tobytes())
    return encoded
