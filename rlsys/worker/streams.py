"""Streams: runs samples from their first token to their reward, and saves their tokens as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from rlsys.config import Config
from rlsys.core.errors import GeneratorError, RunError
from rlsys.core.types import Prompt, Sample, SampleGroup, Status, TokenSequence
from rlsys.data import Tokenizer
from rlsys.generators.agent import AgentGenerator
from rlsys.generators.censoring import prompt_name
from rlsys.generators.environment import EnvironmentGenerator
from rlsys.generators.generator import Generator, ReceivedTokens, build_generator, check_response, respond
from rlsys.generators.trees import TreeGenerator
from rlsys.generators.turns import sampling_turns, top_logprob_turns
from rlsys.router.router import Router
from rlsys.worker.resume_order import resume_key
from rlsys.worker.run_replay import ReplayStops, load_record
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.scoring import Scorer, Verdict

POLL_SECONDS = 0.02


class SampleStore(Protocol):
    """Stores tokens: the ledger, or a worker's segments."""

    def save(self, samples: Iterable[Sample]) -> None:
        """Write the rows of samples, and their unsaved tokens."""

    def unsaved(self, sample: Sample) -> bool:
        """Return whether the sample has tokens that are not saved."""

    def flush(self) -> None:
        """Make saved tokens durable now."""

    def flush_soon(self) -> None:
        """Schedule a flush."""

    async def wait_for_commit(self) -> None:
        """Schedule a flush and wait for it."""


