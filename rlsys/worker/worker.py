"""A rollout worker: a process with engines of its own, their streams and rewards (`rollout.workers`).

    python -m rlsys.worker.worker --config RUN/config.yaml --number I --engine URL ...

The rollout process, its coordinator, starts it with a socket as standard input. It writes tokens into segments of its
own and tells the coordinator where they lie, which commits them: kill -9 of a worker leaves bytes that nobody knows.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.config import Config, load_config
from rlsys.config.slots import most_slots
from rlsys.core.errors import RlsysError
from rlsys.core.identity import engine_identity
from rlsys.core.owner import owner_of_process
from rlsys.core.types import Prompt, Sample, Status
from rlsys.data import Tokenizer
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.engine_requests import Limits
from rlsys.generators.generator import Generator, build_generator
from rlsys.generators.trees import TreeGenerator
from rlsys.generators.turns import sampling_turns
from rlsys.ledger.sample_rows import New, Stored, append_tokens, changing
from rlsys.ledger.segments import SegmentFile
from rlsys.obs.descriptors import raise_descriptors
from rlsys.obs.role import STACKS_VARIABLE, run_role
from rlsys.rewards import Rewards
from rlsys.router.router import RefusedPrompt, Router
from rlsys.segments.records import SegmentReader
from rlsys.worker.assembly import build_router, build_scorer, client_maker
from rlsys.worker.link import (
    Answer,
    Call,
    Failed,
    Figures,
    Forget,
    Joined,
    Judged,
    Link,
    Row,
    Run,
    ToWorker,
    pack,
    row_of,
    unpack,
)
from rlsys.worker.loop_watch import loop_watch
from rlsys.worker.repeat import Stops, record_of
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.scoring import Scorer
from rlsys.worker.streams import Streams
from rlsys.worker.worker_groups import WorkerGroups

TELL_SECONDS = 0.02
"""Rows go together, for so long: a slot of a sample that has ended is free again after that."""
FIGURES_SECONDS = 0.5

log = logging.getLogger("rlsys.rollout")


@dataclass
class WorkerParts:
    """What a worker works with. `folder`: the run's. `flush_tokens`: the most that its samples may have unsaved.
    `client`: of an engine that joins, by URL, ranks and pool. `stops`: of a record that its samples follow."""

    config: Config
    router: Router
    scorer: Scorer
    generator: Generator
    folder: Path
    flush_tokens: int
    client: Callable[[str, int, str | None], EngineClient]
    stops: Stops | None = None


class Worker:
    """Owns the tasks of its samples, their tokens in hand, and its segments."""

    def __init__(self, parts: WorkerParts, end: Callable[[], None]) -> None:
        """`end`: what to do when the coordinator is gone."""
        self._parts = parts
        self._router = parts.router
        self._scorer = parts.scorer
        self._groups = WorkerGroups()
        self._streams = Streams(
            parts.config, parts.router, parts.scorer, parts.generator, self, self._groups.of, SampleSpans(None),
            parts.flush_tokens, parts.stops, self._groups.whole,
        )  # fmt: skip
        self._link = Link(ToWorker, self._hear, end)
        self._file: SegmentFile | None = None
        self._stored: dict[int, list[Stored]] = {}  # of each sequence of the samples that run here
        self._told: dict[tuple[int, int], object] = {}  # of further sequences, what the coordinator knows
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()  # forgotten, and not at their end yet
        self._calls: set[asyncio.Task[None]] = set()
        self._rows: list[Row] = []
        self._timer: asyncio.TimerHandle | None = None
        self._flushed: asyncio.Future[None] | None = None

    async def serve(self, end: socket.socket) -> None:
        """For the life of the process."""
        await self._link.open(end)
        gc.freeze()  # what is here now stays: every full collection would look at all of it
        while True:
            await asyncio.sleep(FIGURES_SECONDS)
            self._tell_figures()

    def _tell_figures(self) -> None:
        counts, prefills = self._router.tally()
        figures = Figures(
            counts | {"reward_hung": self._scorer.hung, "reward_failed": self._scorer.failed}, prefills,
            self._router.engine_states(), self._router.engine_figures(), self._router.stale_engines,
            self._router.next_members(), self._router.rolls, self._router.hopeless, self._streams.full(),
            dict(self._streams.counts),
        )  # fmt: skip
        self._link.send(figures)

    # What the coordinator says

    def _hear(self, messages: list[ToWorker]) -> None:
        for message in messages:
            self._obey(message)

    def _obey(self, message: ToWorker) -> None:
        if isinstance(message, Run):
            work = self._run(unpack(message.sample), unpack(message.prompt), message.together)
            begun = self._tasks[message.sample_id] = asyncio.create_task(work)
            begun.add_done_callback(lambda t: self._ended(message.sample_id, t))
        elif isinstance(message, Forget):
            for sample_id in message.sample_ids:
                if (task := self._tasks.get(sample_id)) is not None:
                    task.cancel()
                    self._leaving.add(task)
                    task.add_done_callback(self._leaving.discard)
        else:
            call = asyncio.create_task(self._answer(message))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _answer(self, call: Call) -> None:
        """What it raises, the coordinator raises where somebody waits."""
        result, error = b"", b""
        work: Awaitable[Any] = getattr(self, f"do_{call.name}")(**unpack(call.arguments))
        found: Any = (await asyncio.gather(work, return_exceptions=True))[0]
        if isinstance(found, Exception):
            if not isinstance(found, RlsysError | RefusedPrompt):
                log.error("%s", call.name, exc_info=found)
            error = pack(found)
        elif isinstance(found, BaseException):
            raise found
        else:
            result = pack(found)
        self.flush()
        self._tell_figures()
        self._link.send(Answer(call.number, result, error))

    async def do_begin(
        self, writer: str, version: int, opened: bool, joined: list[Joined], trained_steps: int
    ) -> tuple[list[str], bool, Limits]:
        """Write segments as `writer`. Engines should have weights of `version`, which contain so many train steps;
        `opened`: samples may go to them. Returns the URLs of engines that it had before it took in `joined`, whether
        its generator grows trees, and what a prompt must keep to."""
        own = list(self._router.engine_states())
        self._file = SegmentFile(self._parts.folder, writer)
        if version:
            self._router.expect(version)
        for engine in joined:
            await self.do_add_engine(*engine)
        self._streams.go(trained_steps)
        if opened:
            self._router.resume()
        self._calls.add(asyncio.create_task(self._router.watch()))
        return own, isinstance(self._parts.generator, TreeGenerator), self._router.limits

    async def do_interrupt(
        self, keep: frozenset[int] | None, going_on: bool, gently: bool
    ) -> list[tuple[int, int]]:
        """Samples and sequences that were in an engine, and are parked now."""
        kept = None if keep is None else lambda sample: sample.sample_id in keep
        if gently:
            await self._streams.until_none_is_full()
        parked = await self._streams.interrupt(kept, going_on=going_on)
        return [(q.sample_id, q.sequence) for q in parked]

    async def do_save(self) -> None:
        await self._streams.save_running()

    async def do_resume(self) -> None:
        self._router.resume()

    async def do_go(self, trained_steps: int) -> None:
        self._streams.go(trained_steps)

    async def do_add_engine(self, url: str, tp: int, pool: str | None) -> None:
        self._router.add_engine(self._parts.client(url, tp, pool))

    async def do_send_away(self, url: str) -> None:
        await self._router.send_away(url)

    async def do_rest(self) -> None:
        await self._router.rest_engines()

    async def do_begin_push(self, version: int, only_stale: bool, members: Collection[str]) -> Any:
        if members:
            await self._streams.until_none_is_full(members)
        return await self._router.begin_push(version, only_stale=only_stale, members=members)

    async def do_end_push(self, **arguments: Any) -> Any:
        return await self._router.end_push(**arguments)

    async def do_probe(self, **arguments: Any) -> Any:
        return await self._router.probe(**arguments)

    async def do_prompt_logprobs(self, ids: list[int]) -> list[float]:
        return await self._router.prompt_logprobs(ids)

    async def do_pin(self) -> bool:
        return self._router.pin()

    async def do_unpin(self) -> None:
        self._router.unpin()

    # Samples

    async def _run(self, sample: Sample, prompt: Prompt, together: int) -> None:
        if self._leaving:  # it may be one of them, or of their group
            await asyncio.wait(set(self._leaving))
        with SegmentReader(self._parts.folder) as reader:
            sample = reader.loaded(sample)
        self._stored[sample.sample_id] = [Stored.of(q) for q in sample.sequences]
        self._told |= {(q.sample_id, q.sequence): changing(q) for q in sample.extra_sequences}
        self._groups.add(sample, prompt.index, together)
        try:
            if sample.status.terminal:
                self._rows.append(row_of(sample, True, ([], [], False), {}))
                self.flush_soon()
            else:
                await self._streams.generate(sample, prompt)
            if sample.status is not Status.CENSORED:
                self._link.send(Judged(sample.sample_id, await self._streams.score(sample, prompt)))
        finally:
            self._stored.pop(sample.sample_id, None)
            for q in sample.extra_sequences:
                self._told.pop((q.sample_id, q.sequence), None)
            self._groups.remove(sample)

    def _ended(self, sample_id: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(sample_id) is task:
            del self._tasks[sample_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, RlsysError):
                log.error("sample %d", sample_id, exc_info=error)
            self._link.send(Failed(sample_id, pack(error)))

    # Where Streams saves

    def save(self, samples: Iterable[Sample]) -> None:
        assert self._file is not None, "the coordinator begins with `begin`"
        for sample in samples:
            further = {}
            for q in sample.extra_sequences:
                key, now = (q.sample_id, q.sequence), changing(q)
                if self._told.get(key) != now:
                    further[q.sequence] = self._written(self._file, q)
                    self._told[key] = now
            own = self._written(self._file, sample)
            self._rows.append(row_of(sample, not self._streams.runs(sample), own, further))

    def _written(self, file: SegmentFile, sequence: Sample) -> New:
        """What is new of it, in the file."""
        stored = self._stored[sequence.sample_id]
        if sequence.sequence == len(stored):
            stored.append(Stored())
        before = stored[sequence.sequence]
        anew = sequence.tokens < before.tokens
        if anew:
            before = Stored()
        new = sequence.routes[before.routes :]
        placed = [span for span in new if span.location is not None]
        in_hand = [span for span in new if span.location is None]
        pieces = append_tokens(file, sequence, before, in_hand)
        stored[sequence.sequence] = Stored.of(sequence)
        return pieces, placed, anew

    def unsaved(self, sample: Sample) -> bool:
        """Whether it has tokens that `save` has not seen."""
        return sample.all_tokens > sum(stored.tokens for stored in self._stored[sample.sample_id])

    def flush(self) -> None:
        """Written out, and told."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._file is not None:
            self._file.write_out()
        for row in self._rows:
            self._link.send(row)
        self._rows.clear()
        if self._flushed is not None:
            self._flushed.set_result(None)
            self._flushed = None

    async def flushed(self) -> None:
        """Until the next flush."""
        self.flush_soon()
        if self._flushed is None:
            self._flushed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._flushed)

    def flush_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TELL_SECONDS, self._flush_now)

    def _flush_now(self) -> None:
        try:
            self.flush()
        except RlsysError as e:
            self._link.send(Failed(-1, pack(e)))


