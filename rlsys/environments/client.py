"""One episode of a service, for the rollout process and for agents; needs the standard library only.

    with RemoteEpisode.of_agent(task) as episode:       # in an agent with generator_params.environment
        print(episode.messages, episode.tools)
        step = episode.step("left")                     # or step("", calls=[{"id", "name", "arguments"}])

A question without an answer is asked again. When the service has died, the episode is opened anew and its turns are
played again, and must be answered as before.
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
"""Where an agent finds its environment."""
DEATHS = 3
"""Of the service at one turn, with this very question in hand: then it dies of the turn."""
MOST_LOSSES = 30
"""At one turn, whoever the service died of."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
LARGEST = 64 * 2**20
LONGEST_WORDS = 500

Answer = dict[str, Any]


class EnvironmentFailed(Exception):
    """There is no answer, and there will be none."""


class _Lost(Exception):
    """The connection ended, or the service knows nothing of the lease. `under_way`: it died with this question in
    hand, and perhaps of it."""

    def __init__(self, message: str, under_way: bool) -> None:
        super().__init__(message)
        self.under_way = under_way


class RemoteEpisode:
    """Owns the turns that were played; used by one thread at a time.

    `url`: of the service, http only within a machine; `unix:PATH` names a Unix socket. `seconds`: for one question,
    and so long may the service be away.
    """

    def __init__(self, url: str, key: str, task: Mapping[str, Any], seed: int, seconds: float = 60.0) -> None:
        self._parts, self._key, self._seconds = urlsplit(url), key, seconds
        self._task, self._seed = dict(task), seed
        self._lease = ""
        self._told: list[tuple[Answer, Answer]] = []
        self.restarts = 0
        """How often it was opened anew."""
        self.given_up = False
        """Nobody waits for an answer any more: a question that has none yet is not asked again. Set by any thread."""
        opened = self._within_deaths(self._open)
        self.messages: list[dict[str, Any]] = opened.get("messages", [])
        self.tools: list[dict[str, Any]] = opened.get("tools", [])

    @classmethod
    def of_agent(cls, task: Mapping[str, Any], seed: int | None = None) -> RemoteEpisode:
        """The environment of this agent's run. `seed`: the task's, or 0."""
        if URL not in os.environ:
            raise EnvironmentFailed(f"{URL} is not set: the run has no rollout.generator_params.environment")
        chosen = int(task.get("seed", 0)) if seed is None else seed
        return cls(os.environ[URL], os.environ[KEY], task, chosen)

    def step(self, text: str, calls: Sequence[Mapping[str, Any]] = ()) -> Answer:
        """What follows this turn: `messages`, `reward`, `done`, `right`. Raises EnvironmentFailed."""
        action = {"text": text, "calls": [dict(call) for call in calls]}
        answer = self._within_deaths(lambda: self._step(len(self._told), action))
        self._told.append((action, answer))
        return answer

    def close(self) -> None:
        """What cannot be said is left to the service, which closes what nobody steps."""
        try:
            self._ask("/close", {"lease": self._lease}, time.monotonic() + 1)
        except (_Lost, EnvironmentFailed, OSError):
            return

    def __enter__(self) -> RemoteEpisode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Answer:
        lease = uuid.uuid4().hex
        opened = self._asked("/open", {"lease": lease, "task": self._task, "seed": self._seed})
        self._lease = lease
        return opened

    def _step(self, number: int, action: Answer) -> Answer:
        return self._asked("/step", {"lease": self._lease, "number": number, "action": action})

    def _within_deaths(self, ask: Any) -> Answer:
        """`ask`, after what was played before where the service has lost it."""
        deaths = 0
        for losses in range(MOST_LOSSES):
            try:
                if losses and self._lease:
                    self._again()
                answer: Answer = ask()
            except _Lost as e:
                deaths, lost = deaths + e.under_way, str(e)
            else:
                return answer
            if deaths == DEATHS:
                raise EnvironmentFailed(f"it died {DEATHS} times at turn {len(self._told)}, at last {lost}")
            time.sleep(random.uniform(0, deaths))  # those that were there when it died do not meet again
        raise EnvironmentFailed(f"it was lost {MOST_LOSSES} times at turn {len(self._told)}, at last {lost}")

    def _again(self) -> None:
        """Open it anew and play what was played. Raises EnvironmentFailed where the answers differ."""
        self.restarts += 1
        opened = self._open()
        same = (opened.get("messages", []), opened.get("tools", [])) == (self.messages, self.tools)
        for number, (action, answer) in enumerate(self._told):
            if not same:
                break
            same = self._step(number, action) == answer
        if not same:
            raise EnvironmentFailed("it said something else after a restart than before")

    def _asked(self, path: str, body: Answer) -> Answer:
        """Until there is an answer. A connection that ended with a question under way is _Lost only when the service
        has died: the same question is asked once more first, when the service answers again."""
        end, pause, gone = time.monotonic() + self._seconds, FIRST_PAUSE, 0
        while True:
            if self.given_up:
                raise EnvironmentFailed("nobody waits for it")
            try:
                status, said = self._ask(path, body, end)
            except OSError as e:
                if isinstance(e, TimeoutError) or time.monotonic() >= end:
                    raise EnvironmentFailed(
                        f"no answer within {self._seconds:g} s: {type(e).__name__}"
                    ) from None
                gone += not isinstance(e, ConnectionRefusedError)
                if gone > 1:
                    raise _Lost(f"{type(e).__name__}: {e}", True) from None
                self._wait_for_service(end)
                wait = pause
            else:
                if status == 200:
                    return said
                reason = str(said.get("error", ""))[:LONGEST_WORDS]
                if status == 404 and path == "/step":
                    raise _Lost(reason, gone > 0)
                if status != 503 or time.monotonic() >= end:
                    raise EnvironmentFailed(reason or f"it answered with status {status}")
                asked = said.get("wait", 0)
                wait = max(pause, asked) if isinstance(asked, int | float) else pause
            time.sleep(min(wait, max(0.0, end - time.monotonic())))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _wait_for_service(self, end: float) -> None:
        """Wait until the service answers at all, at most to `end`: a link that is cut is no death of a question."""
        while not self.given_up and time.monotonic() < end:
            try:
                self._ask("/health", None, end)
            except OSError:
                time.sleep(FIRST_PAUSE)
            else:
                return

    def _ask(self, path: str, body: Answer | None, end: float) -> tuple[int, Answer]:
        """One try. `body`: None for a GET."""
        left = max(0.001, end - time.monotonic())
        host, port, where = self._parts.hostname or "", self._parts.port, self._parts.path
        connection: http.client.HTTPConnection
        if self._parts.scheme == "unix":
            connection, where = UnixConnection(Path(where), left), ""
        elif self._parts.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=left)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=left)
        try:
            headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
            method, data = "GET", None
            if body is not None:
                method, data = "POST", json.dumps(body, default=str).encode()
            connection.request(method, where.rstrip("/") + path, data, headers)
            response = connection.getresponse()
            if response.length is None or response.length > LARGEST:
                raise EnvironmentFailed(f"it answers without a length, or with more than {LARGEST} bytes")
            raw = response.read()  # the whole, or an error
        except http.client.HTTPException as e:
            raise ConnectionResetError(f"{type(e).__name__}: {e}") from None
        finally:
            connection.close()
        try:
            said = json.loads(raw or b"{}")
        except (ValueError, RecursionError):
            raise EnvironmentFailed(f"it answered no JSON: {raw[:80]!r}") from None
        if not isinstance(said, dict):
            raise EnvironmentFailed(f"it answered no JSON object: {raw[:80]!r}")
        return response.status, said
