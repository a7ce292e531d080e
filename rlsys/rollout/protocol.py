"""What trainer rank 0 and the rollout process say to each other: msgpack of dataclasses over loopback HTTP.

A command is `POST /<name>` with its request as body; the answer is 200 with the result, or an error status with
an `ErrorAnswer`. A command has a name of its own (REQUEST_HEADER): one that is asked for again, after a connection
broke, is carried out once. `GET /status` answers JSON, for people and for the supervisor; `GET /ledger` a Ledger and
`GET /samples?query=...` a SamplesAnswer, for readers.
Until the ledger is open every answer is a 503 whose text says how far that is.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from rlsys.errors import RlsysError, RunError, UserError
from rlsys.rollout.samples import Seen
from rlsys.texts import valid_text
from rlsys.tickets import Canary, PushTicket
from rlsys.types import Scored, Taken, Unscored

RUN_ERROR_STATUS = 500
USER_ERROR_STATUS = 409
OPENING_STATUS = 503
REQUEST_HEADER = "X-Rlsys-Request"
RECONNECT_SECONDS = 30.0
"""For a connection that broke: so long the trainer tries again, and so long its command is kept for it."""


@dataclass(slots=True)
class Evaluated:
    """What became of an evaluation in the background. Done without a result: its engine died, it is given up."""

    done: bool
    result: EvalResult | None = None


@dataclass(slots=True)
class EvalResult:
    accuracy: float
    prompts: int
    mean_length: float
    truncated: int
    weight_version: int = 0
    """That sampled every token of it."""
    sets: dict[str, dict[str, float]] = field(default_factory=dict)
    """Figures of the named sets."""
    same_answer: float | None = None
    """Share of the prompts that got the commonest answer; None where answers are not known."""
    constant: float | None = None
    """Accuracy of who gives the best constant answer; None where the data has no right answers."""
    left_out: int = 0
    """Prompts without an answer, or without a verdict on it; they are not among `prompts`."""

    def figures(self) -> dict[str, float]:
        """Of an `eval` line of metrics.jsonl; those of a set are called SET/FIGURE."""
        own = {
            "accuracy": self.accuracy, "mean_length": self.mean_length, "prompts": self.prompts,
            "truncated": self.truncated, "weight_version": self.weight_version, "left_out": self.left_out,
        }  # fmt: skip
        for name, share in (("same_answer_share", self.same_answer), ("constant_accuracy", self.constant)):
            if share is not None:
                own[name] = share
        return own | {f"{name}/{key}": v for name, found in self.sets.items() for key, v in found.items()}


Result = Taken | PushTicket | EvalResult | Evaluated | list[Unscored] | dict[str, float] | bool | None


T = TypeVar("T")


@dataclass
class StepRequest:
    """Of `restore`, `early`, `take`, `unscored` and `commit`."""

    train_step: int


@dataclass
class BeginPushRequest:
    mismatch_kept: float | None = None
    """Of the step that was trained: see rlsys.rollout.keep_budget."""


@dataclass
class EndPushRequest:
    ticket: PushTicket
    canaries: list[Canary]
    checksums: list[dict[str, str]] = field(default_factory=list)
    """Of each rank of an engine: its name of a tensor -> the checksum that it must have."""
    left_out: dict[str, str] = field(default_factory=dict)
    """URLs of engines that did not get all tensors, and why."""


@dataclass
class ScoresRequest:
    scores: list[Scored]


@dataclass
class SamplesAnswer:
    """`error`: what the reader's user can mend; empty: nothing."""

    samples: list[Seen] = field(default_factory=list)
    error: str = ""


@dataclass
class ErrorAnswer:
    error: str
    """UserError or RunError."""
    message: str


def encode(message: object) -> bytes:
    """msgpack; floats keep all their 64 bits."""
    return msgspec.msgpack.encode(message, enc_hook=_to_bytes)


def decode(body: bytes, kind: type[T]) -> T:
    """Raises msgspec.DecodeError for what `encode` did not make of a `kind`."""
    return msgspec.msgpack.decode(body, type=kind, dec_hook=_from_bytes)


def _to_bytes(value: object) -> bytes:
    if isinstance(value, array):
        return value.typecode.encode() + value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} in a message")


def _from_bytes(kind: type, value: bytes) -> array[Any]:
    if kind is not array:
        raise NotImplementedError(f"{kind.__name__} in a message")
    return array(value[:1].decode(), value[1:])


def encode_error(error: RlsysError) -> tuple[int, bytes]:
    """HTTP status and body."""
    user = isinstance(error, UserError)
    name = "UserError" if user else "RunError"
    return (USER_ERROR_STATUS if user else RUN_ERROR_STATUS), encode(
        ErrorAnswer(name, valid_text(str(error)))
    )


def decode_error(body: bytes) -> RlsysError | None:
    """The error that the other side raised; None when the body is something else (a bug's plain text)."""
    try:
        answer = decode(body, ErrorAnswer)
    except msgspec.DecodeError:
        return None
    return UserError(answer.message) if answer.error == "UserError" else RunError(answer.message)
