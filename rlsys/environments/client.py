"""Client of an environment service, for the rollout process and for agents. It needs only the standard library.

    with RemoteEpisode.for_agent(task) as episode:       # in an agent with generator_params.environment
        print(episode.messages, episode.tools)
        step = episode.step("left")                     # or step("", calls=[{"id", "name", "arguments"}])

A request without a response is repeated. After a crash of the service, the client opens the episode again and replays
its turns. The results must be identical.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlsys.core.sockets import UnixConnection

URL, KEY = "RLSYS_ENVIRONMENT_URL", "RLSYS_ENVIRONMENT_KEY"
"""Environment variables with the address and key of an agent's environment."""
DEATHS = 3
"""Number of deaths of the service during a request after which the request fails, because it may cause them."""
MAX_LOSSES = 30
"""Number of lost leases at one turn after which the episode fails, whatever the cause."""
MIN_PAUSE, MAX_PAUSE = 0.05, 2.0
MAX_ANSWER_BYTES = 64 * 2**20
MAX_REASON_CHARACTERS = 500

Answer = dict[str, Any]


class EnvironmentFailed(Exception):
    """Raised when an environment fails and a retry cannot help."""


class _LeaseLost(Exception):
    """Raised when the connection ended, or the service does not know the lease.

    `in_request`: whether the service died during this request, so that the request may be the cause.
    """

    def __init__(self, message: str, in_request: bool) -> None:
        super().__init__(message)
        self.in_request = in_request


