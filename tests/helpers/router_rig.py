"""Real router in front of fake SGLang servers, and a trainer that pushes weights to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from rlsys.core.identity import ANONYMOUS, Identity
from rlsys.core.types import Sample, Status
from rlsys.core.weight_updates import Canary
from rlsys.engine.client import EngineClient
from rlsys.router.attest import Bounds
from rlsys.router.dispatch import Interruption
from rlsys.router.push import begin_when_ready, raise_if_all_quarantined
from rlsys.router.router import Router
from tests.helpers.scripted_engine import (
    EOS,
    Network,
    ScriptedEngine,
    canary_logprobs,
    experts,
    logprob,
    token,
)

PROMPT = [1, 5, 6, 7]
A, B = "http://a:1", "http://b:1"
CANARY_IDS = [4, 8, 15, 16, 23]


class Rig:
    """Fake engines, the router and a trainer. The trainer's weights are equal to the version number."""

    def __init__(
        self,
        *engines: ScriptedEngine,
        push_timeout_s: float = 60.0,
        context: int = 200,
        interruption: Interruption = "abort",
        recompute_prefix: bool = False,
        bounds: Bounds = Bounds(1e-6, 1e-4),  # noqa: B008 - frozen
        identity: Identity = ANONYMOUS,
        **options: Any,
    ) -> None:
        self.engines = list(engines) or [ScriptedEngine(A)]
        network: Any = Network(*self.engines)
        self.router = Router(
            [EngineClient(e.url, network, identity=identity, index=i) for i, e in enumerate(self.engines)],
            vocab_size=128,
            context_length=context,
            stop_ids={EOS},
            bounds=bounds,
            routes=True,
            push_timeout_s=push_timeout_s,
            interruption=interruption,
            recompute_prefix=recompute_prefix,
            **options,
        )
        self._timeout_s = push_timeout_s
        self.version = 0
        self.pending_engines = 0  # engines that a rolling push has not updated yet

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[0]

    async def push(
        self,
        *,
        only_stale: bool = False,
        wrong: tuple[str, ...] = (),
        sums: dict[str, str] | None = None,
        off: float = 0.0,
        excluded: Mapping[str, str] = {},
    ) -> dict[str, float]:
        """Push the next version of the weights.

        Args:
            only_stale: Push the current version to stale engines only.
            wrong: URLs of engines that receive other weights.
            sums: Checksums that the trainer expects of every engine.
            off: Error that is added to the log-probs of the trainer's canaries.
            excluded: Engines that receive no tensors, with the reasons.

        Returns:
            The metrics of the push.
        """
        self.version += not only_stale
        begin = partial(self.router.begin_push, self.version, only_stale=only_stale)
        if only_stale:
            addresses = await begin()
        else:
            addresses = await begin_when_ready(begin, self.router, self.version, self._timeout_s)
        for address in addresses:
            if address.url in excluded:
                continue
            next(e for e in self.engines if e.url == address.url).load(
                self.version + (50 if address.url in wrong else 0)
            )
        canary = Canary(CANARY_IDS, [lp + off for lp in canary_logprobs(CANARY_IDS, self.version)])
        metrics = await self.router.end_push(self.version, [canary], [sums] if sums else [], excluded)
        raise_if_all_quarantined(self.router, self.version)
        self.router.resume()
        return metrics

    def join(self, engine: ScriptedEngine) -> None:
        self.engines.append(engine)
        network: Any = Network(engine)
        self.router.add_engine(EngineClient(engine.url, network))

    def start(self, s: Sample, budget: int = 100) -> asyncio.Task[Sample]:
        return asyncio.create_task(self.router.generate(s, max_response_tokens=budget, temperature=1.0))

    async def start_samples(self, n: int = 1) -> tuple[list[Sample], list[asyncio.Task[Sample]]]:
        """Push weights and start `n` samples in `n` groups. Return when they have some of their tokens."""
        await self.push()
        samples = [sample(i) for i in range(n)]
        tasks = [self.start(s) for s in samples]
        await asyncio.sleep(0.1)
        return samples, tasks

    async def settle(self) -> dict[str, float]:
        """Interrupt generation and return the router's statistics."""
        await self.router.interrupt()
        return self.router.stats()


def sample(i: int = 0, *, seed: int = 3, group: int | None = None, prompt: list[int] = PROMPT) -> Sample:
    return Sample(i, i if group is None else group, 0, list(prompt), seed=seed)


def check(s: Sample, *, versions: set[int], ends_at: int = 40, budget: int = 100) -> None:
    """Check that a sample equals an uninterrupted response, given the weights that sampled each token."""
    first = len(s.prompt_ids)
    length = min(ends_at + 1 - first, budget)
    finished = length == ends_at + 1 - first
    assert len(s.response_ids) == length
    assert s.status is (Status.FINISHED if finished else Status.TRUNCATED)
    assert set(s.versions()) == versions
    expected = [token(s.seed, first + i, v) for i, v in enumerate(s.versions())]
    assert list(s.response_ids) == ([*expected[:-1], EOS] if finished else expected)
    assert list(s.mu) == [logprob(s.seed, first + i, v) for i, v in enumerate(s.versions())]
    for span in s.routes:
        positions = range(span.start, span.end)
        assert span.experts == b"".join(e.to_bytes(2, "little") for p in positions for e in experts(p))


def positions_with_routes(s: Sample) -> list[int]:
    return [p for span in s.routes for p in range(span.start, span.end)]


@asynccontextmanager
async def routing(*engines: ScriptedEngine, **options: Any) -> AsyncIterator[Rig]:
    """Yield a rig whose router watches its engines."""
    rig = Rig(*engines, **options)
    watch = asyncio.create_task(rig.router.watch())
    try:
        yield rig
    finally:
        watch.cancel()
