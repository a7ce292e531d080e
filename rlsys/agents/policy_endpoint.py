"""PolicyEndpoint: the address of a policy in an episode. It stays the same when the policy's run restarts.

The episode's function sends requests to the endpoint, which forwards them to the sample of the run, and stores
the answers. If the run's process dies, requests wait until the sample arrives again with another address. The
endpoint then repeats all earlier requests, which the run answers from its ledger, and the waiting requests
continue. Neither the function nor the other policies notice the restart.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rlsys.http_server.clients import read_bounded

_TRUNCATED = re.compile(rb'"(finish|stop)_reason": "(length|max_tokens)"|"status": "incomplete"')
"""Pattern of a truncated answer of any API. It matches no generated text, in which quotes are escaped."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Largest size of a run's answer, in bytes."""
_ENDED_STATUSES = (401, 410)
"""HTTP statuses with which a run reports that the sample at the address has ended."""


class PolicyGone(Exception):
    """Raised when the sample of a policy has ended and the run does not send it again."""


@dataclass(eq=False)
class Arrival:
    """A request of a run to play a sample.

    Attributes:
        row: row of the data.
        base_url: address at which the run answers chat requests for the sample.
        key: key for `base_url` and `reward_url`.
        reward_url: address at which the run accepts the sample's reward.
        evaluation: key of the sample's evaluation; empty in training.
        outcome: HTTP status and message of the answer; None: close the connection, so that the run sends the
            sample again.
    """

    policy: str
    row: Mapping[str, Any]
    seed: int
    base_url: str
    key: str
    reward_url: str
    evaluation: str
    outcome: asyncio.Future[tuple[int, str] | None]

    def answer(self, status: int, message: str) -> None:
        if not self.outcome.done():
            self.outcome.set_result((status, message))

    def send_again(self) -> None:
        if not self.outcome.done():
            self.outcome.set_result(None)


@dataclass(frozen=True)
class PolicyAnswer:
    status: int
    kind: str
    """Content type."""
    body: bytes
    """Body without keep-alive data."""


@dataclass(eq=False)
class Exchange:
    """A request of the episode's function. `answer`: the policy's answer; None until it arrives."""

    path: str
    body: bytes
    headers: Mapping[str, str]
    answer: PolicyAnswer | None = None


@dataclass(eq=False)
class PolicyEndpoint:
    """Endpoint of a policy. Owns its exchanges and its sample.

    Attributes:
        wait: time for which the sample may be absent, in seconds.
        name: part of the endpoint's URL.
        key: key that the function's requests must contain.
        arrival: the present sample; None while it is absent.
        closed: reason why the endpoint accepts no sample; empty while it does.
    """

    policy: str
    session: aiohttp.ClientSession
    wait: float
    name: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    arrival: Arrival | None = None
    closed: str = ""
    _exchanges: list[Exchange] = field(default_factory=list)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[PolicyAnswer]] = field(default_factory=set)

    @property
    def has_exchanges(self) -> bool:
        """Whether the endpoint has received a request."""
        return bool(self._exchanges)

    def replace(self, arrival: Arrival) -> None:
        """Set the sample, instead of its earlier arrival. Requests wait until `take` returns."""
        self.arrival = arrival
        self._ready.clear()

    async def take(self, arrival: Arrival) -> bool:
        """Repeat all answered requests, and let the waiting ones continue.

        Returns:
            False if an answer differs from the saved one, so that the sample cannot continue.
        """
        for exchange in [e for e in self._exchanges if e.answer is not None]:
            answer = await self._forward(arrival, exchange)
            if self.arrival is not arrival or answer is None:
                return True  # the sample left again, and may return
            if answer != exchange.answer:
                self.close("the answers of the restarted run differ from the saved ones")
                return False
        self._ready.set()
        return True

    def leave(self, arrival: Arrival) -> None:
        """Remove the sample, unless a later arrival has replaced it."""
        if self.arrival is arrival:
            self.arrival = None
            self._ready.clear()

    def close(self, reason: str) -> None:
        """Refuse all waiting and later requests with this reason; a second call changes nothing."""
        self.closed = self.closed or reason
        self._ready.set()

    async def request(self, path: str, body: bytes, headers: Mapping[str, str]) -> PolicyAnswer:
        """Forward a request to the policy.

        Raises:
            PolicyGone: the sample of the policy has ended, or does not return.
        """
        exchange = Exchange(path, body, headers)
        self._exchanges.append(exchange)
        task = asyncio.create_task(self._complete(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)  # a client that times out repeats the request and gets this answer

    async def _complete(self, exchange: Exchange) -> PolicyAnswer:
        """Forward a request until the sample answers it. A request without success is not repeated later."""
        while True:
            arrival = await self._wait_for_sample()
            answer = await self._forward(arrival, exchange)
            if answer is not None:
                if answer.status == 200:
                    exchange.answer = answer
                else:
                    self._exchanges.remove(exchange)
                return answer
            self.leave(arrival)
            arrival.answer(409, f"no server responds at {arrival.base_url}")

    async def _wait_for_sample(self) -> Arrival:
        """Return the sample, when it accepts requests.

        Raises:
            PolicyGone: the sample has ended, or did not return in time.
        """
        if self.arrival is None and self._is_truncated():
            raise PolicyGone(f"the response of {self.policy} has ended: it reached its limit of tokens")
        try:
            async with asyncio.timeout(self.wait):
                while not self._ready.is_set():
                    await self._ready.wait()
        except TimeoutError:
            self.close(f"the run did not send the sample again within {self.wait:g} s")
        if self.closed or self.arrival is None:
            raise PolicyGone(f"the response of {self.policy} has ended: {self.closed}")
        return self.arrival

    def _is_truncated(self) -> bool:
        """Whether the last answer is truncated."""
        answers = [e.answer for e in self._exchanges if e.answer is not None]
        return bool(answers) and _TRUNCATED.search(answers[-1].body) is not None

    async def _forward(self, arrival: Arrival, exchange: Exchange) -> PolicyAnswer | None:
        """Forward a request to a sample, and return its answer; None if the sample is no longer at its address."""
        headers = {**exchange.headers, "Authorization": f"Bearer {arrival.key}"}
        url = arrival.base_url + exchange.path
        try:
            async with self.session.post(
                url, data=exchange.body, headers=headers, allow_redirects=False
            ) as answer:
                lines = (await read_bounded(answer, MAX_ANSWER_BYTES)).split(b"\n")
                policy_answer = PolicyAnswer(
                    answer.status, answer.content_type, b"\n".join(_without_keep_alive(lines))
                )
        except (aiohttp.ClientError, OSError):
            return None
        return None if policy_answer.status in _ENDED_STATUSES else policy_answer

    def end(self) -> None:
        """Cancel all requests."""
        for task in self._tasks:
            task.cancel()


def _without_keep_alive(lines: list[bytes]) -> list[bytes]:
    """Remove comments of a stream, and white space before JSON."""
    body_lines = [line for line in lines if not line.startswith(b":")]
    while body_lines and not body_lines[0].strip():
        body_lines.pop(0)
    return body_lines
