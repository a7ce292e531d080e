"""Endpoint of a policy in an episode. Its address stays the same when the run behind it restarts.

The episode's function asks the seat, and the seat asks the sample that its run has sent. What was said is kept. When
the run's process dies, a question waits; the sample comes again with another address, is asked everything once more,
answers from its ledger, and the question goes on. So the function, and the other policies, notice nothing.
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

_CUT = re.compile(rb'"(finish|stop)_reason": "(length|max_tokens)"|"status": "incomplete"')
"""In an answer of any API: its conversation may be full. Inside a text its quotes would be escaped."""
MOST_BYTES = 64 * 2**20
"""Of an answer of a run."""
_OVER = (401, 410)
"""What a run answers when nobody of this address is there any more."""


class Gone(Exception):
    """A policy that was asked is not here any more, and does not come back."""


@dataclass(eq=False)
class Arrival:
    """A run's request to play a sample. `outcome`: status and words of the answer to it; None: break the connection,
    and the run sends the sample once more."""

    policy: str
    row: Mapping[str, Any]
    seed: int
    base_url: str
    key: str
    reward_url: str
    evaluation: str
    """Which one of the run it is of; empty for training."""
    outcome: asyncio.Future[tuple[int, str] | None]

    def answer(self, status: int, words: str) -> None:
        if not self.outcome.done():
            self.outcome.set_result((status, words))

    def send_again(self) -> None:
        if not self.outcome.done():
            self.outcome.set_result(None)


@dataclass(frozen=True)
class Said:
    status: int
    kind: str
    """Content type."""
    body: bytes
    """Without the signs of life that came before and between."""


@dataclass(eq=False)
class Exchange:
    """A question of the function, and what the policy said to it; None as long as it has not."""

    path: str
    body: bytes
    headers: Mapping[str, str]
    said: Said | None = None


@dataclass(eq=False)
class Seat:
    """Owns what was said in it, and whose it is now. `wait`: seconds that it stays free for its sample."""

    policy: str
    session: aiohttp.ClientSession
    wait: float
    name: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    arrival: Arrival | None = None
    closed: str = ""
    """Why nobody will sit here again."""
    _exchanges: list[Exchange] = field(default_factory=list)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _asking: set[asyncio.Task[Said]] = field(default_factory=set)

    @property
    def used(self) -> bool:
        """Whether its policy has been asked."""
        return bool(self._exchanges)

    def replace(self, arrival: Arrival) -> None:
        """The sample is here, or here again; nobody is asked before `take`."""
        self.arrival = arrival
        self._ready.clear()

    async def take(self, arrival: Arrival) -> bool:
        """Tell the sample what was said, from the beginning. False: it says something else now, so nobody may go on
        with it."""
        for exchange in [e for e in self._exchanges if e.said is not None]:
            said = await self._forward(arrival, exchange)
            if self.arrival is not arrival or said is None:
                return True  # it has gone again, and may come again
            if said != exchange.said:
                self.close("it does not say again what it has said before")
                return False
        self._ready.set()
        return True

    def leave(self, arrival: Arrival) -> None:
        if self.arrival is arrival:
            self.arrival = None
            self._ready.clear()

    def close(self, why: str) -> None:
        """Whoever asks is told so."""
        self.closed = self.closed or why
        self._ready.set()

    async def ask(self, path: str, body: bytes, headers: Mapping[str, str]) -> Said:
        """What the policy answers. Raises Gone when it is not here any more and does not come back."""
        exchange = Exchange(path, body, headers)
        self._exchanges.append(exchange)
        task = asyncio.create_task(self._asked(exchange))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return await asyncio.shield(task)  # a client that gives up asks again, and gets this answer

    async def _asked(self, exchange: Exchange) -> Said:
        while True:
            arrival = await self._present()
            said = await self._forward(arrival, exchange)
            if said is not None:
                if said.status == 200:
                    exchange.said = said
                else:
                    self._exchanges.remove(exchange)
                return said
            self.leave(arrival)
            arrival.answer(409, f"nobody answers at {arrival.base_url}")

    async def _present(self) -> Arrival:
        if self.arrival is None and self._full():
            raise Gone(f"the response of {self.policy} has ended: it had no room for another answer")
        try:
            async with asyncio.timeout(self.wait):
                while not self._ready.is_set():
                    await self._ready.wait()
        except TimeoutError:
            self.close(f"its run did not send it again within {self.wait:g} s")
        if self.closed or self.arrival is None:
            raise Gone(f"the response of {self.policy} has ended: {self.closed}")
        return self.arrival

    def _full(self) -> bool:
        answered = [e.said for e in self._exchanges if e.said is not None]
        return bool(answered) and _CUT.search(answered[-1].body) is not None

    async def _forward(self, arrival: Arrival, exchange: Exchange) -> Said | None:
        """None: nobody is at this address any more."""
        headers = {**exchange.headers, "Authorization": f"Bearer {arrival.key}"}
        url = arrival.base_url + exchange.path
        try:
            async with self.session.post(
                url, data=exchange.body, headers=headers, allow_redirects=False
            ) as answer:
                lines = (await read_bounded(answer, MOST_BYTES)).split(b"\n")
                said = Said(answer.status, answer.content_type, b"\n".join(_without_signs_of_life(lines)))
        except (aiohttp.ClientError, OSError):
            return None
        return None if said.status in _OVER else said

    def end(self) -> None:
        """Nobody asks any more."""
        for task in self._asking:
            task.cancel()


def _without_signs_of_life(lines: list[bytes]) -> list[bytes]:
    """A stream's comments and what ends them; white space before JSON."""
    found = [line for line in lines if not line.startswith(b":")]
    while found and not found[0].strip():
        found.pop(0)
    return found
