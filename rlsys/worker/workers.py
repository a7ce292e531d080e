"""Workers: several rollout workers (`rollout.workers`) behind the interface of Streams.

worker_engines.py has their engines. Each worker (worker.py) has engines of its own. The coordinator holds the
row and the pieces of each running sample; only the worker holds its tokens. A worker that dies is restarted:
unreported tokens are lost as in a crash, its samples continue from their rows, and its engines get the weights
in a separate push.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlsys.config import Config
from rlsys.core.errors import RunError
from rlsys.core.imports import module_command
from rlsys.core.run_files import CONFIG_FILE
from rlsys.core.types import Prompt, Sample, Status
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.commit_scheduler import CommitScheduler
from rlsys.ledger.sample_rows import WorkerUpdate
from rlsys.obs.role import describe_exit
from rlsys.worker.link import (
    CancelSamples,
    Failure,
    RunSample,
    SampleMessage,
    SampleRow,
    SampleVerdict,
    pack,
    unpack,
)
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.scoring import RewardParts, Verdict
from rlsys.worker.worker_engines import WorkerEngines
from rlsys.worker.worker_process import WorkerProcess

MAX_DEATHS = 5
"""Deaths of a worker in a row, without a token or a reward, that stop the run."""
POLL_SECONDS = 1.0
log = logging.getLogger("rlsys.rollout")


@dataclass
class RunningSample:
    """A sample that a worker runs."""

    sample: Sample
    prompt: Prompt
    worker: WorkerProcess
    finished: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    verdict: asyncio.Future[Verdict] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: BaseException) -> None:
        for future in (self.finished, self.verdict):
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark as retrieved: possibly no task waits for it


class Workers:
    """Owns the worker processes and the samples that they run. `commands` start them."""

    def __init__(self, config: Config, commands: Sequence[Sequence[str]]) -> None:
        self._config = config
        self.processes = [WorkerProcess(i, command, self._on_messages) for i, command in enumerate(commands)]
        self._running: dict[int, RunningSample] = {}
        self._worker_of: dict[int, WorkerProcess] = {}
        """Group with running samples -> its worker, since they share a prefix."""
        self._parts = RewardParts()
        self._watching: asyncio.Task[None] | None = None
        self._error: str | None = None
        self._failed: Callable[[BaseException], None] = lambda error: None
        self._buffer: RolloutBuffer
        self._commits: CommitScheduler
        self._spans: SampleSpans
        self.engines = WorkerEngines(config, self.processes, self._fail, self._resumed)

    async def start(self, buffer: RolloutBuffer) -> None:
        """Start all processes.

        Raises:
            RunError: one did not start.
        """
        self._buffer = buffer
        await asyncio.gather(*(self._begin(w) for w in self.processes))
        self._watching = asyncio.create_task(self._supervise(), name="workers")

    def attach(self, commits: CommitScheduler, spans: SampleSpans) -> None:
        """Set the objects that save samples and record their spans. Call before the first sample."""
        self._commits, self._spans = commits, spans
        self._failed = lambda error: commits.on_failure(error)

    async def _begin(self, worker: WorkerProcess) -> None:
        engines = self.engines
        await worker.start(
            self._buffer.new_writer(),
            version=self._buffer.versions.newest,
            opened=engines.open,
            joined_engines=engines.joined_engines(worker),
            trained_steps=engines.trained_steps,
        )

    async def close(self) -> None:
        """Stop all workers. Call after an interrupt."""
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(w.close() for w in self.processes))

    # Messages of workers

    def _on_messages(self, worker: WorkerProcess, messages: list[SampleMessage]) -> None:
        rows = [m for m in messages if isinstance(m, SampleRow)]
        if rows:
            tokens_before = self._buffer.added_tokens
            self._buffer.save_from_workers(self._updates(worker, rows))
            if new := self._buffer.added_tokens - tokens_before:
                worker.reported_tokens += new
                worker.deaths = 0
            self._commits.flush_soon()
        for row in rows:
            run = self._running.get(row.sample_id)
            if row.done and run is not None and run.worker is worker and not run.finished.done():
                run.finished.set_result(None)
        for message in messages:
            if isinstance(message, Failure):
                self._on_failure(message)
            elif isinstance(message, SampleVerdict):
                run = self._running.get(message.sample_id)
                if run is not None and not run.verdict.done():
                    worker.deaths = 0
                    run.verdict.set_result(self._parts.conform(message.verdict))

    def _updates(self, worker: WorkerProcess, rows: list[SampleRow]) -> Iterator[WorkerUpdate]:
        """Apply rows to their samples, one after the other; a sample may occur several times."""
        for row in rows:
            run = self._running.get(row.sample_id)
            if run is None or run.worker is not worker:
                continue
            tokens_before, fork = run.sample.all_tokens, run.sample.fork
            updates = row.apply_to(run.sample)
            if (new_fork := run.sample.fork) is not None and fork is None:
                source = self._buffer.groups[run.sample.group_id].samples[new_fork.source]
                run.sample.behaviour = source.behaviour[: new_fork.at]
            if run.sample.all_tokens > tokens_before:
                self._spans.on_tokens(run.sample)
            yield run.sample, updates
            if not row.done and not run.sample.status.terminal:
                run.sample.status = Status.IN_FLIGHT

    def _on_failure(self, message: Failure) -> None:
        error = unpack(message.error)
        if (run := self._running.get(message.sample_id)) is None:
            self._fail(error)
        else:
            run.fail(error)

    def _fail(self, error: BaseException) -> None:
        """Fail the run: no worker can be started, or the workers fail."""
        self._error = self._error or (str(error) or type(error).__name__)
        for worker in self.processes:
            worker.give_up(self._error)
        for run in self._running.values():
            run.fail(RunError(self._error))
        self._failed(RunError(self._error))

    # Supervision

    async def _supervise(self) -> None:
        try:
            await asyncio.gather(*(self._supervise_worker(w) for w in self.processes))
        except RunError as e:
            self._fail(e)

    async def _supervise_worker(self, worker: WorkerProcess) -> None:
        """Restart a worker that died. One that is silent for too long is killed first."""
        limit = self._config.rollout.stall_timeout
        while True:
            if await worker.wait_gone(POLL_SECONDS):
                await self._replace(worker)
            elif time.monotonic() - worker.last_message_at > limit:
                log.warning("%s: no message for rollout.stall_timeout = %g s; killing it", worker.name, limit)
                worker.kill()

    async def _replace(self, worker: WorkerProcess) -> None:
        """Restart a dead worker.

        Raises:
            RunError: it has died too often.
        """
        code, samples = await worker.reap(), sum(r.worker is worker for r in self._running.values())
        log.warning(
            "%s: exited, %s; %d samples continue from their saved tokens",
            worker.name,
            describe_exit(code),
            samples,
        )
        self._buffer.retire(worker.writer)
        self.engines.on_worker_death(worker)
        while True:
            worker.deaths += 1
            if worker.deaths >= MAX_DEATHS:
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
            if run.worker is worker and not run.verdict.done():
                self._send(run)

    async def watch(self) -> None:
        """Wait forever; raises the error of the supervision that `start` began."""
        assert self._watching is not None
        await self._watching
        if self._error is not None:
            raise RunError(self._error)

    # Samples: see Streams

    @property
    def counts(self) -> Mapping[str, int]:
        return self.engines.generated()

    @property
    def gang_start(self) -> bool:
        """See Streams.gang_start: a tree is grown in one worker."""
        return any(w.grows_trees for w in self.processes)

    async def generate(self, sample: Sample, prompt: Prompt) -> None:
        """See Streams.generate."""
        run = self._run(sample, prompt)
        sample.status = Status.IN_FLIGHT
        try:
            await run.finished
        except BaseException:
            self._forget(run)
            raise
        if sample.status is Status.CENSORED:
            self._drop(run)

    async def score(self, sample: Sample, prompt: Prompt) -> Verdict:
        """See Streams.score."""
        run = self._running.get(sample.sample_id) or self._run(sample, prompt)
        try:
            verdict = await run.verdict
        except BaseException:
            self._forget(run)
            raise
        self._drop(run)
        return verdict

    def _run(self, sample: Sample, prompt: Prompt) -> RunningSample:
        if self._error is not None:
            raise RunError(self._error)
        home = self._worker_of.get(sample.group_id) or self._least_loaded()
        self._worker_of[sample.group_id] = home
        run = self._running[sample.sample_id] = RunningSample(sample, prompt, home)
        home.groups[sample.group_id] += 1
        self._send(run)
        return run

    def _least_loaded(self) -> WorkerProcess:
        """Return the worker with the fewest samples per serving engine."""
        return min(self.processes, key=lambda w: (not w.serving, w.groups.total() / max(1, w.serving)))

    def _send(self, run: RunningSample) -> None:
        sample = run.sample
        group = self._buffer.groups[sample.group_id].samples
        tree_samples = len(group) if self.gang_start and not any(s.status.terminal for s in group) else 0
        run.worker.send(
            RunSample(sample.sample_id, pack(replace(sample, behaviour=[])), pack(run.prompt), tree_samples)
        )

    def _forget(self, run: RunningSample) -> None:
        """Cancel a sample that no caller waits for."""
        self._drop(run)
        run.worker.send(CancelSamples([run.sample.sample_id]))
        if not run.sample.status.terminal:
            run.sample.status = Status.PARKED

    def _drop(self, run: RunningSample) -> None:
        if self._running.get(run.sample.sample_id) is run:
            del self._running[run.sample.sample_id]
        group_id = run.sample.group_id
        run.worker.groups[group_id] -= 1
        if not run.worker.groups[group_id]:
            del run.worker.groups[group_id], self._worker_of[group_id]

    async def interrupt(
        self,
        keep: Callable[[Sample], bool] | None = None,
        *,
        keep_serving: bool = False,
        wait_for_max_resumes: bool = False,
    ) -> list[Sample]:
        """See Streams.interrupt."""
        self.engines.open = False
        live = [r.sample for r in self._running.values() if not r.finished.done()]
        kept_ids = None if keep is None else frozenset(s.sample_id for s in live if keep(s))
        answers = await self.engines.call_all(
            "interrupt", keep=kept_ids, keep_serving=keep_serving, wait_for_max_resumes=wait_for_max_resumes
        )
        parked = [key for of_worker in answers for key in of_worker]
        for sample in live:
            if not sample.status.terminal and (kept_ids is None or sample.sample_id not in kept_ids):
                sample.status = Status.PARKED
        return [self._running[i].sample.sequences[n] for i, n in parked if i in self._running]

    def _resumed(self) -> None:
        """Mark running samples as in flight: they may be in engines again."""
        for run in self._running.values():
            if not run.finished.done() and not run.sample.status.terminal:
                run.sample.status = Status.IN_FLIGHT

    def advance(self, trained_steps: int) -> None:
        """See Streams.advance."""
        self.engines.advance(trained_steps)

    def at_max_resumes(self) -> list[str]:
        """See Streams.at_max_resumes; up to half a second old."""
        return [url for w in self.processes for url in w.status.at_max_resumes]

    async def save_running(self) -> None:
        """See Streams.save_running."""
        await self.engines.call_all("save")


def worker_commands(config: Config, urls: Sequence[str]) -> list[list[str]]:
    """Return the commands that start the workers of a run. `urls`: all engines."""
    engines = [argument for url in urls for argument in ("--engine", url)]
    module = module_command("rlsys.worker.worker", "--config", str(config.run.dir / CONFIG_FILE))
    return [[*module, "--number", str(i), *engines] for i in range(config.rollout.workers)]
