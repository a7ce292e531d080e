"""WorkerEngines: the engines of all rollout workers behind the interface of one router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rlsys.config import Config
from rlsys.config.rollout import Truncation
from rlsys.core.types import Segment
from rlsys.core.weight_updates import Canary, EngineAddress
from rlsys.engine.client import EngineClient
from rlsys.engine_requests import Limits
from rlsys.router.push import begin_when_ready, merge_push_metrics, raise_if_all_quarantined
from rlsys.router.response_handler import with_cache_shares
from rlsys.worker.direct_worker import DirectWorker
from rlsys.worker.link import JoinedEngine, WorkerStatus
from rlsys.worker.remote_worker import RemoteWorker
from rlsys.worker.worker_calls import WorkerGone, call_each

RolloutWorker = DirectWorker | RemoteWorker
"""A worker as its coordinator uses it: both classes have the same methods."""

EXPORTED_COUNTS = (
    "received_tokens", "evaluation_tokens", "cached_tokens", "prefilled_tokens", "resumes", "lost", "engine_tokens",
    "engine_deaths", "engines_serving",
)  # fmt: skip
"""Counts of `stats` that must exist even if no worker runs."""


class WorkerEngines:
    """The engines of all workers.

    Owns the gate, the pin, the assignment of joined engines to workers, and the counts of dead workers.
    """

    def __init__(self, config: Config, workers: Sequence[RolloutWorker]) -> None:
        self._timeout_s = config.start_seconds
        """Time limit of a wait for an engine, in seconds."""
        self._workers = workers
        self._dead_counts: Counter[str] = Counter()
        self._dead_prefills: Counter[tuple[str, int]] = Counter()
        self._dead_generated: Counter[str] = Counter()
        self._dead_reported_tokens = 0
        self._worker_of: dict[str, RolloutWorker] = {}
        """URL of an engine that joined or was evicted -> its worker, to which it also returns."""
        self._joined_engines: dict[str, JoinedEngine] = {}
        """URL -> an engine that joined. Engines of the launch are on the workers' command lines."""
        self._rolling = False
        """Whether a rolling push is under way, also if all engines of a worker are already updated."""
        self._pin: RolloutWorker | None = None
        self.open = False
        """Whether samples may go to engines. False between an interrupt and the next `resume`."""
        self.trained_steps = -1
        """Number of train steps in the engines' weights, for replayed samples."""

    @property
    def limits(self) -> Limits:
        """See Router.limits, equal in all workers."""
        return self._workers[0].limits

    def on_worker_death(self, worker: RolloutWorker, status: WorkerStatus, reported_tokens: int) -> None:
        """Add the counts of a dead worker to the totals, and end its pin.

        Args:
            status: last status of the worker.
            reported_tokens: number of tokens that the worker reported.
        """
        self._dead_counts.update(status.counts)
        self._dead_generated.update(status.generated)
        for source, (cached, prefilled) in status.prefills.items():
            self._dead_prefills.update({(source, 0): cached, (source, 1): prefilled})
        self._dead_reported_tokens += reported_tokens
        if self._pin is worker:
            self._pin = None

    def state_for(self, worker: RolloutWorker) -> dict[str, Any]:
        """Return the engine arguments of Worker.do_begin for a new process of `worker`."""
        return {
            "opened": self.open,
            "joined_engines": self._joined_engines_of(worker),
            "trained_steps": self.trained_steps,
        }

    def _joined_engines_of(self, worker: RolloutWorker) -> list[JoinedEngine]:
        return [engine for url, engine in self._joined_engines.items() if self._worker_of[url] is worker]

    async def call_all(self, call: str, **arguments: Any) -> list[Any]:
        """Call all workers, and return the results of those that did not die during the call."""
        return await call_each([w.call(call, **arguments) for w in self._workers])

    def resume(self) -> None:
        """Open the gate; interrupted samples continue."""
        self.open = True
        for worker in self._workers:
            worker.resume()

    def advance(self, trained_steps: int) -> None:
        """Report to the workers that the engines have weights of this many train steps."""
        self.trained_steps = trained_steps
        for worker in self._workers:
            worker.advance(trained_steps)

    async def release_memory(self) -> None:
        """See Router.release_memory."""
        await self.call_all("release_memory")

    def next_members(self, at_most: int) -> list[str]:
        """See Router.next_members."""
        workers = [w for w in self._workers if w.status.is_rolling or not self._rolling]
        rounds = zip_longest(*(w.status.next_members for w in workers))  # round robin over workers
        return [url for urls in rounds for url in urls if url is not None][:at_most]

    async def begin_push(
        self, version: int, *, only_stale: bool = False, members: Collection[str] = ()
    ) -> list[EngineAddress]:
        """See Router.begin_push. Each call involves all workers, also those without an engine in `members`.

        Raises:
            RunError: no worker had an engine ready within engine.start_timeout, or every engine is quarantined.
        """

        async def begin() -> list[EngineAddress]:
            answers = await self.call_all(
                "begin_push", version=version, only_stale=only_stale, members=tuple(members)
            )
            return [e for addresses in answers for e in addresses]

        if only_stale or members:
            return await begin()
        return await begin_when_ready(begin, self, version, self._timeout_s)

    async def end_push(
        self,
        version: int,
        canaries: list[Canary],
        checksums: Sequence[dict[str, str]] = (),
        excluded: Mapping[str, str] = {},
    ) -> dict[str, float]:
        """See Router.end_push.

        Raises:
            RunError: every engine is quarantined.
        """
        pushes = await self.call_all(
            "end_push", version=version, canaries=canaries, checksums=checksums, excluded=excluded
        )
        raise_if_all_quarantined(self, version)
        metrics: dict[str, float] = pushes[0] if len(pushes) == 1 else merge_push_metrics(pushes)
        self._rolling = bool(metrics["push_left"])
        return metrics

    @property
    def all_quarantined(self) -> bool:
        """Whether every worker has engines, and all are quarantined."""
        return all(w.status.all_quarantined for w in self._workers)

    def add_engine(self, client: EngineClient) -> None:
        """See Router.add_engine. The worker with the fewest engines gets a new engine."""
        url = client.url
        worker = self._worker_of.get(url) or min(self._workers, key=lambda w: len(self._engines_of(w)))
        worker.add_engine(client)
        if url not in worker.launch_engines:
            self._joined_engines[url] = url, client.tp, client.pool
        self._worker_of[url] = worker

    async def evict_engine(self, url: str) -> None:
        """See Router.evict_engine."""
        worker = next((w for w in self._workers if url in self._engines_of(w)), None)
        if worker is not None:
            self._worker_of[url] = worker
            await call_each([worker.call("evict_engine", url=url)])
            self._joined_engines.pop(url, None)

    def _engines_of(self, worker: RolloutWorker) -> list[str]:
        """Return the URLs of a worker's engines, including joined ones that its status does not list yet."""
        states = worker.status.states
        return [*states, *(url for url, *_ in self._joined_engines_of(worker) if url not in states)]

    @property
    def stale_engines(self) -> list[str]:
        """See Router.stale_engines."""
        return [url for w in self._workers for url in w.status.stale]

    def engine_states(self) -> dict[str, str]:
        """See Router.engine_states."""
        states: dict[str, str] = {}
        for worker in self._workers:
            worker_states = worker.status.states
            states |= {url: worker_states.get(url, "joins") for url in self._engines_of(worker)}
        return states

    def generated(self) -> Mapping[str, int]:
        """Return the counts of generators, up to half a second old."""
        totals = Counter(self._dead_generated)
        for worker in self._workers:
            totals.update(worker.status.generated)
        return totals

    def counts_at_save(self) -> tuple[int, int]:
        """Return the numbers of received and of reported tokens, as of each worker's last save of all samples.

        If the numbers differ, tokens were lost between engines and ledger.
        """
        counts = [w.counts_at_save for w in self._workers]
        received = self._dead_reported_tokens + sum(received for received, _ in counts)
        reported = self._dead_reported_tokens + sum(reported for _, reported in counts)
        return received, reported

    def engine_metrics(self) -> dict[str, dict[str, object]]:
        """See Router.engine_metrics; up to half a second old."""
        return {url: metrics for w in self._workers for url, metrics in w.status.engines.items()}

    def stats(self) -> dict[str, float]:
        """See Router.stats; as of the last interrupt, otherwise up to half a second old.

        `reward_hung` and `reward_failed` count the rewards that worker processes computed.
        """
        totals: dict[str, float] = dict.fromkeys(EXPORTED_COUNTS, 0)
        prefills = Counter(self._dead_prefills)
        tallies = [w.status.tally() for w in self._workers]
        all_counts: list[Mapping[str, float]] = [self._dead_counts, *(counts for counts, _ in tallies)]
        for counts in all_counts:
            for name, count in counts.items():
                totals[name] = totals.get(name, 0) + count
        for _, worker_prefills in tallies:
            for source, (cached, prefilled) in worker_prefills.items():
                prefills.update({(source, 0): cached, (source, 1): prefilled})
        totals["weight_version"] = max(counts.get("weight_version", 0) for counts, _ in tallies)
        sources = {source for source, _ in prefills}
        return with_cache_shares(
            totals, {source: (prefills[source, 0], prefills[source, 1]) for source in sources}
        )

    # Outside the ledger: see Router

    async def greedy(self, prompt_ids: list[int], max_new_tokens: int) -> Segment:
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
        segment: Segment = await self._call_any(
            self._pin if evaluation else None,
            "probe",
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            stop_texts=tuple(stop_texts),
            truncation=truncation,
            evaluation=evaluation,
        )
        return segment

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        logprobs: list[float] = await self._call_any(None, "prompt_logprobs", ids=ids)
        return logprobs

    async def _call_any(self, worker: RolloutWorker | None, call: str, **arguments: Any) -> Any:
        """Call one worker.

        Args:
            worker: the worker to call; None: the least busy one, and another one if it dies during the call.

        Raises:
            WorkerGone: `worker` died.
        """
        while True:
            target = worker or min(self._workers, key=lambda w: (not w.serving, w.pending_calls))
            try:
                return await target.call(call, **arguments)
            except WorkerGone:
                if worker is not None:
                    raise

    def pin(self) -> bool:
        """See Router.pin. The worker with the most serving engines that can pin one provides the engine."""
        if self._pin is not None:
            return False
        by_size = sorted(self._workers, key=lambda w: -w.serving)
        self._pin = next((w for w in by_size if w.pin()), None)
        return self._pin is not None

    def unpin(self) -> None:
        """See Router.unpin."""
        if self._pin is not None:
            worker, self._pin = self._pin, None
            worker.unpin()
