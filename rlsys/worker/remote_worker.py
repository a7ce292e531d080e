"""RemoteWorker: a rollout worker in its own process (`rollout.workers` > 1), and the samples that it runs.

The coordinator holds the row and the pieces of each running sample; only the process holds its tokens. A process
that dies is restarted. Its unreported tokens are lost as in a crash, its samples continue from their rows, and its
engines get the weights in a separate push.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlsys.config import Config
from rlsys.core.errors import RunError
from rlsys.core.types import Prompt, Sample, Status, TokenSequence
from rlsys.engine.client import EngineClient
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
    WorkerStatus,
    pack,
    unpack,
)
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.scoring import Verdict
from rlsys.worker.worker_calls import WorkerGone
from rlsys.worker.worker_process import WorkerProcess

MAX_DEATHS = 5
"""The run stops after this number of deaths of a worker without a token or a reward in between."""
POLL_SECONDS = 1.0
log = logging.getLogger("rlsys.rollout")


@dataclass
class RunningSample:
    """A sample that the process runs. `finished` is done when generation has ended, `verdict` with the reward."""

    sample: Sample
    prompt: Prompt
    finished: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    verdict: asyncio.Future[Verdict] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: BaseException) -> None:
        """Raise the error in the callers that wait for the sample."""
        for future in (self.finished, self.verdict):
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark as retrieved: possibly no task waits for it


class RemoteWorker(WorkerProcess):
    """Owns a worker process, its supervision, and the samples that it runs.

    DirectWorker has the same public methods.
    """

    def __init__(self, config: Config, number: int, command: Sequence[str]) -> None:
        super().__init__(number, command, self._on_sample_messages)
        self._stall_timeout = config.rollout.stall_timeout
        self._running: dict[int, RunningSample] = {}
        self._groups: Counter[int] = Counter()
        """Group id -> number of its samples in this worker."""
        self._posts: set[asyncio.Task[Any]] = set()
        self._supervision: asyncio.Task[None] | None = None
        self._buffer: RolloutBuffer
        self._commits: CommitScheduler
        self._spans: SampleSpans
        self._engine_state: Callable[[], dict[str, Any]]
        self._on_death: Callable[[WorkerStatus, int], None]
        self._fail: Callable[[BaseException], None]

    async def open(
        self,
        buffer: RolloutBuffer,
        engine_state: Callable[[], dict[str, Any]],
        on_death: Callable[[WorkerStatus, int], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Start the process.

        Args:
            engine_state: returns the arguments of Worker.do_begin about engines. It is called for each process, also
                for one that replaces a dead one.
            on_death: called when a process has died, with its last status and the number of tokens that it
                reported.
            fail: called with an error for which no caller waits.

        Raises:
            RunError: the process did not start.
        """
        self._buffer, self._engine_state = buffer, engine_state
        self._on_death, self._fail = on_death, fail
        await self._begin()
        self._supervision = asyncio.create_task(self._supervise(), name=self.name)

    async def _begin(self) -> None:
        await self.start(
            self._buffer.new_writer(), version=self._buffer.versions.newest, **self._engine_state()
        )

    def attach(self, buffer: RolloutBuffer, commits: CommitScheduler, spans: SampleSpans) -> None:
        """See Workers.attach."""
        self._commits, self._spans = commits, spans

    async def close(self) -> None:
        """Stop the process. Call it after an interrupt."""
        if self._supervision is not None:
            self._supervision.cancel()
        await super().close()

    def fail_all(self, error: str) -> None:
        """Raise this error in every call and every sample, because the process will not be restarted."""
        super().fail_all(error)
        for run in self._running.values():
            run.fail(RunError(error))

    # Messages

    def _on_sample_messages(self, messages: list[SampleMessage]) -> None:
        rows = [m for m in messages if isinstance(m, SampleRow)]
        if rows:
            self._save_rows(rows)
        for message in messages:
            if isinstance(message, Failure):
                self._on_failure(message)
            elif isinstance(message, SampleVerdict):
                run = self._running.get(message.sample_id)
                if run is not None and not run.verdict.done():
                    self.deaths = 0
                    run.verdict.set_result(message.verdict)

    def _save_rows(self, rows: list[SampleRow]) -> None:
        """Save the rows, then wake the callers that wait for the end of generation."""
        tokens_before = self._buffer.added_tokens
        self._buffer.save_from_workers(self._updates(rows))
        if new_tokens := self._buffer.added_tokens - tokens_before:
            self.reported_tokens += new_tokens
            self.deaths = 0
        self._commits.flush_soon()
        for row in rows:
            run = self._running.get(row.sample_id)
            if row.done and run is not None and not run.finished.done():
                run.finished.set_result(None)

    def _updates(self, rows: list[SampleRow]) -> Iterator[WorkerUpdate]:
        """Apply rows to their samples, and yield the updates. A sample may occur several times."""
        for row in rows:
            run = self._running.get(row.sample_id)
            if run is None:
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

    # Supervision

    async def watch(self) -> None:
        """Wait until the supervision, which `open` starts, has failed.

        Raises:
            RunError: always, with the error of the supervision.
        """
        assert self._supervision is not None
        await self._supervision
        raise RunError(self.error or "")

    async def _supervise(self) -> None:
        """Restart the process whenever it dies; kill it after rollout.stall_timeout without a message."""
        try:
            while True:
                if await self.wait_gone(POLL_SECONDS):
                    await self._replace()
                elif time.monotonic() - self.last_message_at > self._stall_timeout:
                    log.warning(
                        "%s: no message for rollout.stall_timeout = %g s; its process is killed",
                        self.name,
                        self._stall_timeout,
                    )
                    self.kill()
        except RunError as e:
            self._fail(e)

    async def _replace(self) -> None:
        """Restart a dead process.

        Raises:
            RunError: the worker died MAX_DEATHS times in a row.
        """
        code = await self.reap()
        log.warning(
            "%s: exited, %s; %d samples continue from their saved tokens",
            self.name,
            describe_exit(code),
            len(self._running),
        )
        self._buffer.retire(self.writer)
        self._on_death(self.take_status(), self.reported_tokens)
        while True:
            self.deaths += 1
            if self.deaths >= MAX_DEATHS:
                raise RunError(
                    f"{self.name} died {self.deaths} times without a token or a reward in between; see its log"
                )
            try:
                await self._begin()
            except RunError as e:
                log.warning("%s", e)
            else:
                break
        for run in self._running.values():
            if not run.verdict.done():
                self._send_sample(run)

    # Samples

    def load(self, group_id: int) -> tuple[float, ...]:
        """Return a sort key; a new sample of the group runs in the worker with the smallest key.

        A worker that runs other samples of the group has the smallest key, because the samples share a prefix. The
        others are sorted by their number of samples per serving engine; those without one are last.
        """
        if group_id in self._groups:
            return (-1.0,)
        return float(not self.serving), self._groups.total() / max(1, self.serving)

    async def generate(self, sample: Sample, prompt: Prompt) -> None:
        """See Streams.generate."""
        run = self._run(sample, prompt)
        sample.status = Status.IN_FLIGHT
        try:
            await run.finished
        except BaseException:
            self._cancel(run)
            raise
        if sample.status is Status.CENSORED:
            self._drop(run)

    async def score(self, sample: Sample, prompt: Prompt) -> Verdict:
        """See Streams.score."""
        run = self._running.get(sample.sample_id) or self._run(sample, prompt)
        try:
            verdict = await run.verdict
        except BaseException:
            self._cancel(run)
            raise
        self._drop(run)
        return verdict

    def _run(self, sample: Sample, prompt: Prompt) -> RunningSample:
        if self.error is not None:
            raise RunError(self.error)
        run = self._running[sample.sample_id] = RunningSample(sample, prompt)
        self._groups[sample.group_id] += 1
        self._send_sample(run)
        return run

    def _send_sample(self, run: RunningSample) -> None:
        sample = run.sample
        group = self._buffer.groups[sample.group_id].samples
        tree_samples = len(group) if self.grows_trees and not any(s.status.terminal for s in group) else 0
        self.send(
            RunSample(sample.sample_id, pack(replace(sample, behaviour=[])), pack(run.prompt), tree_samples)
        )

    def _cancel(self, run: RunningSample) -> None:
        """Cancel a sample for which no caller waits."""
        self._drop(run)
        self.send(CancelSamples([run.sample.sample_id]))
        if not run.sample.status.terminal:
            run.sample.status = Status.PARKED

    def _drop(self, run: RunningSample) -> None:
        if self._running.get(run.sample.sample_id) is run:
            del self._running[run.sample.sample_id]
        group_id = run.sample.group_id
        self._groups[group_id] -= 1
        if not self._groups[group_id]:
            del self._groups[group_id]

    async def interrupt(
        self, keep: Callable[[TokenSequence], bool] | None, *, keep_serving: bool, wait_for_max_resumes: bool
    ) -> list[TokenSequence]:
        """Interrupt all samples of this worker. If the process dies meanwhile, all of them are parked.

        Args:
            keep: see Router.interrupt.
            keep_serving: see Router.interrupt.
            wait_for_max_resumes: first wait until no sample of this worker is at rollout.max_resumes.

        Returns:
            the sequences that were in an engine and are parked now.
        """
        live = [r.sample for r in self._running.values() if not r.finished.done()]
        kept_ids = None if keep is None else frozenset(s.sample_id for s in live if keep(s))
        parked: list[tuple[int, int]] = []
        with contextlib.suppress(WorkerGone):
            parked = await self.call(
                "interrupt",
                keep=kept_ids,
                keep_serving=keep_serving,
                wait_for_max_resumes=wait_for_max_resumes,
            )
        for sample in live:
            if not sample.status.terminal and (kept_ids is None or sample.sample_id not in kept_ids):
                sample.status = Status.PARKED
        return [self._running[i].sample.sequences[n] for i, n in parked if i in self._running]

    async def save_running(self) -> None:
        """See Streams.save_running."""
        await self.call("save")

    # Engines

    def _post(self, call: str, **arguments: Any) -> None:
        """Call the process without waiting for the result. If the process dies, the call is dropped."""
        task = asyncio.create_task(self.call(call, **arguments))
        self._posts.add(task)
        task.add_done_callback(self._on_post_done)

    def _on_post_done(self, task: asyncio.Task[Any]) -> None:
        self._posts.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, WorkerGone):
            self._fail(error)

    def resume(self) -> None:
        """See Router.resume. Running samples count as in flight from now on."""
        for run in self._running.values():
            if not run.finished.done() and not run.sample.status.terminal:
                run.sample.status = Status.IN_FLIGHT
        self._post("resume")

    def advance(self, trained_steps: int) -> None:
        """See Streams.advance."""
        self._post("advance", trained_steps=trained_steps)

    def add_engine(self, client: EngineClient) -> None:
        """See Router.add_engine. The process creates its own client."""
        self._post("add_engine", url=client.url, tp=client.tp, pool=client.pool)

    def pin(self) -> bool:
        """See Router.pin."""
        if self.serving < 2:
            return False
        self._post("pin")
        return True

    def unpin(self) -> None:
        """See Router.unpin."""
        self._post("unpin")
