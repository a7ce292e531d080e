"""The engines of all rollout workers, as one router (engines.py)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rlsys.config import Config
from rlsys.core.errors import RunError
from rlsys.core.types import Segment
from rlsys.core.weight_updates import Canary, EngineAddress
from rlsys.engine.client import EngineClient
from rlsys.engine_requests import Limits
from rlsys.router.push import PROBE_SECONDS, merge_push_metrics
from rlsys.router.response_handler import with_cache_shares
from rlsys.worker.link import Joined
from rlsys.worker.worker_process import WorkerGone, WorkerProcess

READ = (
    "received_tokens", "evaluation_tokens", "cached_tokens", "prefilled_tokens", "resumes", "lost", "engine_tokens",
    "engine_deaths", "engines_serving",
)  # fmt: skip
"""Counts that others read, also while no worker is there."""


class WorkerEngines:
    """Owns the gate, the pin, which worker has an engine that joined, and the counts of workers that died. `failed`:
    told of an error that nobody waits for; `resumed`: that the gate is open again."""

    def __init__(
        self,
        config: Config,
        workers: Sequence[WorkerProcess],
        failed: Callable[[BaseException], None],
        resumed: Callable[[], None],
    ) -> None:
        self._patience = config.start_seconds
        self._workers = workers
        self._failed, self._resumed = failed, resumed
        self._gone: Counter[str] = Counter()
        self._gone_prefills: Counter[tuple[str, int]] = Counter()
        self._gone_generated: Counter[str] = Counter()
        self._gone_told = 0
        self._homes: dict[str, WorkerProcess] = {}
        """URL -> the worker that has an engine which joined or was sent away; it comes back to the same one."""
        self._joined: dict[str, Joined] = {}
        """By URL, engines that joined. Those of the launch are in the workers' command lines."""
        self._rolls = False
        """Whether a rolling push goes round; workers that have got round do not know it."""
        self._pin: WorkerProcess | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self.open = False
        """Whether samples may go to engines: not from an interrupt to the next `resume`."""
        self.trained_steps = -1
        """Train steps that the engines' weights contain, for samples that follow a record."""

    @property
    def limits(self) -> Limits:
        """See Router.limits: those of every worker's router are the same."""
        return self._workers[0].limits

    def mourn(self, worker: WorkerProcess) -> None:
        """Its process is gone. What it counted stays in the sums."""
        figures = worker.take_figures()
        self._gone.update(figures.counts)
        self._gone_generated.update(figures.generated)
        for why, (cached, prefilled) in figures.prefills.items():
            self._gone_prefills.update({(why, 0): cached, (why, 1): prefilled})
        self._gone_told += worker.told
        worker.settled = (0, 0)
        if self._pin is worker:
            self._pin = None

    def joined(self, worker: WorkerProcess) -> list[Joined]:
        """The engines that a new process of this worker must take in."""
        return [engine for url, engine in self._joined.items() if self._homes[url] is worker]

    async def all(self, call: str, **arguments: Any) -> list[Any]:
        """What each worker answers. One that dies meanwhile gives none: nothing of it is in flight any more."""
        return await self._answers(self._workers, call, **arguments)

    async def _answers(self, workers: Sequence[WorkerProcess], call: str, **arguments: Any) -> list[Any]:
        found = await asyncio.gather(*(w.call(call, **arguments) for w in workers), return_exceptions=True)
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerGone):
                raise answer
        return [a for a in found if not isinstance(a, BaseException)]

    def resume(self) -> None:
        """Open the gate; samples that were interrupted go on."""
        self.open = True
        self._resumed()
        self._post("resume", self._workers)

    def go(self, trained_steps: int) -> None:
        """Engines have weights of so many train steps."""
        self.trained_steps = trained_steps
        self._post("go", self._workers, trained_steps=trained_steps)

    def _post(self, call: str, workers: Sequence[WorkerProcess], **arguments: Any) -> None:
        """Nobody waits for the answer; who dies meanwhile needs none."""
        for worker in workers:
            task = asyncio.create_task(worker.call(call, **arguments))
            self._background.add(task)
            task.add_done_callback(self._told)

    def _told(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, WorkerGone):
            self._failed(error)

    async def release_memory(self) -> None:
        """After `interrupt`: engines give their memory to the trainer until the next push."""
        await self.all("rest")

    def next_members(self, at_most: int) -> list[str]:
        """See Router.next_members."""
        able = [w for w in self._workers if w.figures.rolls or not self._rolls]
        rows = zip_longest(*(w.figures.before_roll for w in able))  # one of each worker, and again
        return [url for row in rows for url in row if url is not None][:at_most]

    async def begin_push(
        self, version: int, *, only_stale: bool = False, members: Collection[str] = ()
    ) -> list[EngineAddress]:
        """See Router.begin_push: every worker hears of each round, also one that has none of its engines. Raises
        RunError when no worker has an engine within engine.start_timeout."""
        patience = self._patience
        try:
            async with asyncio.timeout(patience):
                while True:
                    found = await self.all(
                        "begin_push", version=version, only_stale=only_stale, members=tuple(members)
                    )
                    engines = [e for of_worker in found for e in of_worker]
                    if engines or only_stale or members:
                        return engines
                    self._raise_if_hopeless()
                    await asyncio.sleep(PROBE_SECONDS)
        except TimeoutError:
            raise RunError(
                f"no engine was ready for weight version {version} within {patience:g} s: {self._states()}"
            ) from None

    async def end_push(
        self,
        version: int,
        canaries: list[Canary],
        checksums: Sequence[dict[str, str]] = (),
        left_out: Mapping[str, str] = {},
    ) -> dict[str, float]:
        """See Router.end_push."""
        found = await self.all(
            "end_push", version=version, canaries=canaries, checksums=checksums, left_out=left_out
        )
        self._raise_if_hopeless()
        told = merge_push_metrics(found)
        self._rolls = bool(told["push_left"])
        return told

    def _raise_if_hopeless(self) -> None:
        if all(w.figures.hopeless for w in self._workers):
            raise RunError(f"no engine can serve: {self._states()}")

    def _states(self) -> str:
        return "; ".join(f"{url} {state}" for url, state in self.engine_states().items())

    def add_engine(self, client: EngineClient) -> None:
        """See Router.add_engine: in the worker with the fewest engines."""
        url = client.url
        home = self._homes.get(url) or min(self._workers, key=lambda w: len(self._engines_of(w)))
        if url not in home.of_launch:
            self._joined[url] = url, client.tp, client.pool
        self._homes[url] = home
        self._post("add_engine", [home], url=url, tp=client.tp, pool=client.pool)

    async def evict_engine(self, url: str) -> None:
        """See Router.send_away."""
        home = next((w for w in self._workers if url in self._engines_of(w)), None)
        if home is not None:
            self._homes[url] = home
            await self._answers([home], "send_away", url=url)
            self._joined.pop(url, None)

    def _engines_of(self, worker: WorkerProcess) -> list[str]:
        """URLs; those that it has just been given included."""
        coming = [url for url, *_ in self.joined(worker) if url not in worker.figures.states]
        return [*worker.figures.states, *coming]

    @property
    def stale_engines(self) -> list[str]:
        """Engines that came back, or joined, and need the current weights."""
        return [url for w in self._workers for url in w.figures.stale]

    def engine_states(self) -> dict[str, str]:
        """URL -> state in words."""
        return {url: w.figures.states.get(url, "joins") for w in self._workers for url in self._engines_of(w)}

    def generated(self) -> Mapping[str, int]:
        """What generators have counted; as of half a second ago."""
        found = Counter(self._gone_generated)
        for worker in self._workers:
            found.update(worker.figures.generated)
        return found

    def settled(self) -> tuple[int, int]:
        """Tokens that workers had received for samples when each saved all that runs for the last time, and those
        that it had told by then: the same number."""
        pairs = [(self._gone_told, self._gone_told), *(w.settled for w in self._workers)]
        return sum(received for received, _ in pairs), sum(told for _, told in pairs)

    def engine_figures(self) -> dict[str, dict[str, object]]:
        """See Router.engine_figures; as of half a second ago."""
        return {url: found for w in self._workers for url, found in w.figures.engines.items()}

    def stats(self) -> dict[str, float]:
        """See Router.stats; after an interrupt as of then, else as of half a second ago. `reward_*`: of rewards that
        workers computed."""
        counts, prefills = dict.fromkeys(READ, 0.0), Counter(self._gone_prefills)
        sources: list[Mapping[str, float]] = [self._gone, *(w.figures.counts for w in self._workers)]
        for counted in sources:
            for key, number in counted.items():
                counts[key] = counts.get(key, 0) + number
        for worker in self._workers:
            for why, shares in worker.figures.prefills.items():
                prefills.update({(why, i): n for i, n in enumerate(shares)})
        counts["weight_version"] = max(
            (w.figures.counts.get("weight_version", 0) for w in self._workers), default=0
        )
        whys = {why for why, _ in prefills}
        return with_cache_shares(counts, {why: (prefills[why, 0], prefills[why, 1]) for why in whys})

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
        evaluation: bool = False,
    ) -> Segment:
        found: Segment = await self._ask(
            self._pin if evaluation else None,
            "probe",
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            stop_texts=tuple(stop_texts),
            evaluation=evaluation,
        )
        return found

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        found: list[float] = await self._ask(None, "prompt_logprobs", ids=ids)
        return found

    async def _ask(self, worker: WorkerProcess | None, call: str, **arguments: Any) -> Any:
        """One of them, and another one when it dies."""
        while True:
            asked = worker or min(self._workers, key=lambda w: (not w.serving, w.asked))
            try:
                return await asked.call(call, **arguments)
            except WorkerGone:
                if worker is not None:
                    raise

    def pin(self) -> bool:
        """See Router.pin: in a worker that has two engines that serve."""
        able = [w for w in self._workers if w.serving >= 2]
        if self._pin is not None or not able:
            return False
        self._pin = max(able, key=lambda w: w.serving)
        self._post("pin", [self._pin])
        return True

    def unpin(self) -> None:
        """The engine serves again. Without a pin: nothing."""
        if self._pin is not None:
            worker, self._pin = self._pin, None
            self._post("unpin", [worker])
