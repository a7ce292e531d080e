"""The engines behind the router and what is known of each. Owner: the router."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlsys.engine.client import DeadEngine, EngineClient, EngineError


@dataclass
class EngineState:
    """One engine. It serves when it is alive, not quarantined, and at the pool's weight version.

    `received` counts tokens that came back from it since its (re)start, whatever they were for; its own counter
    says how many it made. The difference, looked at while nothing runs, is what was lost on the way.
    """

    client: EngineClient
    alive: bool = True
    quarantined: str | None = None
    version: int = -1
    in_flight: set[str] = field(default_factory=set)
    received: int = 0
    generated: int = 0
    deaths: int = 0

    @property
    def url(self) -> str:
        return self.client.url

    def died(self) -> None:
        """A request to it failed. What it had made and not yet sent is made again by whoever goes on."""
        if self.alive:
            self.alive = False
            self.deaths += 1

    async def probe(self) -> None:
        """Find out whether a dead engine is back. A restarted one reports a version that was never pushed."""
        if self.alive or not await self.client.healthy():
            return
        try:
            version, generated = await self.client.weight_version(), await self.client.generated_tokens()
        except (*DeadEngine, EngineError):
            return
        self.version, self.received, self.generated, self.alive = version, generated, generated, True

    async def count(self) -> None:
        """Read its own counter of generated tokens; the last figure stays when it does not answer."""
        try:
            self.generated = await self.client.generated_tokens()
        except (*DeadEngine, EngineError):
            self.died()

    @property
    def state(self) -> str:
        """For people."""
        if self.quarantined is not None:
            return f"quarantined: {self.quarantined}"
        return f"version {self.version}" if self.alive else "dead"


class Pool:
    """All engines and the weight version that they should have."""

    def __init__(self, clients: list[EngineClient]) -> None:
        self.engines = [EngineState(c) for c in clients]
        self.version = 0

    def serving(self) -> list[EngineState]:
        return [e for e in self.alive() if e.version == self.version]

    def alive(self) -> list[EngineState]:
        return [e for e in self.engines if e.alive and e.quarantined is None]

    def stale(self) -> list[EngineState]:
        """Alive, but without the current weights: they serve after a push."""
        return [e for e in self.alive() if e.version != self.version]

    async def count(self) -> None:
        """Compare the engines' own counters with what arrived; only meaningful while nothing is in flight."""
        for engine in self.alive():
            await engine.count()

    @property
    def lost(self) -> int:
        """Tokens that engines made, as of the last count, and nobody received."""
        return sum(max(0, e.generated - e.received) for e in self.engines)
