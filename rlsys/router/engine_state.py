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
"""Consecutive failed probes after which an engine counts as dead: its process is stopped, or its machine is off.

Five probes take half a minute, which is half the time limit of an interrupt; on a busy machine one or two probes may
be late. The HTTP process answers probes (/model_info) independently of the scheduler process, so a long prefill does
not delay them. The server's own watchdog detects a scheduler that hangs.
"""
MAX_FAILED_PUSHES = 5
"""Consecutive failed pushes after which an engine that answers probes is quarantined."""
UNBOUNDED = 2**31
"""Slots of an engine whose number of concurrent requests is unknown."""
RELEASED_LABEL, RELEASED_CACHE_LABEL = "resting", "resting-cache"
"""Weight labels of an engine that has released the memory of weights and cache, or of the cache only.

An engine dies if memory is resumed that it has not released. A new rollout process reads the state from the label.
"""


@dataclass
class Flight:
    """One request in an engine. `scope` has no deadline until the request is cancelled by setting one."""

    rid: str
    sample: TokenSequence | None  # None for a request without one, such as log-probs
    scope: asyncio.Timeout
    tokens: int = 0  # prompt and response tokens so far
    pinned: bool = False  # belongs to an evaluation on the pinned engine
    received_tokens: int = 0  # tokens that arrived
    dropped: int = 0  # of these, tokens after the end of the turn
    cache_source: str = ""  # why its prompt may be cached, see Router.stats
    pending_prefill: int = 0  # prompt tokens to process; 0 from the first token on
    has_tokens: bool = False  # whether a token has arrived
    # time of the request or of its last tokens; None: the engine was paused or full since
    last_token_at: float | None = None


