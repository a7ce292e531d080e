"""EngineState: the state of one engine behind the router. Owner: the pool.

dead --probe--> stale --push or copy, attested--> serving --no response, a request fails--> dead
                  |                          |--answers with other weights (it was restarted)--> stale
                  |                          |--drain--> draining --empty--> removed
                  |                          '--pin--> evaluating --unpin--> serving, or stale after a push
                  '--push, not attested--> quarantined, until it is restarted
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from rlsys.core.types import Segment, TokenSequence
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import DeadEngine, EngineError, ForeignServer, PortClosed
from rlsys.router.attest import Agreement
from rlsys.router.breaker import Breaker
from rlsys.router.engine_checksums import Match
from rlsys.router.speed import Speed

log = logging.getLogger("rlsys.router")

NEVER = -1
"""Version of an engine whose weights are unknown. Actual versions start at 0."""
PROBE_TIMEOUT = 5.0
SILENT_PROBES = 5
"""Failed probes in a row after which an engine counts as dead: its process is stopped, or its machine is gone.

With one probe per second this takes half a minute, half the time limit of an interrupt; one or two probes may
be late on a busy machine. The HTTP process answers probes (/model_info) independently of the scheduler process,
so a long prefill does not delay them. The server's own watchdog detects a scheduler that hangs.
"""
MAX_FAILED_PUSHES = 5
"""Pushes in a row that may fail on an engine that answers probes."""
UNBOUNDED = 2**31
"""Slots of an engine whose number of concurrent requests is unknown."""
RELEASED_LABEL, RELEASED_CACHE_LABEL = "resting", "resting-cache"
"""Weight labels of an engine that has released weights and cache, or the cache only.

