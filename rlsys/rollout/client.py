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
    """An HTTP request.

    Attributes:
        timeout: largest number of seconds without data on the connection; None: unlimited.
    """

    method: str
    path: str
    body: bytes | None = None
    timeout: float | None = None
    headers: Mapping[str, str] = MappingProxyType({})


STATUS = Request("GET", "/status", timeout=PROBE_TIMEOUT)


class RolloutClient:
    """Sends commands to the rollout process.

    Calls may take as long as a step: only `wait_ready` and `status` have a time limit. Each call uses a new
    connection, because the server would close an idle one while the trainer works. A command whose connection breaks
    is sent again with the same id for RECONNECT_SECONDS; by the id, the rollout process detects the repetition
    (command_dedup.py).

    Every method raises:

    - the UserError or RunError that the command raised in the rollout process;
    - RunError if there is no connection for RECONNECT_SECONDS.
    """

    def __init__(self, socket: Path, key: str, start: int = 1) -> None:
        """Create a client.

        Args:
            socket: path of the rollout process's Unix socket.
            key: secret of the launch that owns the run.
            start: number of this start of the trainer, from 1.
        """
        self._headers = {"Connection": "close", KEY_HEADER: key, START_HEADER: str(start)}
        self._socket = socket

    def wait_ready(self, timeout: float) -> None:
        """Wait until the rollout process and its engines are ready.

        Any progress restarts the timeout: an engine becomes ready or is excluded, or the rollout process reads more
        of the ledger.

        Args:
            timeout: largest number of seconds without progress.

        Raises:
            RunError: there was no progress for `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        missing, previous = "it does not respond", ""
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
        """Report the number of train steps in the trainer's weights. Call once, before the first push."""
        self._command("restore", StepRequest(train_step), type(None))

    def early(self, train_step: int) -> TrainBatch | None:
        """Wait for groups of the next `take` that fill a micro-batch of every rank. Each group is returned once.

        Args:
            train_step: the step to train, from 1.

        Returns:
            the groups; None if the trainer should call `take` instead.
        """
        return self._command(
            "early", StepRequest(train_step), cast("type[TrainBatch | None]", TrainBatch | None)
        )

    def take(self, train_step: int) -> TrainBatch | None:
        """Wait for all groups of a train step. A repeated call returns the same groups.

        Args:
            train_step: the step to train, from 1.

        Returns:
            the groups by group id; None if an engine needs the current weights (push, then call again), or if the
                run is `leaving`.
        """
        return self._command(
            "take", StepRequest(train_step), cast("type[TrainBatch | None]", TrainBatch | None)
        )

    def unscored(self, train_step: int) -> list[LogProbRequest]:
        """Return live samples that lack log-probs under the weights that sampled their last tokens.

        Call it between `take` and the next push.
        """
        return self._command("unscored", StepRequest(train_step), list[LogProbRequest])

    def store_scores(self, scores: list[LogProbResult]) -> None:
        """Store log-probs durably, for the later step that trains on the tokens of these samples."""
        self._command("store_scores", ScoresRequest(scores), type(None))

    def leaving(self) -> float | None:
        """Return the number of seconds in which the trainer must save its state and exit; None: unlimited.

        A number means that the machines will be taken away.
        """
        seconds_left: float | None = self.status()["leaving"]
        return seconds_left

    def begin_push(self, mismatch_kept: float | None = None) -> WeightUpdate:
        """Begin a weight push. Return the engines to update and their new version.

        Args:
            mismatch_kept: see KeepBudget.steer; None: unknown.
        """
        return self._command("begin_push", BeginPushRequest(mismatch_kept), WeightUpdate)

    def end_push(
        self,
        update: WeightUpdate,
        canaries: list[Canary],
        checksums: list[dict[str, str]],
        excluded: dict[str, str] | None = None,
    ) -> dict[str, float]:
        """Report that all tensors were sent, except to the engines of `excluded` (URL -> reason).

        Returns:
            metrics of the push, among them:

            - push_canary_mean, push_canary_p999: gap between trainer and engine, in nats.
            - push_tensors_equal, push_tensors_unknown: number of tensors that are equal, or cannot be compared.
            - time_checksums: comparison time of the slowest engine, in seconds.
            - push_left: number of engines that still serve the previous weights.
        """
        request = EndPushRequest(update, canaries, checksums, excluded or {})
        return self._command("end_push", request, dict[str, float])

    def evaluate(self) -> EvalResult:
        """Evaluate the served weights on the held-out prompts."""
        return self._command("evaluate", None, EvalResult)

    def begin_evaluation(self) -> bool:
        """Start a background evaluation of the served weights.

        Returns:
            False if no engine can be reserved for it; call `evaluate` instead.
        """
        return self._command("begin_evaluation", None, bool)

    def end_evaluation(self, wait: bool) -> EvalStatus:
        """Return the status of the background evaluation; with `wait`, after it has ended."""
        return self._command("end_evaluation", wait, EvalStatus)

    def commit(self, train_step: int) -> None:
        """Report that the checkpoint of this step is on disk."""
        self._command("commit", StepRequest(train_step), type(None))

    def status(self) -> dict[str, Any]:
        """Return counts, versions and engines, as shown in the live display."""
        return self._status(*self._request(STATUS))

    def _status(self, code: int, body: bytes) -> dict[str, Any]:
        if code != 200:
            raise RunError(f"rollout process: GET /status returned HTTP {code}, expected 200")
        status: dict[str, Any] = json.loads(body)
        return status

    def _command(self, name: str, request: object, result: type[T]) -> T:
        headers = {REQUEST_HEADER: uuid.uuid4().hex}
        code, body = self._request(Request("POST", f"/{name}", encode(request), headers=headers))
        if code == 200:
            return decode(body, result)
        text = " ".join(body.decode(errors="replace").split())[:200]
        raise decode_error(body) or RunError(
            f"rollout process: command {name} failed with HTTP {code}: {text}; see rollout.log"
        )

    def _request(self, request: Request) -> tuple[int, bytes]:
        """Send the request, again if its connection breaks. Return status and body.

        Raises:
            RunError: there is no connection for RECONNECT_SECONDS.
        """
        deadline = None
        while True:
            start = time.monotonic()
            try:
                return self._http(request)
            except ConnectionBroken as e:
                time_now = time.monotonic()
                # A connection that worked for so long has met a new fault.
                if deadline is None or time_now - start > RECONNECT_SECONDS:
                    deadline = time_now + RECONNECT_SECONDS
                    log.warning("rollout process: %s in %s; retrying", e, request.path[1:])
                if time_now >= deadline:
                    raise RunError(
                        f"rollout process: {request.path[1:]}: no connection for {RECONNECT_SECONDS:g} s: {e}"
                    ) from None
            time.sleep(POLL_SECONDS)

    def _http(self, request: Request) -> tuple[int, bytes]:
        """Send the request once. Return status and body.

        Raises:
            ConnectionBroken: no complete response.
        """
        connection = UnixConnection(self._socket, request.timeout)
        headers = {**self._headers, **request.headers}
        try:
            return exchange(connection, request.method, request.path, request.body, headers)
        except (OSError, http.client.HTTPException) as e:
            raise ConnectionBroken(type(e).__name__) from None