class RemoteEpisode:
    """An episode in an environment service. Owns its history. Not thread-safe, except `cancelled`.

    Attributes:
        messages: the first messages for the model.
        tools: schemas of the tools.
        restarts: number of replays.
        cancelled: set to True by any thread to stop retries.
    """

    def __init__(self, url: str, key: str, task: Mapping[str, Any], seed: int, seconds: float = 60.0) -> None:
        """Open the episode.

        Args:
            url: URL of the service: https://..., http://... on the same machine, or unix:PATH for a Unix socket.
            key: key of the service.
            task: row of the data.
            seed: seed of the episode.
            seconds: time limit of a request with its repetitions, so also the longest outage of the service.

        Raises:
            EnvironmentFailed: the environment does not respond, or refuses the task.
        """
        self._parts, self._key, self._seconds = urlsplit(url), key, seconds
        self._task, self._seed = dict(task), seed
        self._lease = ""
        self._history: list[tuple[Answer, Answer]] = []
        self.restarts = 0
        self.cancelled = False
        opening = self._retry_after_losses(self._open)
        self.messages: list[dict[str, Any]] = opening.get("messages", [])
        self.tools: list[dict[str, Any]] = opening.get("tools", [])

    @classmethod
    def for_agent(cls, task: Mapping[str, Any], seed: int | None = None) -> RemoteEpisode:
        """Open an episode of the environment of this agent's run.

        Args:
            task: row of the data.
            seed: seed of the episode; None: the task's `seed`, or 0.

        Raises:
            EnvironmentFailed: the run has no environment, or the environment fails.
        """
        if URL not in os.environ:
            raise EnvironmentFailed(f"{URL} is not set: the run has no rollout.generator_params.environment")
        task_seed = int(task.get("seed", 0)) if seed is None else seed
        return cls(os.environ[URL], os.environ[KEY], task, task_seed)

    def step(self, text: str, calls: Sequence[Mapping[str, Any]] = ()) -> Answer:
        """Play one turn of the model.

        Args:
            text: text of the turn.
            calls: tool calls of the turn, each with `id`, `name` and `arguments`.

        Returns:
            `messages`, `reward`, `done` and `right` of the turn (contract.Step).

        Raises:
            EnvironmentFailed: the environment does not respond, or raises.
        """
        action = {"text": text, "calls": [dict(call) for call in calls]}
        answer = self._retry_after_losses(lambda: self._step(len(self._history), action))
        self._history.append((action, answer))
        return answer

    def close(self) -> None:
        """Close the episode. An unreachable service is ignored, because it closes idle leases itself."""
        try:
            self._send("/close", {"lease": self._lease}, time.monotonic() + 1)
        except (_LeaseLost, EnvironmentFailed, OSError):
            return

    def __enter__(self) -> RemoteEpisode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Answer:
        lease = uuid.uuid4().hex
        opening = self._request("/open", {"lease": lease, "task": self._task, "seed": self._seed})
        self._lease = lease
        return opening

    def _step(self, number: int, action: Answer) -> Answer:
        return self._request("/step", {"lease": self._lease, "number": number, "action": action})

    def _retry_after_losses(self, request: Any) -> Answer:
        """Return the result of `request`. Each time that the service loses the episode, replay it and try again.

        Raises:
            EnvironmentFailed: the service lost the episode MAX_LOSSES times, or died DEATHS times in the request.
        """
        deaths = 0
        for losses in range(MAX_LOSSES):
            try:
                if losses and self._lease:
                    self._replay()
                answer: Answer = request()
            except _LeaseLost as e:
                deaths, reason = deaths + e.in_request, str(e)
            else:
                return answer
            if deaths == DEATHS:
                raise EnvironmentFailed(
                    f"the service died {DEATHS} times at turn {len(self._history)}, the last time with {reason}"
                )
            # A random pause separates this episode from one whose requests kill the service.
            time.sleep(random.uniform(0, deaths))
        raise EnvironmentFailed(
            f"the lease was lost {MAX_LOSSES} times at turn {len(self._history)}, the last time with {reason}"
        )

    def _replay(self) -> None:
        """Open the episode again and replay its turns.

        Raises:
            EnvironmentFailed: a result differs from that before the loss.
        """
        self.restarts += 1
        opening = self._open()
        if (opening.get("messages", []), opening.get("tools", [])) != (self.messages, self.tools):
            raise EnvironmentFailed("the replay after a restart differs: other first messages or tools")
        for number, (action, answer) in enumerate(self._history):
            if self._step(number, action) != answer:
                raise EnvironmentFailed(
                    f"the replay after a restart differs: another result of turn {number}"
                )

    def _request(self, path: str, body: Answer) -> Answer:
        """Send a request until it has a response.

        After the first connection reset, which may be a fault of the network, the request is repeated when the
        service is reachable. The second reset counts as a death of the service.

        Raises:
            EnvironmentFailed: no response within the time limit, or the service refuses the request.
            _LeaseLost: the service died, or does not know the lease.
        """
        end, pause, resets = time.monotonic() + self._seconds, MIN_PAUSE, 0
        while True:
            if self.cancelled:
                raise EnvironmentFailed("the episode was cancelled")
            try:
                status, answer = self._send(path, body, end)
            except OSError as e:
                if isinstance(e, TimeoutError) or time.monotonic() >= end:
                    raise EnvironmentFailed(
                        f"no response within {self._seconds:g} s: {type(e).__name__}"
                    ) from None
                resets += not isinstance(e, ConnectionRefusedError)
                if resets > 1:
                    raise _LeaseLost(f"{type(e).__name__}: {e}", True) from None
                self._wait_for_service(end)
                wait = pause
            else:
                if status == 200:
                    return answer
                reason = str(answer.get("error", ""))[:MAX_REASON_CHARACTERS]
                if status == 404 and path == "/step":
                    raise _LeaseLost(reason, resets > 0)
                if status != 503 or time.monotonic() >= end:
                    raise EnvironmentFailed(
                        reason or f"the service responded with status {status}; expected 200"
                    )
                retry_after = answer.get("wait", 0)
                wait = max(pause, retry_after) if isinstance(retry_after, int | float) else pause
            time.sleep(min(wait, max(0.0, end - time.monotonic())))
            pause = min(2 * pause, MAX_PAUSE)

    def _wait_for_service(self, end: float) -> None:
        """Wait until the service responds to a health check, at most until the monotonic time `end`."""
        while not self.cancelled and time.monotonic() < end:
            try:
                self._send("/health", None, end)
            except OSError:
                time.sleep(MIN_PAUSE)
            else:
                return

    def _send(self, path: str, body: Answer | None, end: float) -> tuple[int, Answer]:
        """Send one request.

        Args:
            path: path of the request.
            body: JSON of a POST request; None: a GET request.
            end: deadline, as monotonic time.

        Returns:
            Status and JSON body of the response.

        Raises:
            OSError: there is no complete response.
            EnvironmentFailed: the response is too large, or not a JSON object.
        """
        timeout = max(0.001, end - time.monotonic())
        base_path = "" if self._parts.scheme == "unix" else self._parts.path.rstrip("/")
        connection = self._connection(timeout)
        try:
            headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
            method, data = "GET", None
            if body is not None:
                method, data = "POST", json.dumps(body, default=str).encode()
            connection.request(method, base_path + path, data, headers)
            response = connection.getresponse()
            if response.length is None or response.length > MAX_ANSWER_BYTES:
                raise EnvironmentFailed(
                    f"the response has Content-Length {response.length}; expected at most {MAX_ANSWER_BYTES} bytes"
                )
            raw = response.read()  # all bytes, or an error
        except http.client.HTTPException as e:
            raise ConnectionResetError(f"{type(e).__name__}: {e}") from None
        finally:
            connection.close()
        try:
            answer = json.loads(raw or b"{}")
        except (ValueError, RecursionError):
            raise EnvironmentFailed(
                f"the response {raw[:80]!r} is not JSON; expected a JSON object"
            ) from None
        if not isinstance(answer, dict):
            raise EnvironmentFailed(f"the response {raw[:80]!r} is not a JSON object")
        return response.status, answer

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "unix":
            return UnixConnection(Path(self._parts.path), timeout)
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=timeout)
        return http.client.HTTPConnection(host, port, timeout=timeout)
