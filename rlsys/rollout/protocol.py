"""What trainer rank 0 and the rollout process say to each other: msgpack of dataclasses over loopback HTTP.

A command is `POST /<name>` with its request as body; the answer is 200 with the result, or an error status with
an `ErrorAnswer`. A command has a name of its own (REQUEST_HEADER): one that is asked for again, after a connection
broke, is carried out once. `GET /status` answers JSON, for people and for the supervisor; `GET /ledger` a Ledger and
`GET /samples?query=...` a SamplesAnswer, for readers.
Until the ledger is open every answer is a 503 whose text says how far that is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.core.messages import decode, encode
from rlsys.core.texts import valid_text
from rlsys.core.types import LogProbRequest, LogProbResult, TrainBatch
from rlsys.core.weight_updates import Canary, WeightUpdate
from rlsys.evaluation.results import EvalResult, EvalStatus

RUN_ERROR_STATUS = 500
USER_ERROR_STATUS = 409
OPENING_STATUS = 503
REQUEST_HEADER = "X-Rlsys-Request"
RECONNECT_SECONDS = 30.0
"""For a connection that broke: so long the trainer tries again, and so long its command is kept for it."""


Result = (
    TrainBatch
    | WeightUpdate
    | EvalResult
    | EvalStatus
    | list[LogProbRequest]
    | dict[str, float]
    | bool
    | None
)


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
    ticket: WeightUpdate
    canaries: list[Canary]
    checksums: list[dict[str, str]] = field(default_factory=list)
    """Of each rank of an engine: its name of a tensor -> the checksum that it must have."""
    left_out: dict[str, str] = field(default_factory=dict)
    """URLs of engines that did not get all tensors, and why."""


@dataclass
class ScoresRequest:
    scores: list[LogProbResult]


@dataclass
class ErrorAnswer:
    error: str
    """UserError or RunError."""
    message: str


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