async def serve(config: Config, number: int, urls: list[str], end: socket.socket) -> None:
    """Until the coordinator is gone. Raises UserError for a wrong config, as the coordinator does."""
    raise_descriptors(most_slots(config), "rollout worker: over_provision x groups_per_step x group_size")
    owner, _ = owner_of_process(config.run.dir)
    tokenizer = Tokenizer.of(config)
    rewards = Rewards(config)
    rewards.begin()
    scorer = build_scorer(config, rewards, tokenizer)
    workers = config.rollout.workers
    async with make_session() as session:
        client = client_maker(config, session)
        engines = [
            client(url, engine_identity(owner, url), tp=config.engine.tp_of(i), index=i)
            for i, url in enumerate(urls)
            if i % workers == number
        ]
        router = build_router(config, engines, tokenizer, sole=False)
        record = record_of(config)
        stops = None if record is None else Stops(record)
        speak = sampling_turns(config, router) if stops is None else stops.turns(router, config)
        generator = build_generator(config, tokenizer, speak)

        def joiner(url: str, tp: int, pool: str | None) -> EngineClient:
            return client(url, engine_identity(owner, url), tp=tp, pool=pool)

        parts = WorkerParts(
            config, router, scorer, generator, config.run.dir, max(1, config.flush_tokens // workers), joiner, stops
        )  # fmt: skip

        def in_flight() -> str:
            return f"data.reward = {config.data.reward_name} in flight for {len(scorer.scoring)} prompts"

        with loop_watch(config.rollout.stall_timeout, in_flight):
            await Worker(parts, leave).serve(end)


def leave() -> None:
    """The coordinator is gone. What it has not been told will never be asked for."""
    logging.shutdown()
    os._exit(0)


def standard_input() -> socket.socket:
    """The coordinator's socket. Only the coordinator ends a worker: signals to all processes of a role are its."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    return socket.socket(fileno=os.dup(sys.stdin.fileno()))


def main() -> None:
    parser = argparse.ArgumentParser(description="A rollout worker of a run; started by its rollout process.")
    parser.add_argument("--config", type=Path, required=True, help="resolved config of the run")
    parser.add_argument("--number", type=int, required=True, help="from 0 to rollout.workers - 1")
    parser.add_argument("--engine", action="append", required=True, metavar="URL", help="all of the run's")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def run() -> None:
        config = load_config(args.config)
        asyncio.run(serve(config, args.number, args.engine, standard_input()))

    if stacks := os.environ.get(STACKS_VARIABLE):  # a file of its own: the coordinator has the role's
        os.environ[STACKS_VARIABLE] = f"{stacks}-worker{args.number}"
    run_role(run)


if __name__ == "__main__":
    main()
