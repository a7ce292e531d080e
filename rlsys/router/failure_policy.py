"""Failure policy: the consequences of a failed request for the engine and the request.

    event                                     engine                            request
    no response, or the stream breaks off     dead until it answers a probe     a death: continued on another engine
    cancelled together with its engine        already dead                      a death: continued on another engine
    5xx, or a malformed response              its breaker opens                 a fault: continued on another engine
    400, 413, 422                             unaffected                        refused: RefusedRequest
    another 4xx                               unaffected                        RunError: a mistake of the caller

Requests are validated before they are sent, so a fault opens the engine's breaker at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

from rlsys.core.errors import RunError, error_text
from rlsys.core.types import TokenSequence
from rlsys.engine.wire import DeadEngine, EngineError
from rlsys.router.dispatch import EVALUATION, Dispatcher
from rlsys.router.engine_state import EngineState, Flight

SERVER_FAULT = 500
REFUSAL_STATUSES = (400, 413, 422)
"""HTTP statuses that reject the content of a request. Other statuses below 500 are mistakes of the caller."""
DEATHS_SUSPECT = 2
"""Engine deaths without a new token after which a sample is retried in isolation.

Until it gets a token, no other suspect is in any engine, so that another death is attributed to the right sample.
"""
DEATHS_CENSORED = 4
"""Engine deaths without a new token after which a sample is dropped: it probably causes them."""
FAULTS_CENSORED = 8
"""Server errors (5xx) without a new token after which a sample is dropped.

The limit is higher than that of deaths: an error does not affect other samples, and a single engine that fails for
a minute, with back-offs, must not censor samples.
"""


@dataclass(frozen=True)
class PoisonLimits:
    """Numbers of failures after which a sample is isolated or dropped.

    Args:
        suspect_deaths: number of engine deaths after which the sample is retried in isolation.
        deaths: number of engine deaths after which the sample is dropped.
        faults: number of server errors after which the sample is dropped.
        reset_by_tokens: whether a new token resets the number of deaths.
    """

    suspect_deaths: int = DEATHS_SUSPECT
    deaths: int = DEATHS_CENSORED
    faults: int = FAULTS_CENSORED
    reset_by_tokens: bool = True


SAMPLES = PoisonLimits()
"""Limits for the samples of a run."""


log = logging.getLogger("rlsys.router")


class PoisonRequest(RunError):
    """Raised for a sample or request that is not sent again, because too many engines died or failed on it."""


class RefusedRequest(RunError):
    """Raised for a request that passed the run's validation but that an engine refuses (HTTP 4xx)."""


class RequestEnd(Enum):
    """Outcome of a request."""

    COMPLETED = "answered"
    INTERRUPTED = "interrupted"
    DEATH = "death"
    FAULT = "fault"


@dataclass
class Attempt:
    """The outcome of a request. `reason` describes a death or fault."""

    end: RequestEnd = RequestEnd.COMPLETED
    reason: str = ""


@asynccontextmanager
async def attempt(
    dispatcher: Dispatcher, engine: EngineState, flight: Flight, tokens: int, subject: str
) -> AsyncIterator[Attempt]:
    """Track one request in an engine. The yielded Attempt has the outcome when the context has ended.

    Args:
        tokens: number of prompt tokens of the request.
        subject: name of the request in errors.

    Raises:
        RefusedRequest: the engine rejects the content of the request.
        RunError: the engine responds with another 4xx status.
    """
    result = Attempt()
    try:
        with dispatcher.track(engine, flight, tokens):
            async with flight.scope:
                yield result
    except DeadEngine as e:
        result.end = RequestEnd.DEATH
        result.reason = f"{engine.url}: a request broke off: {error_text(e)}"
        if not flight.scope.expired():  # otherwise it is already marked dead
            log.warning("%s", result.reason)
            engine.mark_dead()
    except EngineError as e:
        if e.status < SERVER_FAULT:
            kind = RefusedRequest if e.status in REFUSAL_STATUSES else RunError
            raise kind(f"{subject}: {e}") from None
        result.end, result.reason = RequestEnd.FAULT, str(e)


class PoisonDetector:
    """Detects samples that may cause engines to die. Owns the isolation of suspects, and the counts.

    Args:
        on_failure: called with each sample of the ledger whose engine died or answered with a server error.
        limits: numbers of failures after which a sample is isolated or dropped.
    """

    def __init__(self, on_failure: Callable[[TokenSequence], None], limits: PoisonLimits = SAMPLES) -> None:
        self._on_failure = on_failure
        self._limits = limits
        self._lock = asyncio.Lock()
        self._isolated: TokenSequence | None = None
        self.counts = {"engine_faults": 0, "poisonous": 0}

    def check(self, sample: TokenSequence, fault: str) -> None:
        """Check the failures of a sample before it is sent.

        Args:
            fault: message of the last server error, or an empty string.

        Raises:
            PoisonRequest: the sample must be dropped.
        """
        if sample.deaths >= self._limits.deaths:
            self.counts["poisonous"] += 1
            raise PoisonRequest(f"{sample.deaths} engines died while they processed the request")
        if sample.faults >= self._limits.faults:
            self.counts["poisonous"] += 1
            last = f", the last one: {fault}" if fault else ""
            raise PoisonRequest(f"{sample.faults} consecutive responses were server errors{last}")

    @asynccontextmanager
    async def isolate(self, sample: TokenSequence, timeout: float | None = None) -> AsyncIterator[None]:
        """Keep other suspects out of all engines until this sample gets a token or its request ends.

        Only suspects wait for each other. Other samples enter at once.

        Args:
            timeout: seconds for which a suspect may wait for the other suspects; None: unlimited.

        Raises:
            TimeoutError: the suspect waited longer.
        """
        if sample.deaths >= self._limits.suspect_deaths:
            await asyncio.wait_for(self._lock.acquire(), timeout)
            self._isolated = sample
        try:
            yield
        finally:
            self._release(sample)

    def clear(self, sample: TokenSequence) -> None:
        """Reset the counts of a sample that got a token."""
        sample.faults = 0
        if self._limits.reset_by_tokens:
            sample.deaths = 0
        self._release(sample)

    def _release(self, sample: TokenSequence) -> None:
        if self._isolated is sample:
            self._isolated = None
            self._lock.release()

    def record_end(self, result: Attempt, engine: EngineState, sample: TokenSequence) -> str:
        """Count the outcome of a request, if it failed, for the engine and the sample.

        Returns:
            the message of a server error, otherwise an empty string.
        """
        if result.end is RequestEnd.FAULT:
            self.counts["engine_faults"] += 1
            engine.counting = False  # its count includes tokens of the failed request
            engine.record_failure()
            sample.faults += 1
        elif result.end is RequestEnd.DEATH:
            sample.deaths += 1
        else:
            return ""
        if sample.sample_id != EVALUATION:
            self._on_failure(sample)
        return result.reason if result.end is RequestEnd.FAULT else ""
