"""RolloutClient: the trainer's connection to the rollout process. Synchronous HTTP, without torch."""

from __future__ import annotations

import http.client
import json
import logging
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from rlsys.core.errors import RunError
from rlsys.core.messages import decode, encode
from rlsys.core.owner import KEY_HEADER, START_HEADER
from rlsys.core.sockets import UnixConnection, exchange
from rlsys.core.types import LogProbRequest, LogProbResult, TrainBatch
from rlsys.core.weight_updates import Canary, WeightUpdate
from rlsys.evaluation.results import EvalResult, EvalStatus
from rlsys.rollout.protocol import (
    OPENING_STATUS,
    RECONNECT_SECONDS,
    REQUEST_HEADER,
    BeginPushRequest,
    EndPushRequest,
    ScoresRequest,
    StepRequest,
    decode_error,
)

POLL_SECONDS = 0.25
PROBE_TIMEOUT = 5.0

T = TypeVar("T")

log = logging.getLogger("rlsys.rollout")


class ConnectionBroken(Exception):
    """Raised when a connection could not be made, or broke before the whole response had arrived."""


class Request(NamedTuple):
    """An HTTP request. `timeout`: seconds without data on the connection; None: unlimited."""

    method: str
    path: str
    body: bytes | None = None
    timeout: float | None = None
    headers: Mapping[str, str] = MappingProxyType({})


STATUS = Request("GET", "/status", timeout=PROBE_TIMEOUT)


