"""Several rollout workers (`rollout.workers`), seen by the coordinator as `Streams`; worker_engines.py has their
engines.

Each worker (worker.py) has engines of its own. The coordinator has each running sample as its row and its pieces;
only the worker has the tokens in hand. A worker that dies is started again: what it had not told is as after a crash,
its samples go on from their rows, and its engines get the weights in a push of their own.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlsys.config import Config
from rlsys.core.errors import RunError
from rlsys.core.run_files import CONFIG_FILE
from rlsys.core.types import Prompt, Sample, Status
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.commits import Commits
from rlsys.ledger.sample_rows import Told
from rlsys.obs.role import describe_exit
from rlsys.worker.link import Failed, Forget, Judged, OfSamples, Row, Run, pack, unpack
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.scoring import SameParts, Verdict
from rlsys.worker.worker_engines import WorkerEngines
from rlsys.worker.worker_process import WorkerProcess

MOST_DEATHS = 5
"""Deaths of a worker in a row, without a token or a reward of it in between, that stop the run."""
LOOK_SECONDS = 1.0
log = logging.getLogger("rlsys.rollout")


@dataclass
class Running:
    """A sample that a worker has."""

    sample: Sample
    prompt: Prompt
    home: WorkerProcess
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    verdict: asyncio.Future[Verdict] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def break_off(self, error: BaseException) -> None:
        for waiting in (self.ended, self.verdict):
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # nobody may be waiting for it yet


class Workers:
    """Owns the processes and what they run. `commands`: how each is started."""

    def __init__(self, config: Config, commands: Sequence[Sequence[str]]) -> None:
        self._config = config
        self.processes = [WorkerProcess(i, command, self._hear) for i, command in enumerate(commands)]
        self._running: dict[int, Running] = {}
        self._homes: dict[int, WorkerProcess] = {}
        """Of groups with running samples: they share a prefix."""
        self._parts = SameParts()
        self._watching: asyncio.Task[None] | None = None
        self._error: str | None = None
        self._failed: Callable[[BaseException], None] = lambda error: None
        self._buffer: RolloutBuffer
        self._commits: Commits
        self._spans: SampleSpans
        self.engines = WorkerEngines(config, self.processes, self._fail, self._resumed)

    async def start(self, buffer: RolloutBuffer) -> None:
        """Their processes. Raises RunError for one that does not come up."""
        self._buffer = buffer
        await asyncio.gather(*(self._begin(w) for w in self.processes))
        self._watching = asyncio.create_task(self._look_after(), name="workers")

    def attach(self, commits: Commits, spans: SampleSpans) -> None:
        """Before the first sample: what saves them, and is told of them."""
        self._commits, self._spans = commits, spans
        self._failed = lambda error: commits.failed(error)

    async def _begin(self, worker: WorkerProcess) -> None:
        engines = self.engines
        await worker.start(
            self._buffer.new_writer(),
            version=self._buffer.versions.newest,
            opened=engines.open,
            joined=engines.joined(worker),
            trained_steps=engines.trained_steps,
        )

    async def close(self) -> None:
        """After an interrupt: nothing that they have is wanted any more."""
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(w.close() for w in self.processes))

    # What workers say

    def _hear(self, worker: WorkerProcess, messages: list[OfSamples]) -> None:
        rows = [m for m in messages if isinstance(m, Row)]
        if rows:
            before = self._buffer.added_tokens
            self._buffer.save_told(self._told(worker, rows))
            if new := self._buffer.added_tokens - before:
                worker.told += new
                worker.deaths = 0
            self._commits.flush_soon()
        for row in rows:
            run = self._running.get(row.sample_id)
            if row.done and run is not None and run.home is worker and not run.ended.done():
                run.ended.set_result(None)
        for message in messages:
            if isinstance(message, Failed):
                self._hear_failure(message)
            elif isinstance(message, Judged):
                run = self._running.get(message.sample_id)
                if run is not None and not run.verdict.done():
                    worker.deaths = 0
                    run.verdict.set_result(self._parts.held_to(message.verdict))

    def _told(self, worker: WorkerProcess, rows: list[Row]) -> Iterator[Told]:
        """Samples as these rows say, one after the other: a sample may be there twice."""
        for row in rows:
            run = self._running.get(row.sample_id)
            if run is None or run.home is not worker:
                continue
            grown, fork = run.sample.all_tokens, run.sample.fork
            told = row.tell_sample(run.sample)
            if (begun := run.sample.fork) is not None and fork is None:
                source = self._buffer.groups[run.sample.group_id].samples[begun.source]
                run.sample.behaviour = source.behaviour[: begun.at]
            if run.sample.all_tokens > grown:
                self._spans.heard(run.sample)
            yield run.sample, told
            if not row.done and not run.sample.status.terminal:
                run.sample.status = Status.IN_FLIGHT

    def _hear_failure(self, message: Failed) -> None:
        error = unpack(message.error)
        if (run := self._running.get(message.sample_id)) is None:
            self._fail(error)
        else:
            run.break_off(error)

    def _fail(self, error: BaseException) -> None:
        """No worker is to be had, or none that works."""
        self._error = self._error or (str(error) or type(error).__name__)
        for worker in self.processes:
            worker.give_up(self._error)
        for run in self._running.values():
            run.break_off(RunError(self._error))
        self._failed(RunError(self._error))

    # Their lives

    async def _look_after(self) -> None:
        try:
            await asyncio.gather(*(self._look_after_one(w) for w in self.processes))
        except RunError as e:
            self._fail(e)

    async def _look_after_one(self, worker: WorkerProcess) -> None:
        """Starts it again when it is gone. One that is silent for too long is ended first."""
        limit = self._config.rollout.stall_timeout
        while True:
            if await worker.gone(LOOK_SECONDS):
                await self._replace(worker)
            elif time.monotonic() - worker.heard_at > limit:
                log.warning("%s: silent for rollout.stall_timeout = %g s, it is ended", worker.name, limit)
                worker.kill()

    async def _replace(self, worker: WorkerProcess) -> None:
        """Raises RunError when it has died too often."""
        code, samples = await worker.reap(), sum(r.home is worker for r in self._running.values())
        log.warning(
            "%s: gone, %s; %d samples go on from what was saved", worker.name, describe_exit(code), samples
        )
        self._buffer.retire(worker.writer)
        self.engines.mourn(worker)
        while True:
            worker.deaths += 1
            if worker.deaths >= MOST_DEATHS:
                raise RunError(
                    f"{worker.name} died {worker.deaths} times without a token or a reward in between"
                )
            try:
                await self._begin(worker)
            except RunError as e:
                log.warning("%s", e)
            else:
                break
        for run in self._running.values():
            if run.home is worker and not run.verdict.done():
                self._send(run)

    async def watch(self) -> None:
        """For the life of the process: `start` has begun to look after them."""
        assert self._watching is not None
        await self._watching
        if self._error is not None:
            raise RunError(self._error)

    # Samples: see Streams

    @property
    def counts(self) -> Mapping[str, int]:
        return self.engines.generated()

    @property
    def together(self) -> bool:
        """See Streams.together: a tree grows where all of its group are."""
        return any(w.grows_trees for w in self.processes)

    async def generate(self, sample: Sample, prompt: Prompt) -> None:
        """Until the sample is terminal, and saved. An interrupt parks it inside this call. Cancel it after an
        interrupt only."""
        run = self._run(sample, prompt)
        sample.status = Status.IN_FLIGHT
        try:
            await run.ended
        except BaseException:
            self._forget(run)
            raise
        if sample.status is Status.CENSORED:
            self._drop(run)

    async def score(self, sample: Sample, prompt: Prompt) -> Verdict:
        """The reward of a terminal sample, or the reason why it has none."""
        run = self._running.get(sample.sample_id) or self._run(sample, prompt)
        try:
            verdict = await run.verdict
        except BaseException:
            self._forget(run)
            raise
        self._drop(run)
        return verdict

    def _run(self, sample: Sample, prompt: Prompt) -> Running:
        if self._error is not None:
            raise RunError(self._error)
        home = self._homes.get(sample.group_id) or self._free()
        self._homes[sample.group_id] = home
        run = self._running[sample.sample_id] = Running(sample, prompt, home)
        home.groups[sample.group_id] += 1
        self._send(run)
        return run

    def _free(self) -> WorkerProcess:
        """The worker with the fewest samples for each of its engines that serve."""
        return min(self.processes, key=lambda w: (not w.serving, w.groups.total() / max(1, w.serving)))

    def _send(self, run: Running) -> None:
        sample = run.sample
        group = self._buffer.groups[sample.group_id].samples
        together = len(group) if self.together and not any(s.status.terminal for s in group) else 0
        run.home.send(Run(sample.sample_id, pack(replace(sample, behaviour=[])), pack(run.prompt), together))

    def _forget(self, run: Running) -> None:
        """Nobody waits for it any more."""
        self._drop(run)
        run.home.send(Forget([run.sample.sample_id]))
        if not run.sample.status.terminal:
            run.sample.status = Status.PARKED

    def _drop(self, run: Running) -> None:
        if self._running.get(run.sample.sample_id) is run:
            del self._running[run.sample.sample_id]
        group_id = run.sample.group_id
        run.home.groups[group_id] -= 1
        if not run.home.groups[group_id]:
            del run.home.groups[group_id], self._homes[group_id]

    async def interrupt(
        self,
        keep: Callable[[Sample], bool] | None = None,
        *,
        going_on: bool = False,
        gently: bool = False,
    ) -> list[Sample]:
        """See Streams.interrupt."""
        self.engines.open = False
        live = [r.sample for r in self._running.values() if not r.ended.done()]
        kept = None if keep is None else frozenset(s.sample_id for s in live if keep(s))
        answers = await self.engines.all("interrupt", keep=kept, going_on=going_on, gently=gently)
        parked = [place for of_worker in answers for place in of_worker]
        for sample in live:
            if not sample.status.terminal and (kept is None or sample.sample_id not in kept):
                sample.status = Status.PARKED
        return [self._running[i].sample.sequences[n] for i, n in parked if i in self._running]

    def _resumed(self) -> None:
        """What workers have may be in engines again."""
        for run in self._running.values():
            if not run.ended.done() and not run.sample.status.terminal:
                run.sample.status = Status.IN_FLIGHT

    def go(self, trained_steps: int) -> None:
        """See Streams.go."""
        self.engines.go(trained_steps)

    def full(self) -> list[str]:
        """See Streams.full; as of half a second ago."""
        return [url for w in self.processes for url in w.figures.full]

    async def save_running(self) -> None:
        """With all tokens that they have got so far."""
        await self.engines.all("save")


def worker_commands(config: Config, urls: Sequence[str]) -> list[list[str]]:
    """How each worker of a run is started. `urls`: all engines."""
    engines = [word for url in urls for word in ("--engine", url)]
    module = [sys.executable, "-m", "rlsys.worker.worker", "--config", str(config.run.dir / CONFIG_FILE)]
    return [[*module, "--number", str(i), *engines] for i in range(config.rollout.workers)]
