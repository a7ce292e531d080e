"""The router: one logical `generate` per sample, whatever interrupts it; and the order of a weight push.

What it guarantees: a token that arrived is in its sample before anything else happens to the sample; a sample is in
at most one engine at a time; an engine serves only after a push that it was attested for; nothing is sent that could
kill an engine (ids outside the vocabulary). What it does not: it keeps nothing on disk.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import uuid
from collections.abc import Callable, Collection, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

from rlsys.engine.client import RESERVED_TOKENS, DeadEngine, EngineClient, EngineError
from rlsys.errors import RunError
from rlsys.router.attest import Agreement, Bounds
from rlsys.router.pool import NEVER, EngineState, Pool
from rlsys.router.strategy import Candidate, prefix_affinity
from rlsys.types import Canary, EngineAddress, Sample, Segment, Status

ABORT_AGAIN_SECONDS = 0.25
PROBE_SECONDS = 1.0
_EVALUATION = -1
"""Id of samples and groups outside the ledger."""
_ENDED = {"stop": Status.FINISHED, "length": Status.TRUNCATED}

log = logging.getLogger("rlsys.router")


class RefusedPrompt(ValueError):
    """This prompt must not reach an engine; the message says why."""


class Strategy(Protocol):
    def __call__(self, candidates: list[Candidate], prefer: str | None = None) -> Candidate: ...


class Router:
    """Belongs to one event loop. Starts with the gate closed: `resume` opens it.

    context_length: the most tokens an engine can hold of one sample, the smaller of the model's context and the
    engine's KV pool. stop_ids: tokens that end a response, all that the engines know. routes: ask for the experts of
    each token. patience: seconds that a push waits for an engine, long enough for one to be restarted.
    """

    def __init__(
        self,
        engines: list[EngineClient],
        *,
        vocab_size: int,
        context_length: int,
        stop_ids: Collection[int],
        bounds: Bounds,
        routes: bool = False,
        patience: float = 300.0,
        strategy: Strategy = prefix_affinity,
    ) -> None:
        self._pool = Pool(engines)
        self._vocab_size = vocab_size
        self._room = context_length - RESERVED_TOKENS
        self._stop_ids = sorted(stop_ids)
        self._bounds = bounds
        self._routes = routes
        self._patience = patience
        self._strategy = strategy
        self._open = False
        self._interrupted = True
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self.on_tokens: Callable[[int], None] = lambda tokens: None
        """Told how many tokens a sample of the ledger has just got."""
        self._run_id = uuid.uuid4().hex[:8]
        self._idle = asyncio.Event()
        self._group_engine: dict[int, str] = {}
        self._pushing: list[EngineState] = []
        self._counts = {
            "received_tokens": 0,
            "evaluation_tokens": 0,
            "discarded_tokens": 0,
            "cached_tokens": 0,
            "prefilled_tokens": 0,
            "resumes": 0,
            "refused": 0,
        }

    # -- one sample ---------------------------------------------------------------------------------------------

    def check(self, prompt_ids: list[int]) -> None:
        """Raises RefusedPrompt: empty, no room for a response, or an id outside the vocabulary."""
        if not prompt_ids:
            raise RefusedPrompt("the prompt is empty")
        if len(prompt_ids) >= self._room:
            raise RefusedPrompt(
                f"the prompt has {len(prompt_ids)} tokens; there is room for {self._room - 1}"
            )
        bad = next((i for i in prompt_ids if not 0 <= i < self._vocab_size), None)
        if bad is not None:
            raise RefusedPrompt(f"token id {bad} is outside the vocabulary of {self._vocab_size}")

    async def generate(self, sample: Sample, *, max_response_tokens: int, temperature: float) -> Sample:
        """Until the sample is FINISHED or TRUNCATED, over all interruptions and engine deaths.

        `max_response_tokens` counts over all segments. Raises RefusedPrompt before anything is sent. Cancel it
        after an interrupt only: the sample then stays PARKED with its tokens; in an engine it would lose some.
        """
        try:
            self.check(sample.prompt_ids)
        except RefusedPrompt:
            self._counts["refused"] += 1
            raise
        limit = min(max_response_tokens, self._room - len(sample.prompt_ids))
        while not sample.status.terminal:
            if len(sample.response_ids) >= limit:
                sample.status = Status.TRUNCATED
                break
            engine = await self._admission(sample)
            await self._segment(engine, sample, limit, temperature)
        return sample

    async def greedy(self, prompt_ids: list[int], max_new_tokens: int) -> Segment:
        """One greedy response outside the ledger, for evaluation. After an interruption it goes on like any."""
        probe = Sample(_EVALUATION, _EVALUATION, 0, prompt_ids, seed=0)
        await self.generate(probe, max_response_tokens=max_new_tokens, temperature=0.0)
        finish = "stop" if probe.status is Status.FINISHED else "length"
        return Segment(probe.response_ids, probe.mu, probe.spans, finish)

    async def _admission(self, sample: Sample) -> EngineState:
        """Wait until the gate is open and an engine serves; the oldest sample first."""
        while not (self._may_pass(sample) and (serving := self._pool.serving())):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (sample.sample_id, next(self._order), waiter))
            await waiter
        # A prefix lives in an engine's cache for as long as the weights do.
        has_prefix = bool(sample.spans) and sample.spans[-1].version == self._pool.version
        prefer = sample.engine if has_prefix else self._group_engine.get(sample.group_id)
        chosen = self._strategy([Candidate(e.url, e.load) for e in serving], prefer)
        return next(e for e in serving if e.url == chosen.url)

    def _may_pass(self, sample: Sample) -> bool:
        return self._open or (sample.sample_id == _EVALUATION and not self._interrupted)

    def _wake(self) -> None:
        """Waiters look again, in the order of their samples' ids."""
        while self._waiting:
            _, _, waiter = heapq.heappop(self._waiting)
            if not waiter.done():
                waiter.set_result(None)

    async def _segment(self, engine: EngineState, sample: Sample, limit: int, temperature: float) -> None:
        """One request. Afterwards the sample is terminal, or PARKED with every token that arrived."""
        if sample.sample_id != _EVALUATION:
            self._group_engine[sample.group_id] = engine.url
            resumed = bool(sample.response_ids) and not sample.observed_last
            sample.resumes += resumed
            self._counts["resumes"] += resumed
        rid = f"{self._run_id}-{sample.sample_id}-{next(self._order)}."  # the point: not the beginning of another
        sample.engine, sample.status = engine.url, Status.IN_FLIGHT
        engine.load += 1
        start, finish = len(sample.response_ids), None
        scope = asyncio.timeout(None)  # no deadline; whoever finds the engine dead sets one
        try:
            async with scope:
                engine.streams[rid] = scope
                try:
                    stream = engine.client.generate(
                        sample.prompt_ids + sample.response_ids,
                        rid=rid,
                        max_new_tokens=limit - len(sample.response_ids),
                        temperature=temperature,
                        seed=sample.seed,
                        stop_ids=self._stop_ids,
                        routes_from=self._routes_from(sample),
                    )
                    async with aclosing(stream):
                        async for segment in stream:
                            finish = self._receive(engine, sample, segment)
                            if finish == "abort" and not segment.prompt_tokens:  # the engine did not count it
                                engine.received -= len(sample.response_ids) - start
                finally:
                    del engine.streams[rid]
        except DeadEngine:
            if not scope.expired():
                engine.died()
        except EngineError as e:
            raise RunError(f"sample {sample.sample_id}: {e}") from None
        finally:
            sample.status = self._status(sample, finish, limit)
            engine.load -= 1
            if not self._pool.in_flight:
                self._idle.set()

    def _routes_from(self, sample: Sample) -> int | None:
        """With the prompt at first; then from the last token that is there, which no pass has read yet: the seam."""
        if not self._routes or sample.sample_id == _EVALUATION:
            return None
        return len(sample.prompt_ids) + len(sample.response_ids) - 1 if sample.response_ids else 0

    def _status(self, sample: Sample, finish: str | None, limit: int) -> Status:
        """After a request. One that is aborted makes a last token, and that may be the one that ends the response:
        SGLang then still calls it aborted, and going on would write past the end.
        """
        if finish in _ENDED:
            return _ENDED[finish]
        if sample.response_ids and sample.response_ids[-1] in self._stop_ids:
            return Status.FINISHED
        return Status.TRUNCATED if len(sample.response_ids) >= limit else Status.PARKED

    def _receive(self, engine: EngineState, sample: Sample, segment: Segment) -> str | None:
        """Add what came to the sample. Returns how the request ended, None while it goes on."""
        tokens = len(segment.ids)
        if segment.spans[-1].version != self._pool.version:
            # Restarted between two probes: these weights are not what anybody pushed.
            self._counts["discarded_tokens"] += tokens
            engine.lost_weights()
            return None
        sample.append(segment)
        engine.received += tokens
        self._counts["received_tokens"] += tokens
        if sample.sample_id == _EVALUATION:
            self._counts["evaluation_tokens"] += tokens
            return segment.finish
        self.on_tokens(tokens)
        if segment.finish is not None:
            self._counts["cached_tokens"] += segment.cached_tokens
            self._counts["prefilled_tokens"] += segment.prompt_tokens
            sample.cached_tokens += segment.cached_tokens
            sample.prefilled_tokens += segment.prompt_tokens
        return segment.finish

    # -- all samples --------------------------------------------------------------------------------------------

    async def interrupt(self) -> None:
        """Close the gate and bring everything back: afterwards nothing is in flight, every token is here.

        An abort that overtakes its request is lost, so it is repeated until each request has answered.
        """
        self._open, self._interrupted = False, True
        while busy := [e for e in self._pool.engines if e.load]:
            self._idle.clear()
            await asyncio.gather(*(self._try(e, e.client.abort(None)) for e in busy))
            if not self._pool.in_flight:
                break
            try:
                async with asyncio.timeout(ABORT_AGAIN_SECONDS):
                    await self._idle.wait()
            except TimeoutError:
                continue
        await self._pool.count()

    def resume(self) -> None:
        """Open the gate; samples that were interrupted go on."""
        self._open, self._interrupted = True, False
        self._wake()

    # -- weights ------------------------------------------------------------------------------------------------

    async def begin_push(self, version: int, *, only_stale: bool = False) -> list[EngineAddress]:
        """Interrupt, then get every engine (or only those without the current weights) ready for tensors.

        Waits up to `patience` for an engine, since the supervisor may be restarting the only one; then RunError.
        """
        if not only_stale:
            await self.interrupt()
            self._pool.version = version
            self._group_engine.clear()
        try:
            async with asyncio.timeout(self._patience):
                while True:
                    await self._pool.probe()
                    targets = self._pool.stale()
                    held = {e.url: e.version for e in targets}
                    ready = await asyncio.gather(*(self._try(e, self._prepare(e)) for e in targets))
                    self._pushing = [e for e, ok in zip(targets, ready, strict=True) if ok]
                    if self._pushing or only_stale:
                        break
                    self._raise_if_hopeless()
                    await asyncio.sleep(PROBE_SECONDS)
        except TimeoutError:
            raise RunError(
                f"no engine was there for weight version {version} within {self._patience:g} s: {self._states()}"
            ) from None
        return [EngineAddress(e.url, e.client.tp, held[e.url]) for e in self._pushing]

    async def _prepare(self, engine: EngineState) -> None:
        if engine.version == NEVER:
            await engine.start_counting()
        engine.version = NEVER  # until it is attested again
        await engine.client.begin_weight_update()

    async def end_push(self, version: int, canaries: list[Canary]) -> dict[str, float]:
        """End the update that begin_push began, empty caches, attest; then evaluation may go on, samples at `resume`.

        An engine that fails attestation is quarantined, one that died is left to its restart. Raises RunError
        when every engine is quarantined.
        """
        pushing, self._pushing = self._pushing, []
        await asyncio.gather(*(self._try(e, self._finish_update(e, version, canaries)) for e in pushing))
        self._raise_if_hopeless()
        self._interrupted = False
        self._wake()
        agreements = [e.agreement for e in pushing if e.agreement is not None]
        return {
            "push_canary_mean": max((a.mean for a in agreements), default=0.0),
            "push_canary_p999": max((a.p999 for a in agreements), default=0.0),
        }

    async def _finish_update(self, engine: EngineState, version: int, canaries: list[Canary]) -> None:
        """Nothing of the old weights may stay, and the version is reported only by an engine that has it."""
        engine.agreement = None
        await engine.client.end_weight_update()
        await engine.client.flush()  # keys and values of the old weights are wrong for the new ones
        await engine.client.set_weight_version(version)
        reported = await engine.client.weight_version()
        seen = await asyncio.gather(*(engine.client.token_logprobs(c.ids) for c in canaries))
        engine.received += len(canaries)  # each asked for one token more
        engine.agreement = Agreement.of([x for c in canaries for x in c.logp], [x for s in seen for x in s])
        if reported != version:
            engine.quarantined = f"reports weight version {reported}, {version} was pushed"
        elif not engine.agreement.within(self._bounds):
            gaps = engine.agreement.against(self._bounds)
            engine.quarantined = f"canary log-probs differ from the trainer's: {gaps}"
        else:
            engine.version = version

    async def _try(self, engine: EngineState, call: Coroutine[Any, Any, None]) -> bool:
        """Whether the engine did it. If not, it counts as dead until it answers a probe, and as without weights."""
        try:
            await call
        except (*DeadEngine, EngineError) as e:
            log.warning("%s: %s", engine.url, e or type(e).__name__)
            engine.died()
            return False
        return True

    def _raise_if_hopeless(self) -> None:
        if all(e.quarantined for e in self._pool.engines):
            raise RunError(f"no engine can serve weight version {self._pool.version}: {self._states()}")

    # -- health and figures -------------------------------------------------------------------------------------

    @property
    def stale_engines(self) -> list[str]:
        """Engines that came back and need the current weights."""
        return [e.url for e in self._pool.stale()]

    async def watch(self) -> None:
        """For the life of the process: notice engines that die, come back, or were restarted unseen."""
        while True:
            await self._pool.probe()
            if self._pool.serving():
                self._wake()
            await asyncio.sleep(PROBE_SECONDS)

    def engine_states(self) -> dict[str, str]:
        """URL -> state in words."""
        return {e.url: e.state for e in self._pool.engines}

    def _states(self) -> str:
        return "; ".join(f"{url} {state}" for url, state in self.engine_states().items())

    def stats(self) -> dict[str, float]:
        """Counts since the process started. `received_tokens` include `evaluation_tokens`; `cached_tokens` of the
        `prefilled_tokens` came from a cache; `engine_tokens` (the engines' own count) and `lost` (what of it
        never arrived) are as of the last interrupt.
        """
        engines = self._pool.engines
        return {
            **self._counts,
            "in_flight": self._pool.in_flight,
            "waiting": sum(not w.done() for _, _, w in self._waiting),
            "engine_tokens": sum(e.generated + e.generated_before for e in engines),
            "lost": sum(e.lost for e in engines),
            "engines_serving": len(self._pool.serving()),
            "engine_deaths": sum(e.deaths for e in engines),
            "weight_version": self._pool.version,
        }
