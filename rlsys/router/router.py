"""The router: one logical `generate` per sample, whatever interrupts it.

What it guarantees: a token that arrived is in its sample before anything else happens to the sample; a sample is in
at most one engine at a time; an engine serves only after a push that it was attested for; nothing is sent that could
kill an engine (ids outside the vocabulary). What it does not: it keeps nothing on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from rlsys.config.rollout import EngineConfig, Truncation
from rlsys.core.errors import UserError
from rlsys.core.spans import TopLogprobs
from rlsys.core.types import Sample, Segment, Status
from rlsys.core.weight_updates import Canary, EngineAddress
from rlsys.engine.client import Aborted, EngineClient
from rlsys.engine_requests import Limits, RefusedPrompt, check_turn
from rlsys.router.arrivals import Arrivals, with_shares
from rlsys.router.attest import Bounds
from rlsys.router.dispatch import EVALUATION, Dispatcher, Interruption
from rlsys.router.engine_state import UNBOUNDED, Flight
from rlsys.router.failures import Poisonous, Suspects, attempt
from rlsys.router.peer_weights import Copies
from rlsys.router.pool import NobodyExplores, PinLost, Pool
from rlsys.router.push import PROBE_SECONDS, WeightPush, states
from rlsys.router.request import Requests, Turn
from rlsys.router.strategy import STRATEGIES, Wish
from rlsys.router.turn_ends import TurnEnds

__all__ = ["EVALUATION", "NobodyExplores", "PinLost", "Poisonous", "RefusedPrompt", "Router"]


class Router:
    """Belongs to one event loop. Starts with the gate closed: `resume` opens it.

    context_length: the most tokens an engine can hold of one sample, the smaller of the model's context and the
    engine's KV pool. stop_ids, stop_texts: what ends a turn, see TurnEnds. routes: ask for the experts of
    each token. strategy: a name in strategy.py. interruption: what becomes of samples in flight in a push.
    reads_again: a sample that was interrupted finds nothing of older weights in a cache.
    patience: seconds that a push waits for an engine, long enough for one to be restarted. trusted: engines serve
    with the weights that they start with, and nobody pushes others. peers: they can pass on their weights. sole: the
    run has no other router, so a push waits until an engine is there, and fails when none can serve. slots: requests
    that an engine decodes at once. kinds: which pools and sizes of engines there are; None: one.
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
        reads_again: bool = False,
        patience: float = 300.0,
        trusted: bool = False,
        peers: bool = False,
        stop_texts: Sequence[str] = (),
        decode: Callable[[Sequence[int]], str] = lambda ids: "",
        sole: bool = True,
        slots: int = UNBOUNDED,
        kinds: EngineConfig | None = None,
    ) -> None:
        self._pool = Pool(engines, trusted=trusted, slots=slots, kinds=kinds)
        self.limits = Limits(vocab_size, context_length)
        """What a prompt must keep to that goes to an engine."""
        self._ongoing: dict[int, set[asyncio.Future[None]]] = {}  # by id() of a sample, calls of `generate`
        self._ends = TurnEnds(stop_ids, stop_texts, decode)
        self._interruption = interruption
        self._dispatcher = Dispatcher(self._pool, STRATEGIES[strategy])
        self._suspects = Suspects(lambda sample: self.on_failure(sample))
        self._arrivals = Arrivals(
            self._dispatcher,
            self.limits,
            self._suspects,
            lambda sample, tokens: self.on_tokens(sample, tokens),
        )
        self._requests = Requests(
            self._pool,
            self._dispatcher,
            self._arrivals,
            self._suspects,
            routes=routes,
            interruption=interruption,
            reads_again=reads_again,
        )
        tps = () if kinds is None else kinds.tps
        self._push = WeightPush(self._dispatcher, bounds, interruption, patience, sole=sole, tps=tps)
        self._copies = Copies(self._dispatcher, self._push, able=peers)
        self.on_tokens: Callable[[Sample, int], None] = lambda sample, tokens: None
        """Told of a sample of the ledger, and how many tokens it has just got."""
        self.on_failure: Callable[[Sample], None] = lambda sample: None
        """Told of a sample of the ledger whose engine has just died, or answered with a server error."""
        self.priority: Callable[[Sample], tuple[int, ...]] = lambda sample: (sample.sample_id,)
        """Of samples that wait, the smallest goes first; evaluation goes before all of them."""
        self._refused = 0

    # -- one sample ---------------------------------------------------------------------------------------------

    def check(self, prompt_ids: list[int]) -> None:
        """Raises RefusedPrompt: empty, no room for a response, or an id outside the vocabulary."""
        self.limits.check_prompt(prompt_ids)

    async def generate(
        self,
        sample: Sample,
        *,
        max_response_tokens: int,
        temperature: float,
        truncation: Truncation | None = None,
        stop_texts: Sequence[str] = (),
        pinned: bool = False,
        explorers: bool = False,
        tops: TopLogprobs | None = None,
    ) -> Sample:
        """Until the sample is FINISHED or TRUNCATED, over all interruptions and engine deaths.

        `pinned`: by the engine that is pinned; PinLost when that has died. `explorers`: by those that try prompts
        out, outside the ledger; NobodyExplores when none is left. `tops`: gets the most probable ids in the place of
        each token.

        `max_response_tokens` counts over all segments. `stop_texts`: further texts that end this turn. Raises
        RefusedPrompt before anything is sent, and Poisonous when too many engines died with the sample or answered
        with an error. Cancel it after an interrupt only: the sample then stays PARKED with its tokens; in an engine
        it would lose some.
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
            self._refused += 1
            raise
        turn = Turn(
            limit=min(max_response_tokens, self.limits.room - len(sample.prompt_ids)),
            temperature=temperature,
            truncation=truncation,
            ends=self._ends.also(stop_texts),
            pinned=pinned,
            tops=tops,
        )
        with self._working_on(sample):
            await self._to_its_end(sample, turn, explorers=explorers)
        return sample

    @contextmanager
    def _working_on(self, sample: Sample) -> Iterator[None]:
        done = asyncio.get_running_loop().create_future()
        ongoing = self._ongoing.setdefault(id(sample), set())
        ongoing.add(done)
        try:
            yield
        finally:
            done.set_result(None)
            ongoing.remove(done)
            if not ongoing:
                del self._ongoing[id(sample)]

    async def until_idle(self, sample: Sample) -> None:
        """No call of `generate` works on any sequence of it when this returns: a generator that has raised may have
        left one behind."""
        for sequence in sample.sequences:
            while ongoing := self._ongoing.get(id(sequence)):
                await asyncio.wait(set(ongoing))

    async def _to_its_end(self, sample: Sample, turn: Turn, *, explorers: bool) -> None:
        evaluation = sample.sample_id == EVALUATION

        def priority() -> tuple[int, ...]:
            return () if evaluation else self.priority(sample)

        fault = ""
        while not sample.status.terminal:
            sample.status = turn.status(sample)
            if sample.status.terminal:  # saved with its last token, before anybody saw that it had ended
                break
            self._suspects.check(sample, fault)
            async with self._suspects.alone(sample):
                if turn.pinned:
                    engine = self._pool.pinned()
                else:
                    engine = await self._dispatcher.admit(
                        priority,
                        lambda: self._requests.wish(sample, turn.limit),
                        evaluation=evaluation,
                        explorers=explorers,
                    )
                fault = await self._requests.send(engine, sample, turn) or fault

    async def greedy(self, prompt_ids: list[int], max_new_tokens: int) -> Segment:
        """One greedy response outside the ledger, for evaluation. After an interruption it goes on like any."""
        return await self.probe(prompt_ids, max_new_tokens, 0.0, 0)

    async def probe(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        temperature: float,
        seed: int,
        stop_texts: Sequence[str] = (),
        *,
        evaluation: bool = False,
    ) -> Segment:
        """The same, sampled. `evaluation`: by the pinned engine, where there is one."""
        probe = Sample(EVALUATION, EVALUATION, 0, prompt_ids, seed=seed)
        pinned = evaluation and self._pool.has_pin
        await self.generate(
            probe,
            max_response_tokens=max_new_tokens,
            temperature=temperature,
            stop_texts=stop_texts,
            pinned=pinned,
        )
        finish = "stop" if probe.status is Status.FINISHED else "length"
        return Segment(probe.response_ids, probe.mu, probe.spans, finish)

    def pin(self) -> bool:
        """Keep an engine for an evaluation, with the weights that it has, until `unpin`: it gets no push and nothing
        else to do. What it does now goes on, until it ends or is interrupted. False when no other engine serves."""
        return self._pool.pin()

    def unpin(self) -> None:
        """The engine serves again, after a push where it has missed one. Without a pin: nothing."""
        if self._pool.has_pin:
            self._pool.unpin()
            self._dispatcher.wake()

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """Log-probs of `ids[1:]` under the weights that serve, outside the ledger. After an interrupt: once more.

        Raises RefusedPrompt, RefusedRequest for what the engine refuses, and Poisonous as `generate` does.
        """
        self.check(ids)
        asked, fault = Sample(EVALUATION, EVALUATION, 0, ids, seed=0), ""
        while True:
            self._suspects.check(asked, fault)
            engine = await self._dispatcher.admit(lambda: (), lambda: Wish(read=len(ids)))
            flight = Flight(self._requests.id_for(EVALUATION), None, asyncio.timeout(None))
            async with attempt(self._dispatcher, engine, flight, len(ids), "log-probs of a prompt") as made:
                with suppress(Aborted):
                    found = await engine.client.token_logprobs(ids, flight.rid)
                    engine.received += 1
                    self._dispatcher.works(engine)
                    return found
            fault = self._suspects.blame(made, engine, asked) or fault

    # -- all samples --------------------------------------------------------------------------------------------

    async def interrupt(
        self, keep: Callable[[Sample], bool] | None = None, *, going_on: bool = False
    ) -> None:
        """Close the gate and bring samples back: afterwards nothing is in flight, every token is here.

        keep: under the interruptions retract and in_place, samples for which it is true stay in their engines, which
        pause: they keep the status IN_FLIGHT, and their tasks must not be cancelled. going_on: under all
        interruptions, and no engine pauses; only the gate is closed.
        """
        holding = keep is not None and (going_on or self._interruption != "abort")
        await self._dispatcher.bring_back(keep if holding else None)
        if not holding:
            await self._pool.count()
        elif not going_on:
            await self._dispatcher.pause(self._interruption, self._pool.engines)

    def resume(self) -> None:
        """Open the gate; samples that were interrupted go on."""
        self._dispatcher.resume()

    @property
    def open(self) -> bool:
        """Whether samples may go to engines: not from an interrupt to the next `resume`."""
        return self._dispatcher.open

    async def rest_engines(self) -> None:
        """After `interrupt`: engines give their memory to the trainer until the next push."""
        engines = self._pool.alive()
        await asyncio.gather(*(self._dispatcher.attempt(e, e.rest()) for e in engines))

    # -- weights ------------------------------------------------------------------------------------------------

    def next_members(self, at_most: int | None = None) -> list[str]:
        """URLs of the engines that a rolling push updates next; all that it has still to update when no number is
        given."""
        return [e.url for e in self._pool.before_roll()[:at_most]]

    @property
    def rolls(self) -> bool:
        """Whether a rolling push goes round."""
        return self._pool.older is not None

    async def begin_push(
        self, version: int, *, only_stale: bool = False, members: Collection[str] = ()
    ) -> list[EngineAddress]:
        """Interrupt, then get every engine (or only those without the current weights) ready for tensors.

        Waits up to `patience` for an engine, since the supervisor may be restarting the only one; then RunError.

        `members`: one round of a rolling push, which updates these engines and those without weights. The gate stays
        as it is: what they had goes on in the others. `only_stale`: it is not the first round of this version.
        """
        self._push.announce()  # else a copy could begin while samples are called back, and meet the push
        await self._copies.settle()
        if members:
            await self._bring_to_rest(members)
        elif not only_stale:
            await self.interrupt(keep=lambda _: True)
            self._requests.caches_end([e.url for e in self._pool.engines])
        return await self._push.begin(version, only_stale=only_stale, members=members)

    async def _bring_to_rest(self, members: Collection[str]) -> None:
        """These engines, until their push has begun."""
        engines = [e for e in self._pool.engines if e.url in members]
        for engine in engines:
            engine.resting = True
        if self._interruption == "abort":
            await self._dispatcher.empty(engines)
            await self._pool.count(members)
        else:
            await self._dispatcher.pause(self._interruption, engines)
        self._requests.caches_end(members)

    async def end_push(
        self,
        version: int,
        canaries: list[Canary],
        checksums: Sequence[dict[str, str]] = (),
        left_out: Mapping[str, str] = {},
    ) -> dict[str, float]:
        """End the update that begin_push began, empty caches, attest; then evaluation may go on, samples at `resume`.

        An engine that fails attestation is quarantined, one that died is left to its restart, one of `left_out` (its
        URL -> why it did not get all tensors) gets the next push to stale engines. Raises RunError when every engine
        is quarantined. `push_left` of what it returns: engines that wait for their round of a rolling push.
        """
        return await self._push.end(version, canaries, checksums, left_out)

    # -- engines and figures ------------------------------------------------------------------------------------

    def add_engine(self, client: EngineClient) -> None:
        """It serves after the next push to stale engines. Raises UserError for one that is here already."""
        try:
            self._pool.add(client)
        except ValueError as e:
            raise UserError(str(e)) from None

    def remove_engine(self, url: str) -> None:
        """It gets nothing new and leaves when it is empty. Raises UserError for an engine that is not here."""
        engine = self._pool.find(url)
        if engine is None:
            raise UserError(f"{url} is not in the pool: {states(self._pool)}")
        engine.draining = True

    async def send_away(self, url: str) -> None:
        """The same, but at once: its samples go on in other engines, and an evaluation alone may end there. Nothing
        happens when it has gone already."""
        if (engine := self._pool.find(url)) is not None:
            engine.draining = True
            await self._dispatcher.empty([engine])

    @property
    def stale_engines(self) -> list[str]:
        """Engines that came back, or joined, and need the current weights of the trainer."""
        return [e.url for e in self._pool.stale() if not self._copies.will_bring(e)]

    @property
    def hopeless(self) -> bool:
        """Whether every engine is quarantined."""
        return self._pool.hopeless

    def expect(self, version: int) -> None:
        """In place of a router that is gone: engines should have these weights, and get them in a push."""
        self._pool.version = version

    async def watch(self) -> None:
        """For the life of the process: notice engines that die, come back, or were restarted unseen."""
        while True:
            await self._pool.probe()
            self._dispatcher.wake()  # to an engine, or to the news that none is left to explore
            self._copies.look()
            await asyncio.sleep(PROBE_SECONDS)

    def engine_states(self) -> dict[str, str]:
        """URL -> state in words."""
        return {e.url: e.state for e in self._pool.engines}

    def engine_figures(self) -> dict[str, dict[str, object]]:
        """URL -> what the engine does now: its requests, their tokens, its weight version (None: not known), and
        whether it has the current weights and may be sent samples, now or when a push or a train step is over. Its
        speed in tokens a second, as measured: of prompts, and of one response; None: not known.
        """
        return self._pool.figures()

    def stats(self) -> dict[str, float]:
        """Counts since the process started. `received_tokens` include `evaluation_tokens`; `cached_tokens` of the
        `prefilled_tokens` came from a cache; `engine_tokens` (the engines' own count) and `lost` (what of it
        never arrived) are as of the last interrupt. `cache_share_*` is the cached share by what could have put a
        prefix into a cache: a `sibling` that shares the prompt, the sample itself before a `resume` under the same
        weights or before a `turn`, or before an `update` of the weights, which empties caches unless they are kept.
        """
        return with_shares(*self.tally())

    def tally(self) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
        """What `stats` are made of; those of several routers can be added up."""
        counts, prefills = self._arrivals.tally()
        counts |= {
            "resumes": self._requests.resumes,
            "refused": self._refused,
            **self._suspects.counts,
            **self._pool.totals(),
            "in_flight": self._pool.in_flight,
            "waiting": self._dispatcher.waiting,
            "engines_serving": len(self._pool.serving()),
            "weight_version": self._pool.version,
        }
        return counts, prefills