They are stored in the engine, so they outlive a rollout process: resuming memory that was not released kills
it.
"""


@dataclass
class Flight:
    """One request in an engine. Its scope has no deadline until the request is cancelled."""

    rid: str
    sample: TokenSequence | None  # None for a request without one: log-probs, or loading a folder
    scope: asyncio.Timeout
    tokens: int = 0  # prompt and response tokens so far
    pinned: bool = False  # of an evaluation on its pinned engine
    received_tokens: int = 0  # tokens that arrived
    dropped: int = 0  # of these, tokens after the end of the turn
    cache_source: str = ""  # why its prompt may be cached, see Router.stats
    unread: int = 0  # prompt tokens, until its first token arrives
    has_tokens: bool = False  # that one came
    last_token_at: float | None = (
        None  # sent, or last tokens received; None: the engine was paused since, or full
    )


@dataclass
class EngineState:
    """One engine and its counts of tokens.

    `received` counts tokens that arrived from this server process for any purpose; `generated` is the process's
    own count, read when no request runs. The difference, `lost_now`, was lost in transit. `skip_attestation`:
    no trainer attests its weights, so its reported version is trusted (a stand-alone router).
    """

    client: EngineClient
    skip_attestation: bool = False
    pool: str = ""  # name of its pool, if the config has pools
    cost: float = 1.0  # per rank and second
    chain: int | None = None  # for an engine that joined, see EngineAddress
    explores: bool = False  # serves exploration only
    alive: bool = False
    draining: bool = False
    paused: bool = False  # holds its requests and generates no tokens
    pinned: bool = False  # reserved for an evaluation, with its weights
    update_pending: bool = False  # gets no new requests: a push starts on it
    loading: bool = False  # loads weights from a folder or another engine
    copied: bool = False  # has them without a push to this process: it is in no process group
    uncopied: bool = False  # a copy failed: it waits for the trainer's weights
    quarantined: str | None = None
    refusal: str | None = None  # error of the last probe: another kind of server responds
    agreement: Agreement | None = None  # of the last push
    match: Match | None = None  # of the last push
    version: int = NEVER
    pushed: set[int] = field(default_factory=set)  # versions that new tokens may have
    breaker: Breaker = field(default_factory=Breaker)
    flights: dict[str, Flight] = field(default_factory=dict)
    flight_ended: asyncio.Event = field(default_factory=asyncio.Event)  # set when one of them ends
    tokens: int = 0  # of all flights
    unread: int = 0  # of all flights
    slots: int = UNBOUNDED
    speed: Speed = field(default_factory=Speed)  # of this process
    attested: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # requests with new tokens wait for it after a push
    received: int = 0
    generated: int = 0
    generated_before: int = 0  # by earlier engine processes, and for earlier rollout processes
    lost_now: int = 0
    lost_before: int = 0
    counting: bool = False  # False: counting restarts with the next push
    uncounted: bool = True  # it may have generated tokens since its count was read
    deaths: int = 0
    first_response_at: float | None = None  # loop time of its first response
    unanswered_probes: int = 0  # in a row
    failure: str = ""  # message of the last failed call
    failed_pushes: int = 0  # in a row, to one live process
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

    def record_tokens(self, flight: Flight, segment: Segment, time: float) -> None:
        """Update the measured speed with new tokens of a flight."""
        if not segment.ids or not segment.prompt_tokens:  # aborted in the queue
            return
        if flight.has_tokens:
            self.speed.record_decode(len(segment.ids), self.load, flight.last_token_at, time)
        else:
            flight.has_tokens = True
            self.unread -= flight.unread
            flight.unread = 0
            self.speed.record_prefill(
                segment.prompt_tokens - segment.cached_tokens, flight.last_token_at, time
            )
        flight.last_token_at = time

    def reset_timing(self) -> None:
        """Restart the time measurement of all flights after a pause."""
        for flight in self.flights.values():
            flight.last_token_at = None

    def mark_dead(self) -> None:
        """Mark the engine dead after a failed request, and cancel all others; unstreamed tokens are repeated.

        Its process may still run and count these tokens, so counting restarts with the next push.
        """
        self.counting = self.uncopied = False
        self.speed = Speed()
        if self.alive:
            self.alive = False
            self.deaths += 1
            self.record_failure()
        self.paused = False
        self.cancel_flights()

    def record_failure(self) -> None:
        self.breaker.record_failure(asyncio.get_running_loop().time())

    def mark_weights_lost(self) -> None:
        """Mark the engine as without the pushed weights: another process took its place."""
        self.counting = False
        self.speed = Speed()
        self.version = NEVER
        self.pushed.clear()
        self.paused = False
        self.cancel_flights()

    def cancel_flights(self) -> None:
        time = asyncio.get_running_loop().time()
        for flight in self.flights.values():
            if not flight.scope.expired():  # not cancelled yet
                flight.scope.reschedule(time)

    def set_version(self, version: int) -> None:
        """Set the version after its weights were attested."""
        self.version = version
        self.pushed.add(version)
        self.failed_pushes = 0
        self.breaker.record_success()
        self.attested.set()

    async def probe(self) -> None:
        """Check that the engine is up and has the expected weights. A slow response is not a failure."""
        expected = self.version
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                reported = await self.client.weight_version()
        except PortClosed:
            self.failed_pushes = 0  # the next process here is another one
            if self.alive or self.flights:
                self.mark_dead()
            return
        except EngineError as e:
            self.unanswered_probes = 0
            if self.refusal is None:
                log.warning("%s", e)
            self.refusal = str(e)
            if isinstance(e, ForeignServer) and (self.alive or self.flights):
                self.mark_dead()  # another server has its port
            return
        except DeadEngine:
            self.unanswered_probes += 1
            if self.alive and self.unanswered_probes >= SILENT_PROBES:
                log.warning(
                    "%s: has not answered %d probes of %g s", self.url, self.unanswered_probes, PROBE_TIMEOUT
                )
                self.mark_dead()
            return
        self.unanswered_probes, self.refusal = 0, None
        if self.version != expected or self.loading:
            return  # a push proceeded meanwhile
        label = reported  # that of the tokens, -1 where it is not a number
        if self.skip_attestation:
            reported = max(reported, 0)
        if expected not in (NEVER, reported):
            self.mark_weights_lost()
        if not self.alive:
            self.alive = True
            if not self.hopeless:
                self.quarantined = None
        if self.skip_attestation and self.version == NEVER:
            self.version = reported
            self.pushed |= {reported, label}
            self.attested.set()

    async def start_counting(self) -> None:
        """Prepare for the first push: abort requests of an earlier rollout process, and count tokens from here."""
        await self.client.abort(None)
        await self.client.continue_generation()
        await self.client.flush()
        self.pushed.clear()
        start = await self.client.generated_tokens()
        self.generated_before += max(
            self.generated, self.received
        )  # arrived tokens were generated, counted or not
        self.lost_before += self.lost_now
        self._counter_start, self.generated, self.received, self.lost_now = start, 0, 0, 0
        self.speed = Speed()  # it may be another process
        self.counting = True

    async def release_memory(self) -> None:
        """Release the memory of weights and cache while no request runs; the next push resumes it."""
        if self.version == NEVER:  # already released, or never had weights
            return
        await self.client.flush()
        self.version = NEVER
        self.attested.clear()
        await self.client.set_weight_version(RELEASED_LABEL)
        await self.client.release_memory()

    async def wake_weights(self) -> None:
        """Resume the memory of the weights for a push. The trainer may still need that of the cache."""
        if await self.client.weight_label() == RELEASED_LABEL:
            await self.client.resume_memory("weights")
            await self.client.set_weight_version(RELEASED_CACHE_LABEL)

    async def wake_cache(self) -> None:
        if await self.client.weight_label() == RELEASED_CACHE_LABEL:
            await self.client.resume_memory("kv_cache")

    async def count(self) -> None:
        """Read the engine's counter of generated tokens; keep the last value if it does not respond.

        Does nothing before `start_counting`: the counter includes requests of other clients. Nor if no request has
        run since the last call: SGLang takes long to answer.
        """
        if not (self.counting and self.uncounted):
            return
        try:
            self.generated = await self.client.generated_tokens() - self._counter_start
        except (*DeadEngine, EngineError):
            self.mark_dead()
        else:
            self.lost_now = max(0, self.generated - self.received)
            self.uncounted = bool(self.flights)

    def missed_push(self) -> None:
        """Count a push that failed on a live engine, and quarantine it after several.

        Each costs the trainer time, and new versions would look like progress.
        """
        self.failed_pushes += 1
        if self.hopeless:
            self.quarantined = f"{self.failed_pushes} pushes in a row failed, the last with: {self.failure}"

    @property
    def hopeless(self) -> bool:
        """Whether so many pushes failed that the engine is not used until its process is replaced."""
        return self.failed_pushes >= MAX_FAILED_PUSHES

    @property
    def lost_tokens(self) -> int:
        """Tokens that the engine generated, as of the last count, and that never arrived."""
        return self.lost_before + self.lost_now

    @property
    def rank_seconds(self) -> float:
        """Seconds since its first response, times its number of ranks."""
        if self.first_response_at is None:
            return 0.0
        return self.client.tp * (asyncio.get_running_loop().time() - self.first_response_at)

    def backing_off(self, time: float) -> bool:
        """Return whether its breaker allows no further request. On trial it allows a single one."""
        if not self.breaker.failures:  # fast path, for every request
            return False
        return self.breaker.open(time) or (self.breaker.on_trial(time) and self.load > 0)

    @property
    def state(self) -> str:
        """Description for users."""
        if not self.alive and not self.hopeless:
            return f"dead: {self.refusal[:300]}" if self.refusal else "dead"
        if self.quarantined is not None:
            return f"quarantined: {self.quarantined}"
        if self.draining:
            return f"draining: {self.load} requests"
        if self.pinned:
            return f"evaluates version {self.version}"
        return "without weights" if self.version == NEVER else f"version {self.version}"
