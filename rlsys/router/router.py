"""Router: one logical `generate` per sample, across interruptions and engine failures.

Guarantees:

- A token that arrived is in its sample before anything else happens to the sample.
- A sample is in at most one engine at a time.
- An engine serves only after it was attested.
- No request has ids outside the vocabulary, which could kill an engine.

Durability is not guaranteed, because the router keeps no state on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType

from rlsys.config.rollout import EngineConfig, Truncation
from rlsys.core.errors import UserError
from rlsys.core.spans import TopLogprobs
from rlsys.core.types import AnySequence, Sample, Segment, Status, TokenSequence
from rlsys.core.weight_updates import Canary, EngineAddress
from rlsys.engine.client import Aborted, EngineClient
from rlsys.engine_requests import Limits, RefusedPrompt, check_turn
from rlsys.router.attest import Bounds
from rlsys.router.dispatch import EVALUATION, Dispatcher, Interruption
from rlsys.router.engine_state import UNBOUNDED, Flight
from rlsys.router.failure_policy import SAMPLES, PoisonDetector, PoisonLimits, PoisonRequest, attempt
from rlsys.router.peer_weight_transfer import PeerWeightTransfer
from rlsys.router.pool import NoExplorationEngine, PinLost, Pool
from rlsys.router.push import PROBE_SECONDS, WeightPush, describe_states
from rlsys.router.request_sender import RequestSender, Turn
from rlsys.router.response_handler import ResponseHandler, with_cache_shares
from rlsys.router.strategy import STRATEGIES, RoutingRequest
from rlsys.router.turn_ends import TurnEnds

__all__ = ["EVALUATION", "NoExplorationEngine", "PinLost", "PoisonRequest", "RefusedPrompt", "Router"]


class Router:
    """Sends samples to engines. Belongs to one event loop. The gate is initially closed: `resume` opens it.

    Args:
        engines: clients of the initial engines.
        vocab_size: number of token ids; valid ids are smaller.
        context_length: largest number of tokens of a sample in an engine: the smaller one of the model's context and
            the KV pool.
        stop_ids: ids that end a turn, see TurnEnds.
        bounds: limits of the attestation.
        routes: request the routed experts of each token.
        strategy: a name in strategy.py.
        interruption: treatment of samples in flight during a push.
        recompute_prefix: interrupted samples may not reuse a cache of older weights.
        push_timeout_s: see WeightPush.
        skip_attestation: the engines serve the weights that they start with, and get no push.
        peers: engines can send their weights to each other.
        stop_texts: texts that end a turn, see TurnEnds.
        ignores_eos: the model's end-of-sequence token ends no turn.
        decode: decodes token ids including special tokens, as the engine does; required with `stop_texts`.
        slots: number of requests that an engine decodes concurrently.
        engine_config: pools and sizes of engines; None: one pool.
        poison: numbers of failures after which a sample is isolated or dropped.
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
        strategy: str = "prefix_affinity",
        interruption: Interruption = "abort",
        recompute_prefix: bool = False,
        push_timeout_s: float = 300.0,
        skip_attestation: bool = False,
        peers: bool = False,
        stop_texts: Sequence[str] = (),
        ignores_eos: bool = False,
        decode: Callable[[Sequence[int]], str] = lambda ids: "",
        slots: int = UNBOUNDED,
        engine_config: EngineConfig | None = None,
        poison: PoisonLimits = SAMPLES,
    ) -> None:
        self._pool = Pool(
            engines, skip_attestation=skip_attestation, slots=slots, engine_config=engine_config
        )
        self.limits = Limits(vocab_size, context_length)
        """Limits of the prompts sent to engines."""
        self._ongoing: dict[int, set[asyncio.Future[None]]] = {}
        """id() of a sequence -> a future for each running call of `generate`, done when the call ends."""
        self._ends = TurnEnds(stop_ids, stop_texts, decode, ignores_eos=ignores_eos)
        self._interruption = interruption
        self._dispatcher = Dispatcher(self._pool, STRATEGIES[strategy])
        self._poison_detector = PoisonDetector(lambda sample: self.on_failure(sample), poison)
        self._response_handler = ResponseHandler(
            self._dispatcher,
            self.limits,
            self._poison_detector,
            lambda sample, tokens: self.on_tokens(sample, tokens),
        )
        self._sender = RequestSender(
            self._pool,
            self._dispatcher,
            self._response_handler,
            self._poison_detector,
            routes=routes,
            interruption=interruption,
            recompute_prefix=recompute_prefix,
        )
        tps = () if engine_config is None else engine_config.tps
        self._push = WeightPush(self._dispatcher, bounds, interruption, push_timeout_s, tps=tps)
        self._peer_transfer = PeerWeightTransfer(self._dispatcher, self._push, enabled=peers)
        self.check_sequence: Callable[[TokenSequence], None] = lambda sequence: None
        """Called before a sequence is sent to engines; raises an error if its sample is not in the ledger."""
        self.on_tokens: Callable[[TokenSequence, int], None] = lambda sample, tokens: None
        """Called with a sample of the ledger and the number of its new tokens."""
        self.on_failure: Callable[[TokenSequence], None] = lambda sample: None
        """Called with a sample of the ledger whose engine died or answered with a server error."""
        self.priority: Callable[[TokenSequence], tuple[int, ...]] = lambda sample: (sample.sample_id,)
        """Sort key of waiting samples, in ascending order. Evaluation precedes all samples."""
        self._refused_prompts = 0

    @property
    def pool(self) -> Pool:
        return self._pool

    @property
    def dispatcher(self) -> Dispatcher:
        return self._dispatcher

    def set_limits(self, limits: Limits) -> None:
        """Replace the limits of prompts and tokens. Used if engines become known only after the start."""
        self.limits = self._response_handler.limits = limits

    # -- one sample ---------------------------------------------------------------------------------------------

    def check(self, prompt_ids: list[int]) -> None:
        """Validate a prompt.

        Raises:
            RefusedPrompt: the prompt is empty, as long as the context, or has an id outside the vocabulary.
        """
        self.limits.check_prompt(prompt_ids)

    async def generate(
        self,
        sample: AnySequence,
        *,
        max_response_tokens: int,
        temperature: float,
        truncation: Truncation | None = None,
        stop_texts: Sequence[str] = (),
        pinned: bool = False,
        explorers: bool = False,
        tops: TopLogprobs | None = None,
        ends: TurnEnds | None = None,
        sampling: Mapping[str, object] = MappingProxyType({}),
        routes: bool = False,
        admission_timeout: float | None = None,
    ) -> AnySequence:
        """Generate until the sample is FINISHED or TRUNCATED, across all interruptions and engine deaths.

        Cancel this call only after an interrupt, when the sample is PARKED: a sample in an engine would lose tokens.

        Args:
            max_response_tokens: largest number of response tokens over all requests.
            stop_texts: additional texts that end this turn.
            pinned: use the pinned engine.
            explorers: use the engines for exploration, outside the ledger.
            tops: collects the most probable ids at each token.
            ends: stop condition of this turn; None: the run's stop ids and texts.
            sampling: additional sampling parameters by SGLang's names. Each request has them, so they must not depend
                on tokens of earlier requests.
            routes: request the routed experts, even if the router's `routes` is False.
            admission_timeout: seconds for which a request may wait for an engine; None: unlimited.

        Raises:
            TimeoutError: a request waited longer than `admission_timeout`; the sample keeps its tokens.
            RefusedPrompt: the prompt or a parameter is invalid; nothing was sent.
            PoisonRequest: too many engines died or failed on the sample.
            PinLost: the pinned engine died.
            NoExplorationEngine: no engine for exploration is alive.
        """
        try:
            check_turn(
                self.limits,
                sample.prompt_ids,
                sample.response_ids,
                temperature=temperature,
                seed=sample.seed,
                stop_texts=stop_texts,
                alternatives=0 if tops is None else tops.k,
            )
        except RefusedPrompt:
            self._refused_prompts += 1
            raise
        turn = Turn(
            limit=min(max_response_tokens, self.limits.max_tokens - len(sample.prompt_ids)),
            temperature=temperature,
            truncation=truncation,
            ends=(ends or self._ends).with_texts(stop_texts),
            pinned=pinned,
            tops=tops,
            sampling=sampling,
            routes=routes,
            admission_timeout=admission_timeout,
        )
        with self._track_call(sample):
            await self._run_to_completion(sample, turn, explorers=explorers)
        return sample

    @contextmanager
    def _track_call(self, sample: TokenSequence) -> Iterator[None]:
        """Register a call of `generate` for `wait_idle` while the context is active."""
        call_end = asyncio.get_running_loop().create_future()
        ongoing = self._ongoing.setdefault(id(sample), set())
        ongoing.add(call_end)
        try:
            yield
        finally:
            call_end.set_result(None)
            ongoing.remove(call_end)
            if not ongoing:
                del self._ongoing[id(sample)]

    async def wait_idle(self, sample: Sample) -> None:
        """Wait until no call of `generate` runs for any sequence of the sample.

        A generator that raised an error may have left a call running.
        """
        for sequence in sample.sequences:
            while ongoing := self._ongoing.get(id(sequence)):
                await asyncio.wait(set(ongoing))

    async def _run_to_completion(self, sample: TokenSequence, turn: Turn, *, explorers: bool) -> None:
        """Send requests, one after another, until the sample is terminal."""
        evaluation = sample.sample_id == EVALUATION
        if not evaluation:
            self.check_sequence(sample)

        def priority() -> tuple[int, ...]:
            return () if evaluation else self.priority(sample)

        fault = ""
        while not sample.status.terminal:
            sample.status = turn.status(sample)
            if sample.status.terminal:  # a crash occurred after its last token was saved
                break
            async with self._poison_detector.isolate(sample, turn.admission_timeout):
                self._poison_detector.check(sample, fault)
                if turn.pinned:
                    engine = self._pool.pinned()
                else:
                    async with asyncio.timeout(turn.admission_timeout):
                        engine = await self._dispatcher.admit(
                            priority,
                            lambda: self._sender.routing_request(sample, turn.limit),
                            evaluation=evaluation,
                            explorers=explorers,
                        )
                fault = await self._sender.send(engine, sample, turn) or fault

    async def greedy(self, prompt_ids: list[int], max_new_tokens: int) -> Segment:
        """Generate one greedy response outside the ledger, across interruptions."""
        return await self.probe(prompt_ids, max_new_tokens, 0.0, 0)

    async def probe(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        temperature: float,
        seed: int,
        stop_texts: Sequence[str] = (),
        *,
        truncation: Truncation | None = None,
        evaluation: bool = False,
    ) -> Segment:
        """Sample one response outside the ledger, across interruptions.

        Args:
            max_new_tokens: largest number of response tokens.
            stop_texts: additional texts that end the response.
            evaluation: use the pinned engine, if there is one.

        Returns:
            the response; its finish reason is `stop` or `length`.
        """
        probe = TokenSequence(EVALUATION, EVALUATION, 0, prompt_ids, seed=seed)
        pinned = evaluation and self._pool.has_pin
        await self.generate(
            probe,
            max_response_tokens=max_new_tokens,
            temperature=temperature,
            truncation=truncation,
            stop_texts=stop_texts,
            pinned=pinned,
        )
        finish = "stop" if probe.status is Status.FINISHED else "length"
        return Segment(probe.response_ids, probe.mu, probe.spans, finish)

    def pin(self) -> bool:
        """Reserve an engine with its current weights for an evaluation, until `unpin`.

        The engine gets no push and no other requests. Its current requests run until they end or are interrupted.

        Returns:
            False if no other engine serves, or an engine is pinned already.
        """
        return self._pool.pin()

    def unpin(self) -> None:
        """Return the pinned engine to service. If it missed a push, it serves after the next push."""
        if self._pool.has_pin:
            self._pool.unpin()
            self._dispatcher.wake()

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-probs of `ids[1:]` under the served weights, outside the ledger.

        An interrupted request is repeated.

        Raises:
            RefusedPrompt: the ids are not a valid prompt.
            RefusedRequest: the engine refuses the request.
            PoisonRequest: too many engines died or failed on the request.
        """
        self.check(ids)
        probe, fault = TokenSequence(EVALUATION, EVALUATION, 0, ids, seed=0), ""
        while True:
            self._poison_detector.check(probe, fault)
            engine = await self._dispatcher.admit(lambda: (), lambda: RoutingRequest(prompt_tokens=len(ids)))
            flight = Flight(self._sender.id_for(EVALUATION), None, asyncio.timeout(None))
            async with attempt(self._dispatcher, engine, flight, len(ids), "log-probs of a prompt") as result:
                with suppress(Aborted):
                    logprobs = await engine.client.token_logprobs(ids, flight.rid)
                    engine.received += 1
                    self._dispatcher.record_success(engine)
                    return logprobs
            fault = self._poison_detector.record_end(result, engine, probe) or fault

    # -- all samples --------------------------------------------------------------------------------------------

    async def interrupt(
        self, keep: Callable[[TokenSequence], bool] | None = None, *, keep_serving: bool = False
    ) -> None:
        """Close the gate and abort all requests. On return, none is in flight, and every token has arrived.

        Args:
            keep: returns whether a sample stays in its engine, which pauses. Such a sample remains IN_FLIGHT, and its
                task must not be cancelled. None: no sample stays. The interruption `abort` ignores it.
            keep_serving: apply `keep` with every interruption, and do not pause engines.
        """
        kept_in_engines = keep is not None and (keep_serving or self._interruption != "abort")
        await self._dispatcher.abort_all(keep if kept_in_engines else None)
        if not kept_in_engines:
            await self._pool.count()
        elif not keep_serving:
            await self._dispatcher.pause(self._interruption, self._pool.engines)

    def resume(self) -> None:
        """Open the gate; interrupted samples continue."""
        self._dispatcher.resume()

    @property
    def open(self) -> bool:
        """Whether samples may go to engines. False between an interrupt and the next `resume`."""
        return self._dispatcher.open

    async def release_memory(self) -> None:
        """Release the engines' GPU memory to the trainer until the next push. Call after `interrupt`."""
        engines = self._pool.alive()
        await asyncio.gather(*(self._dispatcher.attempt(e, e.release_memory()) for e in engines))

    # -- weights ------------------------------------------------------------------------------------------------

    def next_members(self, at_most: int | None = None) -> list[str]:
        """Return the URLs of the engines that a rolling push updates next.

        Args:
            at_most: largest number of engines; None: unlimited.
        """
        return [e.url for e in self._pool.rolling_targets()[:at_most]]

    @property
    def is_rolling(self) -> bool:
        """Whether a rolling push is under way."""
        return self._pool.older is not None

    async def begin_push(
        self, version: int, *, only_stale: bool = False, members: Collection[str] = ()
    ) -> list[EngineAddress]:
        """Interrupt samples, then prepare engines to receive tensors.

        Args:
            version: the weight version to push.
            only_stale: push only to engines without current weights. With `members`, continue a rolling push.
            members: URLs of the engines of one round of a rolling push; the round also updates engines without
                current weights. The gate does not change, and the requests of `members` continue on other engines.

        Returns:
            the engines that are ready; see WeightPush.begin.
        """
        self._push.announce()  # before aborting samples: otherwise a copy could start and overlap the push
        await self._peer_transfer.wait()
        if members:
            await self._prepare_members(members)
        elif not only_stale:
            await self.interrupt(keep=lambda _: True)
            self._sender.invalidate_caches([e.url for e in self._pool.engines])
        return await self._push.begin(version, only_stale=only_stale, members=members)

    async def _prepare_members(self, members: Collection[str]) -> None:
        """Exclude these engines from new requests until their push has begun, and abort or pause their requests."""
        engines = [e for e in self._pool.engines if e.url in members]
        for engine in engines:
            engine.update_pending = True
        if self._interruption == "abort":
            await self._dispatcher.abort_engines(engines)
            await self._pool.count(members)
        else:
            await self._dispatcher.pause(self._interruption, engines)
        self._sender.invalidate_caches(members)

    async def end_push(
        self,
        version: int,
        canaries: list[Canary],
        checksums: Sequence[dict[str, str]] = (),
        excluded: Mapping[str, str] = {},
    ) -> dict[str, float]:
        """Finish the push that `begin_push` started: empty the caches and attest the engines.

        Evaluation continues at once, samples at `resume`. An engine that fails attestation is quarantined. A
        dead engine gets the next push after its restart.

        Args:
            version: the pushed weight version.
            canaries: sequences with the trainer's log-probs under this version.
            checksums: see WeightPush.end.
            excluded: URL -> reason, for engines that did not get all tensors; they get the next push to stale
                engines.

        Returns:
            metrics; `push_left`: number of engines that wait for their round of a rolling push.
        """
        return await self._push.end(version, canaries, checksums, excluded)

    # -- engines and metrics ------------------------------------------------------------------------------------

    def add_engine(self, client: EngineClient) -> None:
        """Add an engine. It serves after the next push to stale engines.

        Raises:
            UserError: an engine with this URL is already in the pool.
        """
        try:
            self._pool.add(client)
        except ValueError as e:
            raise UserError(str(e)) from None

    def remove_engine(self, url: str) -> None:
        """Drain an engine: it gets no new requests and is removed when it is empty.

        Raises:
            UserError: the pool has no engine with this URL.
        """
        engine = self._pool.find(url)
        if engine is None:
            raise UserError(
                f"{url}: no such engine in the pool; expected one of: {describe_states(self._pool.states)}"
            )
        engine.draining = True

    async def evict_engine(self, url: str) -> None:
        """Drain an engine and abort its samples, which continue on other engines. A running evaluation may finish.

        If the pool has no engine with this URL, do nothing.
        """
        if (engine := self._pool.find(url)) is not None:
            engine.draining = True
            await self._dispatcher.abort_engines([engine])

    @property
    def stale_engines(self) -> list[str]:
        """URLs of restarted or joined engines that need the current weights from the trainer."""
        return [e.url for e in self._pool.stale() if not self._peer_transfer.has_source(e)]

    @property
    def all_quarantined(self) -> bool:
        """Whether every engine is quarantined."""
        return self._pool.all_quarantined

    def set_expected_version(self, version: int) -> None:
        """Set the expected weight version, in a router that replaces a dead one."""
        self._pool.version = version

    async def watch(self) -> None:
        """Probe the engines forever, to detect dead, recovered and restarted ones, and start copies of weights."""
        while True:
            await self._pool.probe()
            self._dispatcher.wake()  # an engine may be new, or the last one for exploration may have died
            self._peer_transfer.start_if_needed()
            await asyncio.sleep(PROBE_SECONDS)

    def engine_states(self) -> dict[str, str]:
        """Return URL -> description of the state."""
        return self._pool.states

    def engine_metrics(self) -> dict[str, dict[str, object]]:
        """Return URL -> metrics of an engine.

        - state: description for users.
        - serving: whether it has the current weights and may get samples now, or after the current push or train
          step.
        - requests, tokens: requests in flight, and their prompt and response tokens.
        - weight_version: None if unknown.
        - alive, deaths, rank_seconds: whether it is alive, how often it died, and see Pool.totals.
        - prefill_tokens_per_s, decode_tokens_per_s: measured speed of prompts and of one response; None if unknown.
        - pool: name of its pool, if the config has pools.
        """
        return self._pool.engine_metrics()

    def stats(self) -> dict[str, float]:
        """Return counts since the process started.

        - received_tokens: tokens that arrived, including evaluation_tokens.
        - prefilled_tokens: prompt tokens of all requests, including cached_tokens, which came from a cache.
        - engine_tokens, lost: the engines' own count of generated tokens, and the tokens of them that never arrived,
          as of the last interrupt.
        - cache_share_REASON: cached share of the prompt tokens, by the reason why the prefix could be cached:
            sibling: another sample of the group had the prompt.
            resume, turn: the sample was in the engine under the same weights, before an interruption or an
              observation.
            update: the sample was in the engine before a push, which empties caches unless they are kept.
        """
        return with_cache_shares(*self.tally())

    def tally(self) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
        """Return counts and prompt tokens, from which with_cache_shares computes `stats`.

        The values of several routers can be summed.
        """
        counts, prefills = self._response_handler.tally()
        counts |= {
            "resumes": self._sender.resumes,
            "refused": self._refused_prompts,
            **self._poison_detector.counts,
            **self._pool.totals(),
            "in_flight": self._pool.in_flight,
            "waiting": self._dispatcher.waiting,
            "engines_serving": len(self._pool.serving()),
            "weight_version": self._pool.version,
        }
        return counts, prefills