class RolloutClient:
    """Sends commands to the rollout process.

    Every method raises UserError or RunError as the rollout process did, and RunError when it is gone. Calls
    may take as long as a step: only `wait_ready` and `status` have a time limit. Each call uses a new
    connection, because the server would close an idle one while the trainer works. A broken connection is
    retried for RECONNECT_SECONDS; the command keeps its id, by which the rollout process detects the repetition
    (command_dedup.py).
    """

    def __init__(self, socket: Path, key: str, start: int = 1) -> None:
        """Create a client.

        Args:
            socket: the socket of the rollout process.
            key: key of the launch that owns the run.
            start: number of this start of the trainer, from 1.
        """
        self._headers = {"Connection": "close", KEY_HEADER: key, START_HEADER: str(start)}
        self._socket = socket

    def wait_ready(self, timeout: float) -> None:
        """Wait until the rollout process and its engines are ready.

        The timeout restarts at every progress: an engine becomes ready or is excluded, or the opening of the
        ledger proceeds.

        Raises:
            RunError: no progress for `timeout` seconds.
        """
        deadline, missing, previous = time.monotonic() + timeout, "it does not respond", ""
        while time.monotonic() < deadline:
            try:
                code, body = self._http(STATUS)
                if code == OPENING_STATUS:
                    missing = body.decode(errors="replace")
                elif (status := self._status(code, body))["engines_ready"]:
                    return
                else:
                    missing = f"its engines are {status['engines']}"
            except (ConnectionBroken, RunError):
                missing = "it does not respond"
            if missing != previous:
                deadline, previous = time.monotonic() + timeout, missing
            time.sleep(POLL_SECONDS)
        raise RunError(f"rollout process not ready after {timeout:g} s: {missing}")

    def restore(self, train_step: int) -> None:
        """Report that the trainer has the weights after this many steps. Call once, before the first push."""
        self._command("restore", StepRequest(train_step), type(None))

    def early(self, train_step: int) -> TrainBatch | None:
        """Return groups that `take` will return, as soon as they fill a micro-batch of every rank; each once.

        None: call `take` for the rest, or for the reason.
        """
        return self._command(
            "early", StepRequest(train_step), cast("type[TrainBatch | None]", TrainBatch | None)
        )

    def take(self, train_step: int) -> TrainBatch | None:
        """Return all groups of the step about to be trained (from 1), by group id; the same ones on repetition.

        None: an engine needs the current weights; push, then call again. Or the run is `leaving`.
        """
        return self._command(
            "take", StepRequest(train_step), cast("type[TrainBatch | None]", TrainBatch | None)
        )

    def unscored(self, train_step: int) -> list[LogProbRequest]:
        """Return live samples without log-probs of the weights that sampled them last. Call after `take`."""
        return self._command("unscored", StepRequest(train_step), list[LogProbRequest])

    def store_scores(self, scores: list[LogProbResult]) -> None:
        """Store log-probs of samples durably: a later step trains on these tokens."""
        self._command("store_scores", ScoresRequest(scores), type(None))

    def leaving(self) -> float | None:
        """Return the seconds left to save and exit before the machines are taken away; None: no such request."""
        seconds_left: float | None = self.status()["leaving"]
        return seconds_left

    def begin_push(self, mismatch_kept: float | None = None) -> WeightUpdate:
        """Return the engines to update and their new version.

        Args:
            mismatch_kept: see KeepBudget.steer.
        """
        return self._command("begin_push", BeginPushRequest(mismatch_kept), WeightUpdate)

    def end_push(
        self,
        ticket: WeightUpdate,
        canaries: list[Canary],
        checksums: list[dict[str, str]],
        left_out: dict[str, str] | None = None,
    ) -> dict[str, float]:
        """Report that all tensors were sent, except to the engines of `left_out` (URL -> reason).

        Returns:
            push_canary_mean and push_canary_p999 (nats); the numbers of tensors known to be equal
                (push_tensors_equal)
            and not comparable (push_tensors_unknown); and the comparison time of the slowest engine
                (time_checksums).
        """
        request = EndPushRequest(ticket, canaries, checksums, left_out or {})
        return self._command("end_push", request, dict[str, float])

    def evaluate(self) -> EvalResult:
        return self._command("evaluate", None, EvalResult)

    def begin_evaluation(self) -> bool:
        """Start a background evaluation of the served weights. False: no engine can be spared; use `evaluate`."""
        return self._command("begin_evaluation", None, bool)

    def end_evaluation(self, wait: bool) -> EvalStatus:
        """Return the status of the evaluation that was started."""
        return self._command("end_evaluation", wait, EvalStatus)

    def commit(self, train_step: int) -> None:
        """Report that the checkpoint of this step is on disk."""
        self._command("commit", StepRequest(train_step), type(None))

    def status(self) -> dict[str, Any]:
        """Return counts, versions and engines, as shown in the live display."""
        return self._status(*self._request(STATUS))

    def _status(self, code: int, body: bytes) -> dict[str, Any]:
        if code != 200:
            raise RunError(f"rollout process: status {code}")
        status: dict[str, Any] = json.loads(body)
        return status

    def _command(self, name: str, request: object, result: type[T]) -> T:
        headers = {REQUEST_HEADER: uuid.uuid4().hex}
        code, body = self._request(Request("POST", f"/{name}", encode(request), headers=headers))
        if code == 200:
            return decode(body, result)
        text = " ".join(body.decode(errors="replace").split())[:200]
        raise decode_error(body) or RunError(f"rollout: {name} failed with {code} {text}; see its log")

    def _request(self, request: Request) -> tuple[int, bytes]:
        """Return status and body, retrying broken connections.

        Raises:
            RunError: no connection for RECONNECT_SECONDS.
        """
        give_up = None
        while True:
            start = time.monotonic()
            try:
                return self._http(request)
            except ConnectionBroken as e:
                time_now = time.monotonic()
                if (
                    give_up is None or time_now - start > RECONNECT_SECONDS
                ):  # the connection worked for a while: another fault
                    give_up = time_now + RECONNECT_SECONDS
                    log.warning("rollout process: %s in %s; retrying", e, request.path[1:])
                if time_now >= give_up:
                    raise RunError(
                        f"rollout process is gone ({e} in {request.path[1:]}, for {RECONNECT_SECONDS:g} s)"
                    ) from None
            time.sleep(POLL_SECONDS)

    def _http(self, request: Request) -> tuple[int, bytes]:
        """Return status and body.

        Raises:
            ConnectionBroken: no complete response.
        """
        connection = UnixConnection(self._socket, request.timeout)
        headers = {**self._headers, **request.headers}
        try:
            return exchange(connection, request.method, request.path, request.body, headers)
        except (OSError, http.client.HTTPException) as e:
            raise ConnectionBroken(type(e).__name__) from None
