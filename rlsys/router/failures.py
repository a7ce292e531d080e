"""What the end of a request says, of its engine and of itself: one ladder for samples, prompts and HTTP requests.

    what happened                             the engine                        the request
    nobody answers, or the answer breaks off  dead until it answers a probe     a death: it goes on elsewhere
    it was cut off, with its engine           is dead already                   a death: it goes on elsewhere
    it was cut off, since its client is slow  is none the worse                 was interrupted: it goes on later
    5xx, or no answer of SGLang               has failed, see below             a fault: it goes on elsewhere
    400, 413, 422                             is none the worse                 is refused: RefusedRequest
    another 4xx                               is none the worse                 RunError: who asks is at fault

A fault of the run's own requests, which are checked before they are sent, rests the engine at once. An HTTP request
may be wrong in a way that no check sees: there, engines rest when another one could answer what they could not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

from rlsys.core.errors import RunError
from rlsys.core.types import Sample
from rlsys.engine.wire import DeadEngine, EngineError
from rlsys.router.dispatch import EVALUATION, Dispatcher
from rlsys.router.engine_state import EngineState, Flight

SERVER_FAULT = 500
REFUSES = (400, 413, 422)
"""HTTP statuses by which a server refuses what is in a request; other ones below 500 are about who asks."""
DEATHS_SUSPECT = 2
"""Engine deaths without a token in between, after which a sample goes on alone: no second suspect is in any engine
until it has got a token. What dies then says something about this sample, and not about its neighbours."""
DEATHS_CENSORED = 4
"""Engine deaths without a token in between, after which a sample is given up: it may be what kills them."""
FAULTS_CENSORED = 8
"""Server errors (5xx) without a token in between, after which a sample is given up. More than deaths: they cost no
other sample its place, and an only engine that is ill for a minute shall not censor, which its back-offs see to."""
HTTP_FAILURES = 1
"""Engines that may answer one HTTP request with a server error; the next one's answer is passed on."""

log = logging.getLogger("rlsys.router")


class Poisonous(RunError):
    """A sample or a request with which so many engines died, or answered with an error, that it is not sent again."""


class RefusedRequest(RunError):
    """An engine refuses this request (4xx), though the run's own check let it pass: others would refuse it, too."""


class End(Enum):
    ANSWERED = "answered"
    INTERRUPTED = "interrupted"
    DEATH = "death"
    FAULT = "fault"


@dataclass
class Attempt:
    """One request, once it has ended. `why`: the death or the fault in words."""

    end: End = End.ANSWERED
    why: str = ""


@asynccontextmanager
async def attempt(
    dispatcher: Dispatcher, engine: EngineState, flight: Flight, tokens: int, what: str
) -> AsyncIterator[Attempt]:
    """The request of `flight`, with so many tokens of prompt, for as long as this lasts. The Attempt says how it
    ended. What is raised is a refusal only: RefusedRequest or RunError, of `what`."""
    made = Attempt()
    try:
        with dispatcher.flying(engine, flight, tokens):
            async with flight.scope:
                yield made
    except DeadEngine as e:
        cut_off = flight.scope.expired()
        made.end = End.INTERRUPTED if cut_off and flight.blocked else End.DEATH
        made.why = f"{engine.url}: a request broke off: {e or type(e).__name__}"
        if not cut_off:  # else somebody has found it dead before
            log.warning("%s", made.why)
            engine.died()
    except EngineError as e:
        if e.status < SERVER_FAULT:
            kind = RefusedRequest if e.status in REFUSES else RunError
            raise kind(f"{what}: {e}") from None
        made.end, made.why = End.FAULT, str(e)


class Suspects:
    """Samples that engines may have died of. Owns who is tried alone, and the counts. `told`: of a sample of the
    ledger whose engine has just died, or answered with a server error."""

    def __init__(self, told: Callable[[Sample], None]) -> None:
        self._told = told
        self._lock = asyncio.Lock()
        self._alone: Sample | None = None
        self.counts = {"engine_faults": 0, "poisonous": 0}

    def check(self, sample: Sample, fault: str) -> None:
        """Raises Poisonous for one that is given up. `fault`: the last server error, in words."""
        if sample.deaths >= DEATHS_CENSORED:
            self.counts["poisonous"] += 1
            raise Poisonous(f"{sample.deaths} engines died while they worked on it")
        if sample.faults >= FAULTS_CENSORED:
            self.counts["poisonous"] += 1
            last = f", the last one: {fault}" if fault else ""
            raise Poisonous(f"{sample.faults} answers in a row were server errors{last}")

    @asynccontextmanager
    async def alone(self, sample: Sample) -> AsyncIterator[None]:
        """Until the sample gets a token, or its request ends. One that is no suspect does not wait."""
        if sample.deaths >= DEATHS_SUSPECT:
            await self._lock.acquire()
            self._alone = sample
        try:
            yield
        finally:
            self._release(sample)

    def clear(self, sample: Sample) -> None:
        """It has got a token."""
        sample.deaths = sample.faults = 0
        self._release(sample)

    def _release(self, sample: Sample) -> None:
        if self._alone is sample:
            self._alone = None
            self._lock.release()

    def blame(self, made: Attempt, engine: EngineState, sample: Sample) -> str:
        """Count what went wrong, if anything did. Returns a server error in words."""
        if made.end is End.FAULT:  # it goes on elsewhere, or here after a back-off
            self.counts["engine_faults"] += 1
            engine.counting = False  # it counts what it made, also what it could not say: that is made again
            engine.failed()
            sample.faults += 1
        elif made.end is End.DEATH:
            sample.deaths += 1
        else:
            return ""
        if sample.sample_id != EVALUATION:
            self._told(sample)
        return made.why if made.end is End.FAULT else ""
