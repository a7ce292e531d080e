"""One engine behind the router: what is known of it, and what becomes of it. Owner: the pool.

dead --probe--> stale --push or copy, attested--> serving --nobody listens, a request fails--> dead
                  |                          |--answers with other weights (it was restarted)--> stale
                  |                          |--drain--> draining --nothing in it--> gone
                  |                          '--pin--> evaluates --unpin--> serving, or stale after a push
                  '--push, not attested--> quarantined, until it is restarted
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from rlsys.core.types import Sample, Segment
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import DeadEngine, EngineError, NobodyListens, Stranger
from rlsys.router.attest import Agreement
from rlsys.router.breaker import Breaker
from rlsys.router.checksums import Match
from rlsys.router.speed import Speed

log = logging.getLogger("rlsys.router")

NEVER = -1
"""Version of an engine whose weights are not known. Real versions are 0 and above."""
PROBE_TIMEOUT = 5.0
SILENT_PROBES = 5
"""Unanswered probes in a row after which an engine counts as dead: it is stopped, or its machine is gone. A probe
a second: that is half a minute, half of what an interrupt waits: one or two may be late on a busy machine. The HTTP
process answers them (/model_info) by itself, whatever its scheduler, another process, computes: no prefill, however
long, keeps it from answering. A scheduler that hangs alone is left to the server's own watchdog.
"""
MOST_FRUITLESS = 5
"""Pushes in a row that an engine may miss while it answers probes."""
UNBOUNDED = 2**31
"""Slots of an engine of which nobody knows how many requests it decodes at once."""
RESTING, RESTING_CACHE = "resting", "resting-cache"
"""Versions by which an engine says what it has given back: weights and cache, or the cache alone. With the engine,
the mark outlives a rollout process; to take back what was not given would kill it."""


@dataclass
class Flight:
    """One request in an engine. Its scope has no deadline until somebody cuts the request off."""

    rid: str
    sample: Sample | None  # None for a request that came over HTTP
    scope: asyncio.Timeout
    tokens: int = 0  # prompt and response, as far as they are here
    blocked: bool = False  # its client does not read, and so nothing is read from the engine
    pinned: bool = False  # of an evaluation that has the engine for itself
    arrived: int = 0  # tokens of it that came
    dropped: int = 0  # those of them that came behind the end of the turn
    why: str = ""  # its prompt may be in the engine's cache, see Router.stats
    unread: int = 0  # tokens of its prompt, until its first token comes
    began: bool = False  # that one came
    since: float | None = (
        None  # it was sent, or gave its last tokens; None: the engine rested since, or was full
    )


@dataclass
class EngineState:
    """One engine, and its tokens: `received` counts what came from this server process, whatever it was for,
    `generated` is the process's own count, read when nothing runs. The difference, `lost_now`, got lost on the way.

    `trusted`: no trainer attests its weights, so what it reports is what it has (a router that stands alone).
    """

    client: EngineClient
    trusted: bool = False
    pool: str = ""  # the name of its pool, where the config has pools
    cost: float = 1.0  # of one of its ranks for a second
    chain: int | None = None  # of one that joined, see EngineAddress
    explores: bool = False  # tries prompts out, and gets nothing else to do
    alive: bool = False
    draining: bool = False
    paused: bool = False  # holds its requests and makes no tokens
    pinned: bool = False  # answers an evaluation, and keeps its weights for it
    resting: bool = False  # gets nothing new: a push begins with it
    loading: bool = False  # weights out of a folder or from another engine, on its own
    copied: bool = False  # these came, and no push has reached this process yet: it is in no process group
    uncopied: bool = False  # another engine's weights did not arrive: it waits for the trainer's
    quarantined: str | None = None
    refusal: str | None = (
        None  # to the last probe, in words: somebody listens there, but not as an engine does
    )
    agreement: Agreement | None = None  # of the last push
    match: Match | None = None  # of the last push
    version: int = NEVER
    pushed: set[int] = field(default_factory=set)  # versions that its requests' tokens may have
    breaker: Breaker = field(default_factory=Breaker)
    flights: dict[str, Flight] = field(default_factory=dict)
    landed: asyncio.Event = field(default_factory=asyncio.Event)  # one of them has just ended
    tokens: int = 0  # of all flights
    unread: int = 0  # of all flights
    slots: int = UNBOUNDED
    speed: Speed = field(default_factory=Speed)  # of this process
    attested: asyncio.Event = field(default_factory=asyncio.Event)  # held requests wait for it after a push
    received: int = 0
    generated: int = 0
    generated_before: int = 0  # by the processes before, and for the rollout processes before
    lost_now: int = 0
    lost_before: int = 0
    counting: bool = False  # else the count starts anew with the next push
    deaths: int = 0
    since: float | None = None  # loop time of its first answer here
    silent: int = 0  # probes in a row without an answer
    failure: str = ""  # of the last call to it that failed, in words
    fruitless: int = 0  # pushes in a row, to one process, that it answered and did not get through
    _counter_start: int = 0

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def load(self) -> int:
        return len(self.flights)

    @property
    def seconds_to_read(self) -> float | None:
        return self.speed.read

    @property
    def seconds_to_write(self) -> tuple[float, float] | None:
        return self.speed.write

    def hear(self, flight: Flight, segment: Segment, now: float) -> None:
        """Tokens of a flight came: what that says of the engine's speed."""
        if not segment.ids or not segment.prompt_tokens:  # it was aborted in the queue
            return
        if flight.began:
            self.speed.went_on(len(segment.ids), self.load, flight.since, now)
        else:
            flight.began = True
            self.unread -= flight.unread
            flight.unread = 0
            self.speed.began(segment.prompt_tokens - segment.cached_tokens, flight.since, now)
        flight.since = now

    def rested(self) -> None:
        """It made no tokens for a while, and goes on: what comes next says nothing of its speed."""
        for flight in self.flights.values():
            flight.since = None

    def died(self) -> None:
        """A request to it failed. Every other one is cut off too: what was not streamed yet is made again.

        Its process may live on and count those tokens: the count starts anew with the next push.
        """
        self.counting = self.uncopied = False
        self.speed = Speed()
        if self.alive:
            self.alive = False
            self.deaths += 1
            self.failed()
        self.paused = False
        self.cut_off()

    def failed(self) -> None:
        self.breaker.failed(asyncio.get_running_loop().time())

    def lost_weights(self) -> None:
        """It does not have the weights that were pushed to it: another process took its place."""
        self.counting = False
        self.speed = Speed()
        self.version = NEVER
        self.pushed.clear()
        self.paused = False
        self.cut_off()

    def cut_off(self) -> None:
        now = asyncio.get_running_loop().time()
        for flight in self.flights.values():
            if not flight.scope.expired():  # cut already, and not unwound yet
                flight.scope.reschedule(now)

    def has(self, version: int) -> None:
        """Its weights are known, and those that push asked for."""
        self.version = version
        self.pushed.add(version)
        self.fruitless = 0
        self.breaker.succeeded()
        self.attested.set()

    async def probe(self) -> None:
        """Is it there, and with the weights that it should have? A slow answer is no death, none at all is."""
        expected = self.version
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                reported = await self.client.weight_version()
        except NobodyListens:
            self.fruitless = 0  # what comes up here next is another process
            if self.alive or self.flights:
                self.died()
            return
        except EngineError as e:
            self.silent = 0
            if self.refusal is None:
                log.warning("%s", e)
            self.refusal = str(e)
            if isinstance(e, Stranger) and (self.alive or self.flights):
                self.died()  # somebody else has its port
            return
        except DeadEngine:
            self.silent += 1
            if self.alive and self.silent >= SILENT_PROBES:
                log.warning("%s: has not answered %d probes of %g s", self.url, self.silent, PROBE_TIMEOUT)
                self.died()
            return
        self.silent, self.refusal = 0, None
        if self.version != expected or self.loading:
            return  # a push went on meanwhile
        if self.trusted:
            reported = max(reported, 0)
        if expected not in (NEVER, reported):
            self.lost_weights()
        if not self.alive:
            self.alive = True
            if not self.hopeless:
                self.quarantined = None
        if self.trusted and self.version == NEVER:
            self.version = reported
            self.pushed.add(reported)
            self.attested.set()

    async def start_counting(self) -> None:
        """Before its first push: stop what it does for a rollout process that is gone, then count from here."""
        await self.client.abort(None)
        await self.client.continue_generation()
        await self.client.flush()
        self.pushed.clear()
        start = await self.client.generated_tokens()
        self.generated_before += max(self.generated, self.received)  # what arrived was made, counted or not
        self.lost_before += self.lost_now
        self._counter_start, self.generated, self.received, self.lost_now = start, 0, 0, 0
        self.speed = Speed()  # it may be another process than before
        self.counting = True

    async def rest(self) -> None:
        """Give weights and cache away, with their memory, while nothing runs in it; the next push wakes it."""
        if self.version == NEVER:  # rests already, or never had weights
            return
        await self.client.flush()
        self.version = NEVER
        self.attested.clear()
        await self.client.set_weight_version(RESTING)
        await self.client.release_memory()

    async def wake_weights(self) -> None:
        """Memory for the weights that a push brings; the trainer may still need that of the cache."""
        if await self.client.weight_label() == RESTING:
            await self.client.resume_memory("weights")
            await self.client.set_weight_version(RESTING_CACHE)

    async def wake_cache(self) -> None:
        if await self.client.weight_label() == RESTING_CACHE:
            await self.client.resume_memory("kv_cache")

    async def count(self) -> None:
        """Read its own counter of generated tokens; the last figure stays when it does not answer.

        Not before `start_counting`: until then the counter holds what others asked for.
        """
        if not self.counting:
            return
        try:
            self.generated = await self.client.generated_tokens() - self._counter_start
        except (*DeadEngine, EngineError):
            self.died()
        else:
            self.lost_now = max(0, self.generated - self.received)

    def missed_push(self) -> None:
        """It answers, and yet a push did not get through. One more than a few, and nobody tries again: each takes the
        trainer's time, and new versions look like progress."""
        self.fruitless += 1
        if self.hopeless:
            self.quarantined = f"{self.fruitless} pushes in a row failed, the last with: {self.failure}"

    @property
    def hopeless(self) -> bool:
        """Until another process has taken its place."""
        return self.fruitless >= MOST_FRUITLESS

    @property
    def lost(self) -> int:
        """Tokens that it made, as of the last count, and nobody received."""
        return self.lost_before + self.lost_now

    @property
    def rank_seconds(self) -> float:
        """Of its ranks together, since it answered for the first time."""
        if self.since is None:
            return 0.0
        return self.client.tp * (asyncio.get_running_loop().time() - self.since)

    def held_off(self, now: float) -> bool:
        """By its breaker. On trial it takes a single request."""
        if not self.breaker.failures:  # asked for every request: most engines never failed
            return False
        return self.breaker.open(now) or (self.breaker.on_trial(now) and self.load > 0)

    @property
    def state(self) -> str:
        """For people."""
        if not self.alive and not self.hopeless:
            return f"dead: {self.refusal[:300]}" if self.refusal else "dead"
        if self.quarantined is not None:
            return f"quarantined: {self.quarantined}"
        if self.draining:
            return f"draining: {self.load} requests"
        if self.pinned:
            return f"evaluates version {self.version}"
        return "without weights" if self.version == NEVER else f"version {self.version}"
