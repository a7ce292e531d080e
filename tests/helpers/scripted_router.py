"""Fake of rlsys' Router without engines: tests set the length of each response and when its tokens arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.config.rollout import Truncation
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Sample, Segment, Status
from rlsys.core.weight_updates import Canary, EngineAddress
from rlsys.engine_requests import Limits
from rlsys.router.router import RefusedPrompt

URL = "http://engine:1"


@dataclass
class Busy:
    sample: Sample
    limit: int
    done: asyncio.Event


class ScriptedRouter:
    """Fake router. A response has `length(sample)` tokens, up to the budget; token i has the id i and the mu -i/7.

    Tokens arrive only when a test calls `tick` or `add_tokens`, so runs are deterministic.
    """

    def __init__(self, length: Callable[[Sample], int]) -> None:
        self._length = length
        self._busy: dict[int, Busy] = {}
        self._gate = asyncio.Event()
        self.version = 0
        self.calls: list[str] = []
        self.probes: list[tuple[int, float, int]] = []
        """Prompt length, temperature and seed of requests outside the ledger."""
        self.truncations: list[Truncation | None] = []
        """Truncation of each of these requests."""
        self.stale_engines: list[str] = []
        self.members = ["e1", "e2", "e3"]
        self.pending_counts: list[int] = []
        """Number of engines that a rolling push has not updated, after each round."""
        self.rounds: list[list[str]] = []
        """Engines of each round of a rolling push."""
        self.limits = Limits(vocab_size=1000, context_length=4096)
        self.pinned: int | None = None
        """Version of the weights that serve a background evaluation."""
        self.refuse: Callable[[Sample], bool] = lambda sample: False
        self.keeps_samples = False
        """Samples stay in their engine during a push, as with router.interruption = retract."""
        self.most_in_flight = 0
        self.lost = 0
        self.received = self.resumes = 0
        self.is_rolling = self.all_quarantined = False
        self.check_sequence: Callable[[Sample], None] = lambda sequence: None
        self.on_tokens: Callable[[Sample, int], None] = lambda sample, tokens: None
        self.priority: Callable[[Sample], tuple[int, ...]] = lambda sample: (sample.sample_id,)

    def tick(self, tokens: int = 1) -> None:
        """Add up to this many tokens to every sample in flight, oldest first."""
        for busy in sorted(self._busy.values(), key=lambda b: b.sample.sample_id):
            self.add_tokens(busy.sample.sample_id, tokens)

    def add_tokens(self, sample_id: int, tokens: int) -> None:
        """Add up to this many tokens to a sample in flight."""
        busy = self._busy[sample_id]
        sample, first = busy.sample, len(busy.sample.response_ids)
        end = min(self._length(sample), busy.limit)
        n = min(tokens, end - first)
        ids = list(range(first, first + n))
        sample.append(Segment(ids, [-i / 7 for i in ids], [VersionSpan(self.version, 0, n)]))
        self.received += n
        self.on_tokens(sample, n)
        if first + n == end:
            sample.status = Status.FINISHED if end == self._length(sample) else Status.TRUNCATED
            self._end(sample_id)

    def _end(self, sample_id: int) -> None:
        self._busy.pop(sample_id).done.set()

    @property
    def in_flight(self) -> list[int]:
        return sorted(self._busy)

    # Interface of rlsys.router.router.Router

    async def generate(self, sample: Sample, *, max_response_tokens: int, **options: Any) -> Sample:
        if self.refuse(sample):
            raise RefusedPrompt("the prompt has 900 tokens, the context 512")
        self.check_sequence(sample)
        while not sample.status.terminal:
            await self._gate.wait()
            resumed = bool(sample.response_ids) and not sample.observed_last
            self.resumes += resumed
            sample.resumes += resumed
            sample.status, sample.engine = Status.IN_FLIGHT, URL
            busy = self._busy[sample.sample_id] = Busy(sample, max_response_tokens, asyncio.Event())
            self.most_in_flight = max(self.most_in_flight, len(self._busy))
            try:
                await busy.done.wait()
            finally:
                self._busy.pop(sample.sample_id, None)
                if not sample.status.terminal:
                    sample.status = Status.PARKED
        return sample

    async def wait_idle(self, sample: Sample) -> None:
        while sample.sample_id in self._busy:
            await self._busy[sample.sample_id].done.wait()

    async def interrupt(
        self, keep: Callable[[Sample], bool] | None = None, *, keep_serving: bool = False
    ) -> None:
        self.calls.append("interrupt")
        self._gate.clear()
        for sample_id in () if keep_serving else self.in_flight:
            if self.keeps_samples and keep is not None and keep(self._busy[sample_id].sample):
                continue
            self._busy[sample_id].sample.status = Status.PARKED
            self._end(sample_id)
        await asyncio.sleep(0)

    def resume(self) -> None:
        self._gate.set()

    async def watch(self) -> None: ...

    def add_engine(self, client: Any) -> None:
        raise AssertionError("the scripted router takes no further engine")

    async def begin_push(
        self, version: int, *, only_stale: bool = False, members: Sequence[str] = ()
    ) -> list[EngineAddress]:
        self.rounds.append(list(members))
        self.members = [url for url in self.members if url not in members]
        self.calls.append(f"begin {version}{' stale' if only_stale else ''}")
        if not only_stale and not members:
            await self.interrupt(keep=lambda _: True)
        self._next = version
        return [EngineAddress(url, 1) for url in (self.stale_engines if only_stale else [URL])]

    async def end_push(
        self,
        version: int,
        canaries: list[Canary],
        checksums: Sequence[dict[str, str]] = (),
        excluded: Mapping[str, str] = {},
    ) -> dict[str, float]:
        self.calls.append(f"end {version}")
        self.version = version
        self.stale_engines = []
        pending_count = self.pending_counts.pop(0) if self.pending_counts else 0
        self.is_rolling = pending_count > 0
        return {
            "push_canary_mean": 1e-8, "push_canary_p999": 1e-7, "time_checksums": 0.0, "push_left": pending_count,
        }  # fmt: skip

    def next_members(self, at_most: int | None = None) -> list[str]:
        return self.members[:at_most]

    async def greedy(self, prompt_ids: list[int], max_new_tokens: int) -> Segment:
        return await self.probe(prompt_ids, max_new_tokens, 0.0, 0)

    def pin(self) -> bool:
        self.pinned = self.version
        return True

    def unpin(self) -> None:
        self.pinned = None

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
        self.truncations.append(truncation)
        self.probes.append((len(prompt_ids), temperature, seed))
        n = len(prompt_ids)
        version = self.version if self.pinned is None or not evaluation else self.pinned
        return Segment(list(range(n)), [0.0] * n, [VersionSpan(version, 0, n)], "stop")

    def tally(self) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
        return self.stats(), {}

    def stats(self) -> dict[str, float]:
        return {
            "in_flight": len(self._busy), "received_tokens": self.received, "resumes": self.resumes,
            "cached_tokens": 30, "prefilled_tokens": 40, "draft_checks": 0, "checked_tokens": 0,
            "engine_tokens": self.received + self.lost,
            "lost": self.lost, "evaluation_tokens": 0, "engines_serving": 1, "engine_deaths": 0,
        }  # fmt: skip

    def engine_metrics(self) -> dict[str, dict[str, object]]:
        return {URL: {"state": f"version {self.version}", "serving": True, "requests": 0, "tokens": 0}}

    def engine_states(self) -> dict[str, str]:
        return {URL: f"version {self.version}"}