@dataclass
class EngineState:
    """One engine and its counts of tokens.

    `received` counts tokens that arrived from the current engine process for any purpose; `generated` is the
    process's own count, read when no request runs. `lost_now` is the difference: tokens that were lost in transit.
    """

    client: EngineClient
    skip_attestation: bool = False  # trust the reported weight version: a stand-alone router has no trainer
    pool: str = ""  # name of its pool, if the config has pools
    cost: float = 1.0  # per rank and second
    chain: int | None = None  # of an engine that joined, see EngineAddress
    explores: bool = False  # serves exploration only
    alive: bool = False
    draining: bool = False
    paused: bool = False  # holds its requests and generates no tokens
    pinned: bool = False  # reserved for an evaluation, with its weights
    update_pending: bool = False  # gets no new requests, because a push or copy starts
    loading: bool = False  # loads weights from a folder or another engine
    has_peer_copy: bool = False  # has weights from another engine, and is in no process group of the trainer
    copy_failed: bool = False  # a copy from another engine failed: this one waits for the trainer's next push
    quarantined: str | None = None
    refusal: str | None = None  # error response to the last probe
    agreement: Agreement | None = None  # of the last push
    match: Match | None = None  # of the last push
    version: int = NEVER
    pushed: set[int] = field(default_factory=set)  # weight versions that its tokens may have
    breaker: Breaker = field(default_factory=Breaker)
    flights: dict[str, Flight] = field(default_factory=dict)
    flight_ended: asyncio.Event = field(default_factory=asyncio.Event)  # set when a flight ends
    tokens: int = 0  # of all flights
    pending_prefill: int = 0  # of all flights
    slots: int = UNBOUNDED
    speed: Speed = field(default_factory=Speed)  # of the current engine process
    # set unless a push is under way; requests with tokens of newer weights wait for it
    attested: asyncio.Event = field(default_factory=asyncio.Event)
    received: int = 0
    generated: int = 0
    generated_before: int = 0  # tokens before the last `start_counting`
    lost_now: int = 0
    lost_before: int = 0
    counting: bool = False  # whether `generated` is usable; otherwise counting restarts with the next push
    uncounted: bool = True  # whether the process may have generated tokens since `generated` was read
    deaths: int = 0
    first_response_at: float | None = None  # loop time of its first response
    unanswered_probes: int = 0  # consecutive
    failure: str = ""  # message of the last failed call
    failed_pushes: int = 0  # consecutive failed pushes to the current process
    _counter_start: int = 0

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def load(self) -> int:
        return len(self.flights)

    @property
    def prefill_seconds(self) -> float | None:
        return self.speed.prefill

    @property
    def decode_seconds(self) -> tuple[float, float] | None:
        return self.speed.decode

    def record_tokens(self, flight: Flight, segment: Segment, time: float) -> None:
        """Update the measured speed with new tokens of a flight.

        Args:
            time: loop time at which the tokens arrived, in seconds.
        """
        if not segment.ids or not segment.prompt_tokens:  # aborted in the queue
            return
        if flight.has_tokens:
            self.speed.record_decode(len(segment.ids), self.load, flight.last_token_at, time)
        else:
            flight.has_tokens = True
            self.pending_prefill -= flight.pending_prefill
            flight.pending_prefill = 0
            self.speed.record_prefill(
                segment.prompt_tokens - segment.cached_tokens, flight.last_token_at, time
            )
        flight.last_token_at = time

    def reset_timing(self) -> None:
        """Discard the start times of all flights, because a pause must not count as generation time."""
        for flight in self.flights.values():
            flight.last_token_at = None

    def mark_dead(self) -> None:
        """Mark the engine dead after a failed call, and cancel its requests.

        Tokens that have not arrived are generated again on another engine. The engine process may still run and count
        them, so counting restarts with the next push.
        """
        self.counting = self.copy_failed = False
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
        """Record that the engine's process was replaced and has no pushed weights, and cancel the requests in it."""
        self.counting = False
        self.speed = Speed()
        self.version = NEVER
        self.pushed.clear()
        self.paused = False
        self.cancel_flights()

    def cancel_flights(self) -> None:
        """Cancel all requests in the engine."""
        time = asyncio.get_running_loop().time()
        for flight in self.flights.values():
            if not flight.scope.expired():  # not cancelled yet
                flight.scope.reschedule(time)

    def set_version(self, version: int) -> None:
        """Record that the engine has attested weights of this version."""
        self.version = version
        self.pushed.add(version)
        self.failed_pushes = 0
        self.breaker.record_success()
        self.attested.set()

    async def probe(self) -> None:
        """Update the state by a probe of the engine.

        - An engine that responds is alive. If it reports another weight version, its weights are lost.
        - An engine is dead if its port is closed or belongs to another server, or after SILENT_PROBES probes in a row
          without a response.
        """
        expected = self.version
        reported = await self._probe_version()
        if reported is None or self.version != expected or self.loading:
            return  # no response, or a push proceeded meanwhile
        label = reported  # the version of its tokens; -1 if its label is not a number
        if self.skip_attestation:
            reported = max(reported, 0)
        if expected not in (NEVER, reported):
            self.mark_weights_lost()
        if not self.alive:
            self.alive = True
            if not self.push_limit_reached:
                self.quarantined = None
        if self.skip_attestation and self.version == NEVER:
            self.version = reported
            self.pushed |= {reported, label}
            self.attested.set()

    async def _probe_version(self) -> int | None:
        """Return the reported weight version. If there is none, mark the engine dead where `probe` says so."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                version = await self.client.weight_version()
        except PortClosed:
            self.failed_pushes = 0  # the process has ended
            if self.alive or self.flights:
                self.mark_dead()
            return None
        except EngineError as e:
            self.unanswered_probes = 0
            if self.refusal is None:
                log.warning("%s", e)
            self.refusal = str(e)
            if isinstance(e, ForeignServer) and (self.alive or self.flights):
                self.mark_dead()  # another server has its port
            return None
        except DeadEngine:
            self.unanswered_probes += 1
            if self.alive and self.unanswered_probes >= SILENT_PROBES:
                log.warning(
                    "%s: has not answered %d probes of %g s", self.url, self.unanswered_probes, PROBE_TIMEOUT
                )
                self.mark_dead()
            return None
        self.unanswered_probes, self.refusal = 0, None
        return version

    async def start_counting(self) -> None:
        """Prepare for the process's first push: abort requests of earlier rollout processes, and count from zero."""
        await self.client.abort(None)
        await self.client.continue_generation()
        await self.client.flush()
        self.pushed.clear()
        start = await self.client.generated_tokens()
        self.generated_before += max(self.generated, self.received)  # a received token was generated
        self.lost_before += self.lost_now
        self._counter_start, self.generated, self.received, self.lost_now = start, 0, 0, 0
        self.speed = Speed()  # the process may have been replaced
        self.counting = True

    async def release_memory(self) -> None:
        """Release the memory of weights and cache until the next push. No request may run."""
        if self.version == NEVER:  # already released, or never had weights
            return
        await self.client.flush()
        self.version = NEVER
        self.attested.clear()
        await self.client.set_weight_version(RELEASED_LABEL)
        await self.client.release_memory()

    async def wake_weights(self) -> None:
        """Resume the memory of the weights for a push, but not that of the cache, which the trainer may still use."""
        if await self.client.weight_label() == RELEASED_LABEL:
            await self.client.resume_memory("weights")
            await self.client.set_weight_version(RELEASED_CACHE_LABEL)

    async def wake_cache(self) -> None:
        """Resume the memory of the cache if it is released."""
        if await self.client.weight_label() == RELEASED_CACHE_LABEL:
            await self.client.resume_memory("kv_cache")

    async def count(self) -> None:
        """Update `generated` and `lost_now`. If the engine does not respond, keep their values and mark it dead.

        The engine is not asked

        - before `start_counting`, because its counter includes the requests of earlier rollout processes;
        - if no request has run since the last call, because SGLang answers slowly.
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

    def record_failed_push(self) -> None:
        """Count a failed push to the engine, and quarantine the engine after MAX_FAILED_PUSHES.

        Without this limit, every push would cost the trainer the time of the failure, and the run would seem to
        proceed.
        """
        self.failed_pushes += 1
        if self.push_limit_reached:
            self.quarantined = f"{self.failed_pushes} pushes in a row failed, the last with: {self.failure}"

    @property
    def push_limit_reached(self) -> bool:
        """Whether MAX_FAILED_PUSHES pushes in a row failed, so that the engine's process must be replaced."""
        return self.failed_pushes >= MAX_FAILED_PUSHES

    @property
    def lost_tokens(self) -> int:
        """Number of generated tokens that never arrived, as of the last count."""
        return self.lost_before + self.lost_now

    @property
    def rank_seconds(self) -> float:
        """Seconds since the engine's first response, times its number of ranks."""
        if self.first_response_at is None:
            return 0.0
        return self.client.tp * (asyncio.get_running_loop().time() - self.first_response_at)

    def backing_off(self, time: float) -> bool:
        """Return whether the breaker allows no other request: it is open, or on trial with a request in flight."""
        if not self.breaker.failures:  # fast path, because it is called for every request
            return False
        return self.breaker.open(time) or (self.breaker.on_trial(time) and self.load > 0)

    @property
    def state(self) -> str:
        """Description of the state, for users."""
        if not self.alive and not self.push_limit_reached:
            return f"dead: {self.refusal[:300]}" if self.refusal else "dead"
        if self.quarantined is not None:
            return f"quarantined: {self.quarantined}"
        if self.draining:
            return f"draining: {self.load} requests"
        if self.pinned:
            return f"evaluates version {self.version}"
        return "without weights" if self.version == NEVER else f"version {self.version}"
