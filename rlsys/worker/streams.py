"""Samples from their first token to their rewards, while engines write them; saves their tokens on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from rlsys.config import Config
from rlsys.core.errors import RunError
from rlsys.core.types import Prompt, Sample, SampleGroup, Status
from rlsys.generators.agent import AgentGenerator
from rlsys.generators.censoring import named
from rlsys.generators.environment import EnvironmentGenerator
from rlsys.generators.generator import Generator, respond
from rlsys.generators.trees import TreeGenerator
from rlsys.generators.turns import looking_turns
from rlsys.router.router import Router
from rlsys.worker.repeat import Stops
from rlsys.worker.resume_order import resume_key
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.scoring import Scorer, Verdict

LOOK_SECONDS = 0.02


class Shelf(Protocol):
    """Where tokens are saved: the ledger, or a worker's own file."""

    def save(self, samples: Iterable[Sample]) -> None:
        """Their rows, and the tokens that they have got since."""

    def unsaved(self, sample: Sample) -> bool:
        """Whether it has tokens that `save` has not seen."""

    def flush(self) -> None:
        """What was saved outlives this process when this returns."""

    def flush_soon(self) -> None: ...

    async def wait_for_commit(self) -> None:
        """Until the next flush, which is soon."""


class Streams:
    """Owns which samples are running: those that `generate` was called with, until it returns. In this process, with
    all engines of a router; `workers.py` has the same over several processes."""

    def __init__(
        self,
        config: Config,
        router: Router,
        scorer: Scorer,
        generator: Generator,
        shelf: Shelf,
        group_of: Callable[[Sample], SampleGroup],
        spans: SampleSpans,
        flush_tokens: int,
        stops: Stops | None = None,
        whole: Callable[[Sample], Awaitable[Sequence[Sample]]] | None = None,
    ) -> None:
        """`flush_tokens`: the most that all running samples may have unsaved. `stops`: of a record to follow.
        `whole`: see Family.siblings; None: `group_of` gives all of a group."""
        self._config = config
        self._whole = whole
        self._stops = stops
        if stops is not None:
            stops.reached = self._remember
        self._order = config.rollout.resume_order
        self._router = router
        self._scorer = scorer
        self._generator = generator
        self._shelf = shelf
        self._group_of = group_of
        self._spans = spans
        self._flush_tokens = flush_tokens
        self._running: dict[int, Sample] = {}
        self._grown: dict[int, Sample] = {}  # branches of trees that grow; some run by themselves as well
        self._unsaved_tokens = 0  # at most: what came since running samples were saved
        self.counts: Mapping[str, int] = (
            generator.counts
            if isinstance(generator, AgentGenerator | EnvironmentGenerator | TreeGenerator)
            else {}
        )
        """Of the generator, which goes on counting."""
        if isinstance(generator, TreeGenerator):
            generator.attach(self, looking_turns(config, router))
        if isinstance(generator, AgentGenerator):
            generator.saved = self._saved
        router.on_tokens = self._heard
        router.on_failure = self._remember
        router.priority = lambda sample: resume_key(self._order, sample, self._group_of(sample))

    @property
    def together(self) -> bool:
        """Whether all samples of a group have to begin at the same time."""
        return False

    def runs(self, sample: Sample) -> bool:
        """Whether more may be generated of it."""
        return sample.sample_id in self._running

    async def siblings(self, sample: Sample) -> Sequence[Sample]:
        """See Family."""
        return self._group_of(sample).samples if self._whole is None else await self._whole(sample)

    @contextmanager
    def growing(self, samples: Iterable[Sample]) -> Iterator[None]:
        """Their tokens are saved for as long as this lasts, whether they run by themselves or not."""
        grown = {s.sample_id: s for s in samples}
        self._grown |= grown
        try:
            yield
        finally:
            for sample_id in grown:
                del self._grown[sample_id]

    def _live(self) -> list[Sample]:
        """All that may get tokens now."""
        return list((self._grown | self._running).values())

    def keep(self, samples: Iterable[Sample]) -> None:
        """They were forked or cut: save them before they get other tokens."""
        self._shelf.save(samples)
        self._shelf.flush_soon()

    async def generate(self, sample: Sample, prompt: Prompt) -> None:
        """Until the sample is terminal, and saved. An interrupt parks it inside this call. Cancel it after an
        interrupt only."""
        self._running[sample.sample_id] = sample
        try:
            name = f"{named(prompt)}, sample {sample.sample_id}"
            censored = await respond(self._to_its_end, sample, prompt, name)
            if censored is not None:
                await self._router.wait_idle(sample)
                sample.censor(censored.cause, censored.reason)
        finally:
            del self._running[sample.sample_id]
        self._shelf.save([sample])
        self._shelf.flush_soon()

    async def _to_its_end(self, sample: Sample, prompt: Prompt) -> None:
        await self._generator(sample, prompt)
        if not sample.status.terminal:  # nobody would end it
            raise RuntimeError(f"rollout.generator left the response {sample.status}")

    async def _saved(self, sample: Sample) -> None:
        """It is saved, and outlives this process when this returns."""
        self._shelf.save([sample])
        await self._shelf.wait_for_commit()

    async def score(self, sample: Sample, prompt: Prompt) -> Verdict:
        """The reward of a terminal sample, or the reason why it has none."""
        return await self._scorer.verdict(prompt, sample, f"{named(prompt)}, sample {sample.sample_id}")

    def go(self, trained_steps: int) -> None:
        """Engines have weights of so many train steps: a sample that follows a record goes on to its next stop."""
        if self._stops is not None:
            self._stops.go(trained_steps)

    def full(self) -> list[str]:
        """URLs of engines with a sample that has been resumed as often as rollout.max_resumes allows."""
        limit = self._config.rollout.max_resumes
        if limit is None:
            return []
        live = (q for s in self._live() for q in s.sequences if q.status is Status.IN_FLIGHT)
        return [q.engine for q in live if q.resumes >= limit and q.engine is not None]

    async def until_none_is_full(self, members: Collection[str] | None = None) -> None:
        """No engine, or none of these, has such a sample when this returns. RunError after rollout.stall_timeout
        without a token."""
        loop, stall = asyncio.get_running_loop(), self._config.rollout.stall_timeout
        seen, since = -1.0, 0.0
        while [url for url in self.full() if members is None or url in members]:
            if (now := self._router.stats()["received_tokens"]) != seen:
                seen, since = now, loop.time()
            elif loop.time() - since > stall:
                raise RunError(
                    f"no token for rollout.stall_timeout = {stall:g} s of samples that rollout.max_resumes = "
                    f"{self._config.rollout.max_resumes} lets nobody interrupt"
                )
            await asyncio.sleep(LOOK_SECONDS)

    async def interrupt(
        self,
        keep: Callable[[Sample], bool] | None = None,
        *,
        going_on: bool = False,
        gently: bool = False,
    ) -> list[Sample]:
        """Nothing is in flight when this returns, or only samples to `keep` in engines that hold them, or that go on
        with them; every token that came is saved. Returns the sequences that were in an engine and are parked now.

        `gently`: several workers first wait until none is `full`, each for itself; who calls has just looked here.
        """
        running = [q for s in self._live() for q in s.sequences]
        busy = [q for q in running if q.status is Status.IN_FLIGHT]
        try:
            await self._router.interrupt(keep, keep_serving=going_on)
        finally:
            await self.save_running()
        return [q for q in busy if q.status is Status.PARKED]

    async def save_running(self) -> None:
        """With all tokens that they have got so far."""
        self._shelf.save(s for s in self._live() if s.all_tokens)
        self._unsaved_tokens = 0

    def _heard(self, sample: Sample, tokens: int) -> None:
        """So many tokens came: a crash must not cost more than rollout.flush_tokens."""
        if tokens:
            self._spans.heard(sample)
        self._unsaved_tokens += tokens
        if self._unsaved_tokens >= self._flush_tokens:
            self._shelf.save(s for s in self._live() if self._shelf.unsaved(s))
            self._unsaved_tokens = 0
            self._shelf.flush()

    def _remember(self, sample: Sample) -> None:
        """It waits at a stop of a record. Or an engine failed with it: how often that happened must outlive this
        process, or it never ends."""
        # The whole of it, whichever sequence this is.
        self._shelf.save([self._running.get(sample.sample_id) or self._grown[sample.sample_id]])
        self._shelf.flush_soon()
