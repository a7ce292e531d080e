"""The engines behind the router and what is known of each. Owner: the router.

dead --probe--> stale --push, attested--> serving --nobody listens, a request fails--> dead
                  |                          '--answers with other weights (it was restarted)--> stale
                  '--push, not attested--> quarantined, until it is restarted
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rlsys.engine.client import DeadEngine, EngineClient, EngineError, NobodyListens
from rlsys.router.attest import Agreement

NEVER = -1
"""Version of an engine whose weights this router has not attested. Real versions are above 0."""
PROBE_TIMEOUT = 5.0


@dataclass
class EngineState:
    """One engine, and its tokens: `received` counts what came from this server process, whatever it was for,
    `generated` is the process's own count, read when nothing runs. The difference got lost on the way.
    """

    client: EngineClient
    alive: bool = False
    quarantined: str | None = None
    agreement: Agreement | None = None  # of the last push
    version: int = NEVER
    load: int = 0  # requests in it
    streams: dict[str, asyncio.Timeout] = field(default_factory=dict)
    received: int = 0
    generated: int = 0
    generated_before: int = 0  # by the processes before, and for the rollout processes before
    lost_before: int = 0
    deaths: int = 0
    _counter_start: int = 0

    @property
    def url(self) -> str:
        return self.client.url

    def died(self) -> None:
        """A request to it failed. Every other one is cut off too: what was not streamed yet is made again."""
        if self.alive:
            self.alive = False
            self.deaths += 1
        self._cut_streams()

    def lost_weights(self) -> None:
        """It does not have the weights that were pushed to it: another process took its place."""
        self.version = NEVER
        self._cut_streams()

    async def probe(self) -> None:
        """Is it there, and with the weights that it should have? A slow answer is no death."""
        expected = self.version
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                reported = await self.client.weight_version()
        except NobodyListens:
            self.died()
            return
        except (*DeadEngine, EngineError):
            return
        if self.version != expected:
            return  # a push went on meanwhile
        if expected not in (NEVER, reported):
            self.lost_weights()
        if not self.alive:
            self.alive, self.quarantined = True, None

    async def start_counting(self) -> None:
        """Before its first push: stop what it does for a rollout process that is gone, then count from here."""
        await self.client.abort(None)
        await self.client.flush()
        start = await self.client.generated_tokens()
        self.generated_before += self.generated
        self.lost_before += self._lost_now
        self._counter_start, self.generated, self.received = start, 0, 0

    async def count(self) -> None:
        """Read its own counter of generated tokens; the last figure stays when it does not answer.

        Not before `start_counting`: until then the counter holds what others asked for.
        """
        if self.version == NEVER:
            return
        try:
            self.generated = await self.client.generated_tokens() - self._counter_start
        except (*DeadEngine, EngineError):
            self.died()

    @property
    def lost(self) -> int:
        """Tokens that it made, as of the last count, and nobody received."""
        return self.lost_before + self._lost_now

    @property
    def _lost_now(self) -> int:
        return max(0, self.generated - self.received)

    @property
    def state(self) -> str:
        """For people."""
        if not self.alive:
            return "dead"
        if self.quarantined is not None:
            return f"quarantined: {self.quarantined}"
        return "without weights" if self.version == NEVER else f"version {self.version}"

    def _cut_streams(self) -> None:
        now = asyncio.get_running_loop().time()
        for scope in self.streams.values():
            if not scope.expired():  # cut already, and not unwound yet
                scope.reschedule(now)


class Pool:
    """All engines and the weight version that they should have."""

    def __init__(self, clients: list[EngineClient]) -> None:
        self.engines = [EngineState(c) for c in clients]
        self.version = NEVER

    def alive(self) -> list[EngineState]:
        return [e for e in self.engines if e.alive and e.quarantined is None]

    def serving(self) -> list[EngineState]:
        return [e for e in self.alive() if e.version == self.version != NEVER]

    def stale(self) -> list[EngineState]:
        """Alive, but without the current weights: they serve after a push."""
        return [e for e in self.alive() if e.version != self.version]

    @property
    def in_flight(self) -> int:
        return sum(e.load for e in self.engines)

    async def probe(self) -> None:
        await asyncio.gather(*(e.probe() for e in self.engines))

    async def count(self) -> None:
        """Compare the engines' own counters with what arrived; only meaningful while nothing is in flight."""
        await asyncio.gather(*(e.count() for e in self.alive()))
