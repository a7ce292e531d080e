"""Protocol between trainer rank 0 and the rollout process: msgpack of dataclasses over HTTP on a Unix socket.

A command is `POST /<name>` with its request as body; the response is 200 with the result, or an error status
with an `ErrorAnswer`. Each command has a unique id (REQUEST_HEADER): a command that is repeated after a
connection broke is executed once. `GET /status` returns JSON for users and the supervisor. `GET /ledger`
returns a Ledger, and `GET /samples?query=...` a SamplesAnswer, for readers. Until the ledger is open, every
response has the status 503 and describes the progress.
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
    mismatch_kept: float | None = None
    """Mean mismatch of the trained step, see rlsys.rollout.keep_budget."""


@dataclass
class EndPushRequest:
    update: WeightUpdate
    canaries: list[Canary]
    checksums: list[dict[str, str]] = field(default_factory=list)
    """Expected checksums per engine rank, by the engine's name of the tensor."""
    excluded: dict[str, str] = field(default_factory=dict)
    """URL -> reason, for engines that did not get all tensors."""


@dataclass
class ScoresRequest:
    scores: list[LogProbResult]


@dataclass
class ErrorAnswer:
    error: str
    """UserError or RunError."""
    message: str


def encode_error(error: RlsysError) -> tuple[int, bytes]:
    """Return HTTP status and body."""
    user = isinstance(error, UserError)
    name = "UserError" if user else "RunError"
    return (USER_ERROR_STATUS if user else RUN_ERROR_STATUS), encode(
        ErrorAnswer(name, valid_text(str(error)))
    )


def decode_error(body: bytes) -> RlsysError | None:
    """Decode the error of a command; None if the body is not an ErrorAnswer, such as the text of an HTTP 500."""
    try:
        answer = decode(body, ErrorAnswer)
    except msgspec.DecodeError:
        return None
    return UserError(answer.message) if answer.error == "UserError" else RunError(answer.message)
