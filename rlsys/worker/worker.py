"""Rollout worker: a process with its own engines, their samples and rewards (`rollout.workers`).

    python -m rlsys.worker.worker --config RUN/config.yaml --number I --engine URL ...

The coordinator, which is the rollout process, starts a worker with a socket as standard input. The worker writes
tokens to its own segments and reports their location to the coordinator, which commits them. If the worker is
killed, the coordinator drops the bytes that were not reported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.config import Config, load_config
from rlsys.config.slots import most_slots
from rlsys.core.descriptors import raise_descriptors
from rlsys.core.errors import RlsysError
from rlsys.core.identity import engine_identity
from rlsys.core.owner import owner_of_process
from rlsys.core.types import Prompt, Sample, Status, TokenSequence
from rlsys.data import Tokenizer
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.engine_requests import Limits
from rlsys.ledger.commit_scheduler import FlushScheduler
from rlsys.ledger.sample_rows import NewTokens, StoredLengths, append_tokens, mutable_fields
from rlsys.ledger.segments import SegmentFile
from rlsys.obs.role import STACKS_VARIABLE, run_role
from rlsys.rewards import Rewards
from rlsys.router.router import RefusedPrompt, Router
from rlsys.segments.records import SegmentReader
from rlsys.worker.assembly import build_router, build_scorer, client_maker
from rlsys.worker.link import (
    Call,
    CallResult,
    CancelSamples,
    Failure,
    JoinedEngine,
    Link,
    LiveStatus,
    RunSample,
    SampleRow,
    SampleVerdict,
    ToWorker,
    call_method,
    pack,
    sample_row,
    unpack,
)
from rlsys.worker.loop_watch import loop_watch
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.scoring import Scorer
from rlsys.worker.streams import build_streams
from rlsys.worker.worker_groups import WorkerGroups

BATCH_SECONDS = 0.02
"""Longest delay of a row, and so of the reuse of a finished sample's slot."""
STATUS_SECONDS = 0.5

log = logging.getLogger("rlsys.rollout")


@dataclass
class WorkerParts:
    """Dependencies of a worker.

    Args:
        tokenizer: required by generators with several turns.
        client: creates the client of a joined engine from its URL, number of ranks and pool.
    """

    config: Config
    router: Router
    scorer: Scorer
    tokenizer: Tokenizer | None
    client: Callable[[str, int, str | None], EngineClient]