class Streams:
    """Runs samples with the engines of one router. Owns the set of running samples: those inside `generate`."""

    def __init__(
        self,
        config: Config,
        router: Router,
        scorer: Scorer,
        generator: Generator,
        store: SampleStore,
        group_of: Callable[[TokenSequence], SampleGroup],
        spans: SampleSpans,
        flush_tokens: int,
        stops: ReplayStops | None = None,
        siblings_of: Callable[[Sample], Awaitable[Sequence[Sample]]] | None = None,
    ) -> None:
        """Create streams.

        Args:
            group_of: returns the group of a sequence; it may lack samples that do not run in this process.
            flush_tokens: number of unsaved tokens of all running samples at which they are saved.
            stops: stops of a replayed run; None: the run is no replay.
            siblings_of: see Family.siblings; None: `group_of` returns the whole group.
        """
        self._config = config
        self._siblings_of = siblings_of
        self._stops = stops
        if stops is not None:
            stops.on_stop = self._save_soon
        self._order = config.rollout.resume_order
        self._router = router
        self._scorer = scorer
        self._generator = generator
        self._store = store
        self._group_of = group_of
        self._spans = spans
        self._flush_tokens = flush_tokens
        self._running: dict[int, Sample] = {}
        self._branches: dict[int, Sample] = {}
        """Sample id -> branch of a growing tree. A branch may also be in `_running`."""
        self._received = ReceivedTokens()
        self._unsaved_tokens = 0
        """Number of tokens since all running samples were saved: an upper bound of their unsaved tokens."""
        self.counts: Mapping[str, int] = (
            generator.counts
            if isinstance(generator, AgentGenerator | EnvironmentGenerator | TreeGenerator)
            else {}
        )
        """Live counts of the generator."""
        self.grows_trees = isinstance(generator, TreeGenerator)
        """Whether the generator generates all responses of a group together."""
        if isinstance(generator, TreeGenerator):
            generator.attach(self, top_logprob_turns(config, router))
        if isinstance(generator, AgentGenerator):
            generator.persist = self._persist
        router.check_sequence = self._check_sequence
        router.on_tokens = self._on_tokens
        router.on_failure = self._save_soon
        router.priority = lambda sample: resume_key(self._order, sample, self._group_of(sample))

    def runs(self, sample: Sample) -> bool:
        """Return whether generation of the sample has not finished."""
        return sample.sample_id in self._running

    async def siblings(self, sample: Sample) -> Sequence[Sample]:
        """See Family."""
        if self._siblings_of is None:
            return self._group_of(sample).samples
        return await self._siblings_of(sample)

    @contextmanager
    def growing(self, samples: Iterable[Sample]) -> Iterator[None]:
        """Include these branches of a tree in the running samples while the context is active."""
        branches = {s.sample_id: s for s in samples}
        self._branches |= branches
        for sample in branches.values():
            self._received.begin(sample)
        try:
            yield
        finally:
            for sample_id, sample in branches.items():
                del self._branches[sample_id]
                if sample_id not in self._running:
                    self._received.end(sample)

    def _live(self) -> list[Sample]:
        """Return all samples that may get tokens now."""
        return list((self._branches | self._running).values())

    def keep(self, samples: Iterable[Sample]) -> None:
        """Save samples that were forked or truncated. Call it before they get new tokens."""
        samples = list(samples)
        for sample in samples:
            self._received.rebase(sample)
        self._save(samples)
        self._store.flush_soon()

    def _save(self, samples: Iterable[Sample]) -> None:
        """Check the tokens of samples against the received ones, and save them."""
        samples = list(samples)
        for sample in samples:
            self._received.reconcile(sample)
        self._store.save(samples)

    def _check_sequence(self, sequence: TokenSequence) -> None:
        """Check that the sequence belongs to a running sample, so that its tokens are saved.

        Raises:
            GeneratorError: the sequence belongs to no running sample, for example because it is a copy.
        """
        sample = self._running.get(sequence.sample_id) or self._branches.get(sequence.sample_id)
        if sample is None or not any(q is sequence for q in sample.sequences):
            raise GeneratorError(
                f"rollout.generator called generate_turn with a sequence of sample {sequence.sample_id} that "
                "belongs to no running sample; expected a sequence of the sample that it was called with, not a copy"
            )

    async def generate(self, sample: Sample, prompt: Prompt) -> None:
        """Generate until the sample is terminal and saved. An interrupt parks the sample, and this call waits.

        Cancel this call only after an interrupt.
        """
        self._running[sample.sample_id] = sample
        self._received.begin(sample)
        try:
            name = f"{prompt_name(prompt)}, sample {sample.sample_id}"
            censored = await respond(self._run_to_completion, sample, prompt, name)
            if censored is not None:
                await self._router.wait_idle(sample)
                sample.censor(censored.cause, censored.reason)
        finally:
            del self._running[sample.sample_id]
            if sample.sample_id not in self._branches:
                self._received.end(sample)
        self._save([sample])
        self._store.flush_soon()

    async def _run_to_completion(self, sample: Sample, prompt: Prompt) -> None:
        """Run the generator and check its response."""
        await self._generator(sample, prompt)
        check_response(sample, self._router.limits, self._config.rollout.max_response_tokens)
        if sample.status is not Status.CENSORED:
            self._received.check(sample)

    async def _persist(self, sample: Sample) -> None:
        """Save the sample durably."""
        self._save([sample])
        await self._store.wait_for_commit()

    async def score(self, sample: Sample, prompt: Prompt) -> Verdict:
        """Return the reward of a terminal sample, or the reason why it has none."""
        return await self._scorer.verdict(prompt, sample, f"{prompt_name(prompt)}, sample {sample.sample_id}")

    def advance(self, trained_steps: int) -> None:
        """Report the number of train steps in the engines' weights. Replayed samples continue to their next stop."""
        if self._stops is not None:
            self._stops.advance(trained_steps)

    def at_max_resumes(self) -> list[str]:
        """Return the URLs of engines with a sample that was resumed rollout.max_resumes times."""
        limit = self._config.rollout.max_resumes
        if limit is None:
            return []
        live = (q for s in self._live() for q in s.sequences if q.status is Status.IN_FLIGHT)
        return [q.engine for q in live if q.resumes >= limit and q.engine is not None]

    async def wait_until_interruptible(self, members: Collection[str] | None = None) -> None:
        """Wait until no sample at rollout.max_resumes is in an engine.

        Args:
            members: URLs of the engines whose samples count; None: all.

        Raises:
            RunError: no token arrived for rollout.stall_timeout.
        """
        loop = asyncio.get_running_loop()
        stall_timeout = self._config.rollout.stall_timeout
        received, last_progress = -1.0, 0.0
        while any(members is None or url in members for url in self.at_max_resumes()):
            current = self._router.stats()["received_tokens"]
            if current != received:
                received, last_progress = current, loop.time()
            elif loop.time() - last_progress > stall_timeout:
                raise RunError(
                    f"no token for rollout.stall_timeout = {stall_timeout:g} s, while samples that were resumed "
                    f"rollout.max_resumes = {self._config.rollout.max_resumes} times must not be interrupted"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def interrupt(
        self,
        keep: Callable[[TokenSequence], bool] | None = None,
        *,
        keep_serving: bool = False,
    ) -> list[TokenSequence]:
        """Interrupt and save all running samples. On return, only samples that stay in their engine are in flight.

        Args:
            keep: see Router.interrupt.
            keep_serving: see Router.interrupt.

        Returns:
            the sequences that were in an engine and are parked now.
        """
        running = [q for s in self._live() for q in s.sequences]
        busy = [q for q in running if q.status is Status.IN_FLIGHT]
        try:
            await self._router.interrupt(keep, keep_serving=keep_serving)
        finally:
            await self.save_running()
        return [q for q in busy if q.status is Status.PARKED]

    async def save_running(self) -> None:
        """Save all running samples with their current tokens."""
        self._save(s for s in self._live() if s.all_tokens)
        self._unsaved_tokens = 0

    def save_unsaved(self) -> None:
        """Save the running samples that have unsaved tokens."""
        self._save(s for s in self._live() if self._store.unsaved(s))
        self._unsaved_tokens = 0

    def _on_tokens(self, sample: TokenSequence, tokens: int) -> None:
        """Count new tokens, and save all running samples when `flush_tokens` are unsaved."""
        if tokens:
            self._received.add(sample, tokens)
            self._spans.on_tokens(sample)
        self._unsaved_tokens += tokens
        if self._unsaved_tokens >= self._flush_tokens:
            self.save_unsaved()
            self._store.flush()

    def _save_soon(self, sample: TokenSequence) -> None:
        """Save the sample of a sequence that waits at a stop of a replay, or whose engine failed.

        After a failure, the sample has a new failure count. It must be durable, because the sample could otherwise be
        retried forever.
        """
        self._save([self._running.get(sample.sample_id) or self._branches[sample.sample_id]])
        self._store.flush_soon()


def build_streams(
    config: Config,
    router: Router,
    scorer: Scorer,
    tokenizer: Tokenizer | None,
    store: SampleStore,
    group_of: Callable[[TokenSequence], SampleGroup],
    spans: SampleSpans,
    siblings_of: Callable[[Sample], Awaitable[Sequence[Sample]]] | None = None,
) -> Streams:
    """Create the streams of a worker, with the generator of the config.

    Args:
        tokenizer: required by generators with several turns.
        group_of: see Streams.
        siblings_of: see Streams.
    """
    record = load_record(config)
    stops = None if record is None else ReplayStops(record)
    generate_turn = sampling_turns(config, router) if stops is None else stops.turns(router, config)
    generator = build_generator(config, tokenizer, generate_turn)
    flush_tokens = max(1, config.flush_tokens // config.rollout.workers)
    return Streams(
        config, router, scorer, generator, store, group_of, spans, flush_tokens, stops, siblings_of
    )
