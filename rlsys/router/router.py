"""The router: one logical `generate` per sample, whatever interrupts it; and the order of a weight push.

What it guarantees: a token that an engine streamed is in its sample before anything else happens to the sample; a
sample is in at most one engine at a time; nothing is sent that could kill an engine (ids outside the vocabulary).
What it does not: it keeps nothing on disk (`on_park` tells who does).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import uuid
from collections.abc import Awaitable, Callable
from typing import Protocol

from rlsys.engine.client import DeadEngine, EngineClient, EngineError
from rlsys.errors import RunError
from rlsys.router.attest import Agreement, Bounds
from rlsys.router.pool import EngineState, Pool
from rlsys.router.strategy import Candidate, prefix_affinity
from rlsys.types import Canary, EngineAddress, Sample, Segment, Status

ABORT_AGAIN_SECONDS = 0.25
PROBE_SECONDS = 1.0


class RefusedPrompt(ValueError):
    """This prompt must not reach an engine; the message says why."""


class Strategy(Protocol):
    def __call__(self, candidates: list[Candidate], prefer: str | None = None) -> Candidate: ...


class Router:
    """Belongs to one event loop. Starts with the gate closed: the first push opens it."""

    def __init__(
        self,
        engines: list[EngineClient],
        *,
        vocab_size: int,
        context_length: int,
        bounds: Bounds,
        on_park: Callable[[Sample], None] = lambda sample: None,
        strategy: Strategy = prefix_affinity,
    ) -> None:
        self._pool = Pool(engines)
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._bounds = bounds
        self._on_park = on_park
        self._strategy = strategy
        self._open = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._run_id = uuid.uuid4().hex[:8]
        self._idle = asyncio.Condition()
        self._group_engine: dict[int, str] = {}
        self._pushing: list[EngineState] = []
        self._counts = {
            "received_tokens": 0,
            "cached_tokens": 0,
            "prefilled_tokens": 0,
            "resumes": 0,
            "refused": 0,
        }

    # -- one sample ---------------------------------------------------------------------------------------------

    def check(self, prompt_ids: list[int]) -> None:
        """Raises RefusedPrompt: empty, longer than the context, or an id outside the vocabulary."""
        if not prompt_ids:
            raise RefusedPrompt("the prompt is empty")
        if len(prompt_ids) >= self._context_length:
            raise RefusedPrompt(
                f"the prompt has {len(prompt_ids)} tokens, the context {self._context_length}"
            )
        bad = next((i for i in prompt_ids if not 0 <= i < self._vocab_size), None)
        if bad is not None:
            raise RefusedPrompt(f"token id {bad} is outside the vocabulary of {self._vocab_size}")

    async def generate(self, sample: Sample, *, max_response_tokens: int, temperature: float) -> Sample:
        """Until the sample is FINISHED or TRUNCATED, over all interruptions and engine deaths.

        `max_response_tokens` counts over all segments. Cancelled, the sample stays PARKED with its tokens.
        Raises RefusedPrompt before anything is sent.
        """
        try:
            self.check(sample.prompt_ids)
        except RefusedPrompt:
            self._counts["refused"] += 1
            raise
        limit = min(max_response_tokens, self._context_length - len(sample.prompt_ids))
        while not sample.status.terminal:
            if len(sample.response_ids) >= limit:
                sample.status = Status.TRUNCATED
                break
            engine = await self._admission(sample)
            await self._segment(engine, sample, limit, temperature)
        return sample

    async def _admission(self, sample: Sample) -> EngineState:
        """Wait until the gate is open and an engine serves; the oldest sample first."""
        while not (self._open and (serving := self._pool.serving())):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (sample.sample_id, next(self._order), waiter))
            await waiter
        prefer = sample.engine or self._group_engine.get(sample.group_id)
        chosen = self._strategy([Candidate(e.url, len(e.in_flight)) for e in serving], prefer)
        return next(e for e in serving if e.url == chosen.url)

    def _wake(self) -> None:
        """Waiters look again, in the order of their samples' ids."""
        while self._waiting:
            _, _, waiter = heapq.heappop(self._waiting)
            if not waiter.done():
                waiter.set_result(None)

    async def _segment(self, engine: EngineState, sample: Sample, limit: int, temperature: float) -> None:
        """One request. Afterwards the sample is terminal, or PARKED with every token that arrived."""
        resumed = bool(sample.response_ids)
        rid = f"{self._run_id}-{sample.sample_id}-{next(self._order)}"
        sample.engine = self._group_engine[sample.group_id] = engine.url
        sample.status = Status.IN_FLIGHT
        sample.resumes += resumed
        self._counts["resumes"] += resumed
        engine.in_flight.add(rid)
        finish: str | None = None
        try:
            stream = engine.client.generate(
                sample.prompt_ids + sample.response_ids,
                rid=rid,
                max_new_tokens=limit - len(sample.response_ids),
                temperature=temperature,
                seed=sample.seed,
            )
            async for segment in stream:
                self._receive(engine, sample, segment)
                finish = segment.finish
            if finish is None:
                engine.died()  # the stream ended in the middle
        except DeadEngine:
            engine.died()
        finally:
            sample.status = {"stop": Status.FINISHED, "length": Status.TRUNCATED}.get(
                finish or "", Status.PARKED
            )
            if sample.status is Status.PARKED:
                self._on_park(sample)
            engine.in_flight.discard(rid)
            async with self._idle:
                self._idle.notify_all()

    def _receive(self, engine: EngineState, sample: Sample, segment: Segment) -> None:
        sample.append(segment)
        engine.received += len(segment.ids)
        self._counts["received_tokens"] += len(segment.ids)
        if segment.finish is not None:
            for name, tokens in (("cached", segment.cached_tokens), ("prefilled", segment.prompt_tokens)):
                self._counts[f"{name}_tokens"] += tokens
            sample.cached_tokens += segment.cached_tokens
            sample.prefilled_tokens += segment.prompt_tokens

    async def greedy(self, prompt_ids: list[int], max_new_tokens: int) -> Segment:
        """One greedy response outside the ledger, for evaluation; repeated from scratch when it is interrupted."""
        self.check(prompt_ids)
        while True:
            probe = Sample(-1, -1, 0, prompt_ids, seed=0)
            await self._segment(await self._admission(probe), probe, max_new_tokens, 0.0)
            if probe.status.terminal:
                finish = "stop" if probe.status is Status.FINISHED else "length"
                return Segment(probe.response_ids, probe.mu, probe.spans, finish)

    # -- all samples --------------------------------------------------------------------------------------------

    async def interrupt(self) -> None:
        """Close the gate and bring everything back: afterwards nothing is in flight, every token is here.

        An abort that overtakes its request is lost, so it is repeated until each request has answered.
        """
        self._open = False
        while any(e.in_flight for e in self._pool.engines):
            busy = [e for e in self._pool.engines if e.in_flight]
            await asyncio.gather(*(self._abort_all(e) for e in busy))
            try:
                async with asyncio.timeout(ABORT_AGAIN_SECONDS), self._idle:
                    await self._idle.wait_for(lambda: not any(e.in_flight for e in self._pool.engines))
            except TimeoutError:
                continue
        await self._pool.count()

    async def _abort_all(self, engine: EngineState) -> None:
        try:
            await engine.client.abort(None)
        except (*DeadEngine, EngineError):
            engine.died()  # its streams end with it

    def resume(self) -> None:
        """Open the gate; samples that were interrupted go on."""
        self._open = True
        self._wake()

    # -- weights ------------------------------------------------------------------------------------------------

    async def begin_push(self, version: int, *, only_stale: bool = False) -> list[EngineAddress]:
        """Interrupt, then get every engine (or only those without the current weights) ready for tensors."""
        if not only_stale:
            await self.interrupt()
            self._pool.version = version
        targets = self._pool.stale()
        self._pushing = [e for e in targets if await self._try(e, e.client.begin_weight_update())]
        if not self._pushing and not only_stale:
            raise RunError(
                f"no engine of {len(self._pool.engines)} is there to take weight version {version}"
            )
        return [EngineAddress(e.url, e.client.tp) for e in self._pushing]

    async def end_push(self, version: int, canaries: list[Canary]) -> dict[str, float]:
        """End the update that begin_push began, empty caches, attest; then open the gate.

        An engine that fails attestation is quarantined. Raises RunError when none is left to serve.
        """
        worst = Agreement(0.0, 0.0)
        pushing, self._pushing = self._pushing, []
        for engine in pushing:
            if not engine.alive or not await self._try(engine, self._finish_update(engine, version)):
                continue
            agreement = await self._attest(engine, version, canaries)
            if agreement is not None:
                worst = Agreement(max(worst.mean, agreement.mean), max(worst.p999, agreement.p999))
        if not self._pool.serving():
            reasons = "; ".join(f"{e.url}: {e.quarantined or 'does not answer'}" for e in self._pool.engines)
            raise RunError(f"weight version {version} is served by no engine: {reasons}")
        self.resume()
        return {"push_canary_mean": worst.mean, "push_canary_p999": worst.p999}

    async def _finish_update(self, engine: EngineState, version: int) -> None:
        await engine.client.end_weight_update()
        await engine.client.set_weight_version(version)
        await engine.client.flush()  # keys and values of the old weights are wrong for the new ones

    async def _attest(self, engine: EngineState, version: int, canaries: list[Canary]) -> Agreement | None:
        """Log-probs of the canaries on this engine against the trainer's; None when it did not answer."""
        try:
            reported = await engine.client.weight_version()
            seen = [await engine.client.token_logprobs(c.ids) for c in canaries]
        except (*DeadEngine, EngineError):
            engine.died()
            return None
        engine.received += len(canaries)  # each asked for one token more
        agreement = Agreement.of([x for c in canaries for x in c.logp], [x for s in seen for x in s])
        if reported != version:
            engine.quarantined = f"reports weight version {reported}, {version} was pushed"
        elif not agreement.within(self._bounds):
            engine.quarantined = (
                f"canary log-probs differ from the trainer's: mean {agreement.mean:.1e} (bound "
                f"{self._bounds.mean:.0e}), 99.9th percentile {agreement.p999:.1e} (bound {self._bounds.p999:.0e})"
            )
        else:
            engine.version = version
        return agreement

    async def _try(self, engine: EngineState, call: Awaitable[None]) -> bool:
        try:
            await call
        except (*DeadEngine, EngineError):
            engine.died()
            return False
        return True

    # -- health and figures -------------------------------------------------------------------------------------

    @property
    def stale_engines(self) -> list[str]:
        """Engines that came back and need the current weights."""
        return [e.url for e in self._pool.stale()]

    async def watch(self) -> None:
        """For the life of the process: look whether dead engines are back."""
        while True:
            await asyncio.gather(*(e.probe() for e in self._pool.engines))
            if self._open and self._pool.serving():
                self._wake()
            await asyncio.sleep(PROBE_SECONDS)

    def engine_states(self) -> dict[str, str]:
        """URL -> state in words."""
        return {e.url: e.state for e in self._pool.engines}

    def stats(self) -> dict[str, float]:
        """Counts since the process started. `waiting` samples are parked at the gate; `engine_tokens` (the engines'
        own count) and `lost` (what of it never arrived) are as of the last interrupt.
        """
        return {
            **self._counts,
            "in_flight": sum(len(e.in_flight) for e in self._pool.engines),
            "waiting": sum(not w.done() for _, _, w in self._waiting),
            "engine_tokens": sum(e.generated for e in self._pool.engines),
            "lost": self._pool.lost,
            "engines_serving": len(self._pool.serving()),
            "engine_deaths": sum(e.deaths for e in self._pool.engines),
            "weight_version": self._pool.version,
        }
