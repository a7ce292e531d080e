"""Training requests and results as Tinker's client sends and reads them: Protocol Buffers (tinker 0.38.0).

The numbers of the fields are those of the client's `tinker_public.proto`. Shapes: N tokens of one datum.
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
"""Of the protocol's DType; the other ones are not sent to a server."""
_MOST_PARTS, _MOST_DIMENSIONS = 64, 8
"""Fields of one datum, and dimensions of a tensor."""
_DTYPES: dict[int, type[np.generic]] = {FLOAT32: np.float32, INT64: np.int64}


class NotServed(ValueError):
    """Something that the protocol knows, and this server does not."""


@dataclass
class Datum:
    """One sequence. `ids` `[N]`: what the model reads; `inputs`: of each position, by the protocol's names."""

    ids: list[int] = field(default_factory=list)
    inputs: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass
class TrainRequest:
    """`loss`: its name in the protocol; `params`: numbers of it. `seq_id`: the place in the model's order, from 1."""

    model_id: str = ""
    seq_id: int = 0
    loss: str = ""
    params: dict[str, float] = field(default_factory=dict)
    forward_only: bool = False
    raw: list[bytes] = field(default_factory=list)

    def data(self) -> list[Datum]:
        """Decoded when it is the request's turn. Raises BadMessage, NotServed."""
        return [_datum(each) for each in self.raw]


def read_request(data: bytes) -> TrainRequest:
    """Raises BadMessage for bytes that are none, and NotServed for a loss's parameter that is no number."""
    found = TrainRequest()
    plain: dict[str, float] = {}
    for number, value in fields(data):
        if number == 1:
            found.model_id = text(value)
        elif number == 2:
            found.seq_id = signed(value)
        elif number == 3:
            found.raw.append(blob(value))
        elif number == 4:
            found.loss = text(value)
        elif number == 5:  # the same as 7, for older servers
            name, held = _entry(value)
            plain[name] = 0.0 if held is None else double(held)
        elif number == 6:
            found.forward_only = bool(integer(value))
        elif number == 7:
            name, held = _entry(value)
            found.params[name] = 0.0 if held is None else _setting(name, blob(held))
    found.params = found.params or plain
    return found


def _entry(value: Value) -> tuple[str, Value | None]:
    """Key and value of a map; None for a value that was left out because it is 0 or empty."""
    parts = dict(fields(blob(value), _MOST_PARTS))
    return text(parts.get(1, b"")), parts.get(2)


def _setting(name: str, data: bytes) -> float:
    parts = dict(fields(data, _MOST_PARTS))
    if 2 in parts:
        raise NotServed(f"loss_fn_config: {name} is a text; this server's losses take numbers")
    return double(parts.get(1, 0))


def _datum(data: bytes) -> Datum:
    found = Datum()
    for number, value in fields(data, _MOST_PARTS):
        if number == 1:
            found.ids += _chunk(blob(value))
        elif number == 2:
            name, held = _entry(value)
            found.inputs[name] = _tensor(name, b"" if held is None else blob(held))
        elif number in (3, 4):
            raise NotServed("datum: where tokens come from (model_input_spans) is not kept here")
    return found


def _chunk(data: bytes) -> list[int]:
    for number, value in fields(data):
        if number != 1:
            raise NotServed("model_input: an image or a sound; this server reads tokens only")
        held = dict(fields(blob(value), _MOST_PARTS)).get(1, b"")
        ids: list[int] = _array("model_input", blob(held), np.int32).tolist()
        return ids
    return []


def _tensor(name: str, data: bytes) -> NDArray[Any]:
    dense, shape, kind = b"", [], 0
    for number, value in fields(data, _MOST_PARTS):
        if number == 1:
            dense = blob(value)
        elif number == 2:
            raise NotServed(f"loss_fn_inputs: {name} is sparse; this server takes one number a position")
        elif number == 3:
            kind = integer(value)
        elif number == 4:
            shape += [signed(value)] if isinstance(value, int) else packed(value, _MOST_DIMENSIONS)
    if kind not in _DTYPES:
        raise BadMessage(f"{name}: dtype {kind}, expected float32 or int64")
    if len(shape) > 1:
        raise NotServed(
            f"loss_fn_inputs: {name} has the shape {shape}; this server takes one number a position"
        )
    return _array(name, dense, _DTYPES[kind])


def _array(name: str, data: bytes, dtype: type[np.generic]) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise BadMessage(f"{name}: {len(data)} bytes are no whole numbers of {np.dtype(dtype).name}")
    return np.frombuffer(data, dtype)


# -- results ------------------------------------------------------------------------------------------------


def train_result(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput: the log-probs `[N]` of each datum's targets, and metrics by NAME:REDUCTION."""
    offsets = np.cumsum([0, *(4 * len(each) for each in logprobs)]).astype(np.int64)
    data = b"".join(each.astype(np.float32).tobytes() for each in logprobs)
    batched = put_bytes(1, data) + put_bytes(2, offsets.tobytes()) + put_number(3, FLOAT32)
    record = put_bytes(1, "TorchLossReturn") + put_bytes(2, put_bytes(1, "logprobs") + put_bytes(2, batched))
    out = put_bytes(1, "TorchLossReturn") + put_bytes(2, record + put_number(3, len(logprobs)))
    for name, value in metrics.items():
        out += put_bytes(3, put_bytes(1, name) + put_double(2, value))
    return out


@dataclass(frozen=True)
class Sampled:
    """One answer: its tokens with their log-probs, and whether it ended by itself."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool


def sample_result(sequences: Sequence[Sampled], prompt_logprobs: Sequence[float] | None) -> bytes:
    """A SampleResponse. `prompt_logprobs`: of each token of the prompt, NaN at the first one."""
    out = b""
    for each in sequences:
        stop = b"" if each.stopped else put_number(1, 1)
        ids = np.asarray(each.ids, np.int32).tobytes()
        out += put_bytes(
            1, stop + put_bytes(2, ids) + put_bytes(3, np.asarray(each.logprobs, np.float32).tobytes())
        )
    if prompt_logprobs is not None:
        out += put_bytes(2, np.asarray(prompt_logprobs, np.float32).tobytes())
    return out