class Worker(FlushScheduler):
    """A rollout worker process. Owns the tasks of its samples, their tokens in memory, and its segments."""

    def __init__(self, parts: WorkerParts, end: Callable[[], None]) -> None:
        """Create a worker.

        Args:
            end: called when the coordinator has ended.
        """
        super().__init__(
            self._write_out, BATCH_SECONDS, lambda error: self._link.send(Failure(-1, pack(error)))
        )
        self._parts = parts
        self._router = parts.router
        self._scorer = parts.scorer
        self._groups = WorkerGroups()
        self._streams = build_streams(
            parts.config, parts.router, parts.scorer, parts.tokenizer, self, self._groups.group_of, SampleSpans(None),
            self._groups.complete,
        )  # fmt: skip
        self._status = LiveStatus(parts.router, self._streams)
        self._folder = parts.config.run.dir
        self._link = Link(ToWorker, self._on_messages, end)
        self._file: SegmentFile | None = None
        self._stored_lengths: dict[int, list[StoredLengths]] = {}
        """Sample id -> lengths in segments, by number of the sequence."""
        self._reported_fields: dict[tuple[int, int], object] = {}
        """(sample id, sequence) -> fields known to the coordinator, for later sequences."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Sample id -> task that runs the sample."""
        self._cancelling: set[asyncio.Task[None]] = set()
        """Tasks of samples that were cancelled, but have not ended yet."""
        self._calls: set[asyncio.Task[None]] = set()
        self._rows: list[SampleRow] = []
        """Rows to send with the next flush."""

    async def serve(self, end: socket.socket) -> None:
        """Serve the coordinator forever."""
        await self._link.open(end)
        gc.freeze()  # permanent objects: exclude them from full collections
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            self._send_status()

    def _send_status(self) -> None:
        scorer = self._scorer
        rewards = {"reward_hung": scorer.timeouts, "reward_failed": scorer.failures}
        self._link.send(self._status.report(rewards))

    # Messages of the coordinator

    def _on_messages(self, messages: list[ToWorker]) -> None:
        for message in messages:
            self._handle(message)

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, RunSample):
            work = self._run(unpack(message.sample), unpack(message.prompt), message.tree_samples)
            task = self._tasks[message.sample_id] = asyncio.create_task(work)
            task.add_done_callback(lambda t: self._on_task_done(message.sample_id, t))
        elif isinstance(message, CancelSamples):
            for sample_id in message.sample_ids:
                if (sample_task := self._tasks.get(sample_id)) is not None:
                    sample_task.cancel()
                    self._cancelling.add(sample_task)
                    sample_task.add_done_callback(self._cancelling.discard)
        else:
            task = asyncio.create_task(self._answer(message))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _answer(self, call: Call) -> None:
        """Execute a call and send its result, or the exception that the coordinator will raise."""
        result, error = b"", b""
        own_method = f"do_{call.name}"
        if hasattr(self, own_method):
            work = call_method(self, own_method, unpack(call.arguments))
        else:
            work = call_method(self._router, call.name, unpack(call.arguments))
        outcome: Any = (await asyncio.gather(work, return_exceptions=True))[0]
        if isinstance(outcome, Exception):
            if not isinstance(outcome, RlsysError | RefusedPrompt):
                log.error("call of %s failed", call.name, exc_info=outcome)
            error = pack(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            result = pack(outcome)
        try:
            if self._file is not None:
                self._streams.save_unsaved()  # the status counts tokens that arrived during the call
            self.flush()
        except RlsysError as e:  # a full disk: without an answer the coordinator would wait forever
            error = pack(e)
        self._send_status()
        self._link.send(CallResult(call.number, result, error))

    async def do_begin(
        self, writer: str, version: int, opened: bool, joined_engines: list[JoinedEngine], trained_steps: int
    ) -> tuple[list[str], bool, Limits]:
        """Start to serve samples.

        Args:
            writer: name for this worker's segments.
            version: expected weight version of the engines; 0: unknown.
            opened: whether samples may go to engines.
            joined_engines: engines to add.
            trained_steps: number of train steps in the engines' weights.

        Returns:
            URLs of the engines on the command line, whether the generator grows trees, and the limits of prompts.
        """
        launch_engines = list(self._router.engine_states())
        self._file = SegmentFile(self._folder, writer)
        if version:
            self._router.set_expected_version(version)
        for engine in joined_engines:
            await self.do_add_engine(*engine)
        self._streams.advance(trained_steps)
        if opened:
            self._router.resume()
        self._calls.add(asyncio.create_task(self._router.watch()))
        return launch_engines, self._streams.grows_trees, self._router.limits

    async def do_interrupt(
        self, keep: frozenset[int] | None, keep_serving: bool, wait_for_max_resumes: bool
    ) -> list[tuple[int, int]]:
        """Interrupt all samples, see Streams.interrupt.

        Args:
            keep: ids of the samples that stay in their engines; None: no sample stays.
            wait_for_max_resumes: first wait until no sample is at rollout.max_resumes.

        Returns:
            (sample id, sequence) of the sequences that were parked.
        """
        keep_sample = None if keep is None else lambda sample: sample.sample_id in keep
        if wait_for_max_resumes:
            await self._streams.wait_until_interruptible()
        parked = await self._streams.interrupt(keep_sample, keep_serving=keep_serving)
        return [(q.sample_id, q.sequence) for q in parked]

    async def do_save(self) -> None:
        """See Streams.save_running."""
        await self._streams.save_running()

    async def do_advance(self, trained_steps: int) -> None:
        """See Streams.advance."""
        self._streams.advance(trained_steps)

    async def do_add_engine(self, url: str, tp: int, pool: str | None) -> None:
        """See Router.add_engine."""
        self._router.add_engine(self._parts.client(url, tp, pool))

    async def do_begin_push(self, version: int, only_stale: bool, members: Collection[str]) -> Any:
        """Wait until no sample in `members` is at rollout.max_resumes, then see Router.begin_push."""
        if members:
            await self._streams.wait_until_interruptible(members)
        return await self._router.begin_push(version, only_stale=only_stale, members=members)

    # Samples

    async def _run(self, sample: Sample, prompt: Prompt, tree_samples: int) -> None:
        """Run a sample until it has a reward or is censored. The arguments are those of RunSample."""
        if self._cancelling:  # an earlier task of this sample or of its group may still be ending
            await asyncio.wait(set(self._cancelling))
        with SegmentReader(self._folder) as reader:
            sample = reader.load(sample)
        self._stored_lengths[sample.sample_id] = [StoredLengths.of(q) for q in sample.sequences]
        self._reported_fields |= {
            (q.sample_id, q.sequence): mutable_fields(q) for q in sample.extra_sequences
        }
        self._groups.add(sample, prompt.index, tree_samples)
        try:
            if sample.status.terminal:
                self._rows.append(sample_row(sample, True, ([], [], False), {}))
                self.flush_soon()
            else:
                await self._streams.generate(sample, prompt)
            if sample.status is not Status.CENSORED:
                self._link.send(SampleVerdict(sample.sample_id, await self._streams.score(sample, prompt)))
        finally:
            self._stored_lengths.pop(sample.sample_id, None)
            for q in sample.extra_sequences:
                self._reported_fields.pop((q.sample_id, q.sequence), None)
            self._groups.remove(sample)

    def _on_task_done(self, sample_id: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(sample_id) is task:
            del self._tasks[sample_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, RlsysError):
                log.error("sample %d failed", sample_id, exc_info=error)
            self._link.send(Failure(sample_id, pack(error)))

    # SampleStore of Streams

    def save(self, samples: Iterable[Sample]) -> None:
        """Append unsaved tokens to the segment file, and queue the rows of the samples."""
        assert self._file is not None, "the coordinator calls `begin` first"
        for sample in samples:
            later = {}
            for q in sample.extra_sequences:
                key, fields = (q.sample_id, q.sequence), mutable_fields(q)
                if self._reported_fields.get(key) != fields:
                    later[q.sequence] = self._write_new(self._file, q)
                    self._reported_fields[key] = fields
            first = self._write_new(self._file, sample)
            self._rows.append(sample_row(sample, not self._streams.runs(sample), first, later))

    def _write_new(self, file: SegmentFile, sequence: TokenSequence) -> NewTokens:
        """Append the unsaved part of a sequence to the file, and return the location of its new tokens."""
        lengths = self._stored_lengths[sequence.sample_id]
        if sequence.sequence == len(lengths):
            lengths.append(StoredLengths())
        previous = lengths[sequence.sequence]
        rewritten = sequence.tokens < previous.tokens
        if rewritten:
            previous = StoredLengths()
        new_routes = sequence.routes[previous.routes :]
        routes_in_files = [span for span in new_routes if span.location is not None]
        routes_in_memory = [span for span in new_routes if span.location is None]
        pieces = append_tokens(file, sequence, previous, routes_in_memory)
        lengths[sequence.sequence] = StoredLengths.of(sequence)
        return pieces, routes_in_files, rewritten

    def unsaved(self, sample: Sample) -> bool:
        """Return whether the sample has tokens that are not saved."""
        return sample.all_tokens > sum(lengths.tokens for lengths in self._stored_lengths[sample.sample_id])

    def _write_out(self) -> None:
        """Write tokens to segments and send the rows."""
        if self._file is not None:
            self._file.write_out()
        for row in self._rows:
            self._link.send(row)
        self._rows.clear()


async def serve(config: Config, number: int, urls: list[str], end: socket.socket) -> None:
    """Run a worker until the coordinator ends.

    Args:
        number: index of the worker, from 0.
        urls: URLs of all engines of the launch; the worker uses each `rollout.workers`-th from `number` on.
        end: the worker's end of the socket pair.

    Raises:
        UserError: the config is invalid.
    """
    raise_descriptors(most_slots(config), "rollout worker: over_provision x groups_per_step x group_size")
    owner, _ = owner_of_process(config.run.dir)
    tokenizer = Tokenizer.of(config)
    rewards = Rewards(config)
    scorer = build_scorer(config, rewards, tokenizer)
    workers = config.rollout.workers
    async with make_session() as session, contextlib.AsyncExitStack() as stack:
        # Otherwise asyncio would wait forever for a reward process that is just starting.
        stack.push_async_callback(rewards.close)
        rewards.begin()
        client = client_maker(config, session)
        engines = [
            client(url, engine_identity(owner, url), tp=config.engine.tp_of(i), index=i)
            for i, url in enumerate(urls)
            if i % workers == number
        ]
        router = build_router(config, engines, tokenizer)

        def create_client(url: str, tp: int, pool: str | None) -> EngineClient:
            return client(url, engine_identity(owner, url), tp=tp, pool=pool)

        parts = WorkerParts(config, router, scorer, tokenizer, create_client)

        def in_flight() -> str:
            return f"data.reward = {config.data.reward_name} in flight for {len(scorer.scoring)} prompts"

        with loop_watch(config.rollout.stall_timeout, in_flight):
            await Worker(parts, exit_now).serve(end)


def exit_now() -> None:
    """Exit without cleanup when the coordinator has ended, because unreported state is never needed."""
    logging.shutdown()
    os._exit(0)


def standard_input() -> socket.socket:
    """Return the coordinator's socket, which is standard input, and ignore SIGTERM and SIGINT from now on.

    Only the coordinator stops a worker.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    return socket.socket(fileno=os.dup(sys.stdin.fileno()))


def main() -> None:
    parser = argparse.ArgumentParser(description="A rollout worker of a run; started by its rollout process.")
    parser.add_argument("--config", type=Path, required=True, help="resolved config of the run")
    parser.add_argument(
        "--number", type=int, required=True, help="index of the worker, from 0 to rollout.workers - 1"
    )
    parser.add_argument(
        "--engine",
        action="append",
        required=True,
        metavar="URL",
        help="an engine; repeat for all engines of the run",
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def run() -> None:
        config = load_config(args.config)
        asyncio.run(serve(config, args.number, args.engine, standard_input()))

    if stacks := os.environ.get(STACKS_VARIABLE):  # a separate file: the coordinator uses the role's
        os.environ[STACKS_VARIABLE] = f"{stacks}-worker{args.number}"
    run_role(run)


if __name__ == "__main__":
    main()
