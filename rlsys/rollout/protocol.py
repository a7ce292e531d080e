"""Protocol between trainer rank 0 and the rollout process: msgpack of dataclasses over HTTP on a Unix socket.

    POST /NAME               a command of the trainer, with its request as body
    POST /leave?seconds=S    a command of the supervisor: park all samples; returns the status
    GET /status              JSON for users and the supervisor
    GET /ledger              a Ledger, for readers
    GET /samples?query=Q     a SamplesAnswer, for readers

The response of a command is 200 with the result, or an error status with an `ErrorAnswer`. Each command has a unique
id (REQUEST_HEADER), so that a command that is sent again after its connection broke is executed once. Until the
ledger is open, every response has the status 503 and describes the progress.
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
"""Seconds for which the trainer retries a broken connection, and the rollout process keeps its command."""


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
    """Request of `restore`, `early`, `take`, `unscored` and `commit`."""

    train_step: int


@dataclass
class BeginPushRequest:
    """Request of `begin_push`."""

    mismatch_kept: float | None = None
    """See KeepBudget.steer."""


@dataclass
class EndPushRequest:
    """Request of `end_push`."""

    update: WeightUpdate
    canaries: list[Canary]
    checksums: list[dict[str, str]] = field(default_factory=list)
    """For each engine rank: the engine's name of a tensor -> expected checksum."""
    excluded: dict[str, str] = field(default_factory=dict)
    """URL -> reason, for engines that did not get all tensors."""


@dataclass
class ScoresRequest:
    """Request of `store_scores`."""

    scores: list[LogProbResult]


@dataclass
class ErrorAnswer:
    """Response of a command that failed."""

    error: str
    """UserError or RunError."""
    message: str


def encode_error(error: RlsysError) -> tuple[int, bytes]:
    """Return the HTTP status and the body of the response to a command that failed."""
    status, name = (
        (USER_ERROR_STATUS, "UserError") if isinstance(error, UserError) else (RUN_ERROR_STATUS, "RunError")
    )
    return status, encode(ErrorAnswer(name, valid_text(str(error))))


def decode_error(body: bytes) -> RlsysError | None:
    """Return the error of a command; None if the body is no ErrorAnswer, such as the text of an HTTP 500."""
    try:
        answer = decode(body, ErrorAnswer)
    except msgspec.DecodeError:
        return None
    return UserError(answer.message) if answer.error == "UserError" else RunError(answer.message)
