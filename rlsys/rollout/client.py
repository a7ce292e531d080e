"""RolloutClient: the trainer's end of the rollout process. Synchronous, standard library HTTP, no torch."""

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


class Broken(Exception):
    """A connection that could not be made, or broke before the whole answer had come."""


class Request(NamedTuple):
    """One of HTTP. `timeout`: seconds that a connection may say nothing; None: as long as it takes."""

    method: str
    path: str
    body: bytes | None = None
    timeout: float | None = None
    headers: Mapping[str, str] = MappingProxyType({})


STATUS = Request("GET", "/status", timeout=PROBE_TIMEOUT)


class RolloutClient:
    """Every method raises UserError or RunError as the rollout process did, and RunError when it is gone.

    Calls may take as long as a step: only `wait_ready` and `status` have a time limit. A new connection for
    each call, because an idle one would be closed by the server while the trainer works. A connection that breaks is
    made again, for RECONNECT_SECONDS; the command keeps its name, by which the rollout process knows that it has it
    (once.py).
    """

    def __init__(self, socket: Path, key: str, start: int = 1) -> None:
        """`socket`: where the rollout process listens. `key`: of the launch that owns the run. `start`: which start
        of the trainer this is, counted from 1."""
        self._headers = {"Connection": "close", KEY_HEADER: key, START_HEADER: str(start)}
        self._socket = socket

    def wait_ready(self, timeout: float) -> None:
        """Until the rollout process answers and its engines do. RunError after `timeout` seconds, which begin anew
        whenever something has changed: an engine has come, or is left out, or the opening of the ledger has gone on.
        """
        deadline, missing, before = time.monotonic() + timeout, "it does not answer", ""
        while time.monotonic() < deadline:
            try:
                code, body = self._http(STATUS)
                if code == OPENING_STATUS:
                    missing = body.decode(errors="replace")
                elif (status := self._status(code, body))["engines_ready"]:
                    return
                else:
                    missing = f"its engines are {status['engines']}"
            except (Broken, RunError):
                missing = "it does not answer"
            if missing != before:
                deadline, before = time.monotonic() + timeout, missing
            time.sleep(POLL_SECONDS)
        raise RunError(f"rollout process not ready after {timeout:g} s: {missing}")

    def restore(self, train_step: int) -> None:
        """The trainer has the weights after this many steps. Call once, before the first push."""
        self._command("restore", StepRequest(train_step), type(None))

    def early(self, train_step: int) -> TrainBatch | None:
        """Groups that `take` will give, as soon as they fill a micro-batch of every rank; each once.

        None: the rest comes with `take`, or something else comes first, which `take` tells.
        """
        return self._command(
            "early", StepRequest(train_step), cast("type[TrainBatch | None]", TrainBatch | None)
        )

    def take(self, train_step: int) -> TrainBatch | None:
        """All groups of the step about to be trained (1-based), by group id; the same ones when asked again.

        None: an engine needs the current weights first; push, then call again. Or the run is `leaving`.
        """
        return self._command(
            "take", StepRequest(train_step), cast("type[TrainBatch | None]", TrainBatch | None)
        )

    def unscored(self, train_step: int) -> list[LogProbRequest]:
        """After `take(train_step)`: what the weights that are about to be trained sampled and nobody has scored."""
        return self._command("unscored", StepRequest(train_step), list[LogProbRequest])

    def store_scores(self, scores: list[LogProbResult]) -> None:
        """Keep them with their samples, durably: a later step trains on these tokens."""
        self._command("store_scores", ScoresRequest(scores), type(None))

    def leaving(self) -> float | None:
        """Seconds that are left to save and go, because the machines will be taken away; None: nothing such."""
        left: float | None = self.status()["leaving"]
        return left

    def begin_push(self, mismatch_kept: float | None = None) -> WeightUpdate:
        """Where to send the weights, and under which version. `mismatch_kept`: see KeepBudget.steer."""
        return self._command("begin_push", BeginPushRequest(mismatch_kept), WeightUpdate)

    def end_push(
        self,
        ticket: WeightUpdate,
        canaries: list[Canary],
        checksums: list[dict[str, str]],
        left_out: dict[str, str] | None = None,
    ) -> dict[str, float]:
        """All buckets have been sent, but to the engines of `left_out` (URL -> why). Returns push_canary_mean and
        push_canary_p999 (nats), and how many tensors of the engines are known to be equal (push_tensors_equal), how
        many could not be compared (..._unknown), and the seconds that this took in the slowest engine
        (time_checksums).
        """
        request = EndPushRequest(ticket, canaries, checksums, left_out or {})
        return self._command("end_push", request, dict[str, float])

    def evaluate(self) -> EvalResult:
        return self._command("evaluate", None, EvalResult)

    def begin_evaluation(self) -> bool:
        """In the background, of the weights that serve now. False: no engine can be spared, `evaluate` instead."""
        return self._command("begin_evaluation", None, bool)

    def end_evaluation(self, wait: bool) -> EvalStatus:
        """What became of the one that was begun."""
        return self._command("end_evaluation", wait, EvalStatus)

    def commit(self, train_step: int) -> None:
        """The checkpoint of this step is on disk."""
        self._command("commit", StepRequest(train_step), type(None))

    def status(self) -> dict[str, Any]:
        """Counts, versions and engines, as the live display shows them."""
        return self._status(*self._reached(STATUS))

    def _status(self, code: int, body: bytes) -> dict[str, Any]:
        if code != 200:
            raise RunError(f"rollout process: status {code}")
        status: dict[str, Any] = json.loads(body)
        return status

    def _command(self, name: str, request: object, result: type[T]) -> T:
        named = {REQUEST_HEADER: uuid.uuid4().hex}
        code, body = self._reached(Request("POST", f"/{name}", encode(request), headers=named))
        if code == 200:
            return decode(body, result)
        text = " ".join(body.decode(errors="replace").split())[:200]
        raise decode_error(body) or RunError(f"rollout: {name} failed with {code} {text}; see its log")

    def _reached(self, request: Request) -> tuple[int, bytes]:
        """Status and body; over connections that break. Raises RunError after RECONNECT_SECONDS of nothing else."""
        give_up = None
        while True:
            begun = time.monotonic()
            try:
                return self._http(request)
            except Broken as e:
                now = time.monotonic()
                if give_up is None or now - begun > RECONNECT_SECONDS:  # it held for a while: another fault
                    give_up = now + RECONNECT_SECONDS
                    log.warning("rollout process: %s in %s; asking again", e, request.path[1:])
                if now >= give_up:
                    raise RunError(
                        f"rollout process is gone ({e} in {request.path[1:]}, for {RECONNECT_SECONDS:g} s)"
                    ) from None
            time.sleep(POLL_SECONDS)

    def _http(self, request: Request) -> tuple[int, bytes]:
        """Status and body. Raises Broken."""
        connection = UnixConnection(self._socket, request.timeout)
        headers = {**self._headers, **request.headers}
        try:
            return exchange(connection, request.method, request.path, request.body, headers)
        except (OSError, http.client.HTTPException) as e:
            raise Broken(type(e).__name__) from None
