"""The rollout process: `python -m rlsys.rollout.service --config RUN/config.yaml --engine URL ...`.

One asyncio loop: HTTP commands of the trainer (on a Unix socket), the router, the tasks of samples, the buffer.
SIGTERM: what is in flight is aborted, parked durably, and the process ends with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rlsys.config import Config, identity, load_config
from rlsys.config.slots import most_slots
from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.core.imports import source_location
from rlsys.core.messages import decode, encode
from rlsys.core.owner import KEY_HEADER, START_HEADER, Owner, owner_of_process
from rlsys.core.texts import shorten
from rlsys.core.types import LONGEST_REASON
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.evaluation.evaluation import open_sets
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.samples import SampleQuery, SamplesAnswer, check_query
from rlsys.ledger.store import FILE_NAME
from rlsys.obs.coordinator import publish_address, withdraw_address
from rlsys.obs.descriptors import raise_descriptors
from rlsys.obs.otlp import SpanSender
from rlsys.obs.role import run_role
from rlsys.rollout.manager import RolloutManager
from rlsys.rollout.members import Members
from rlsys.rollout.once import Once
from rlsys.rollout.opening import open_while_telling
from rlsys.rollout.parts import Parts
from rlsys.rollout.protocol import (
    REQUEST_HEADER,
    BeginPushRequest,
    EndPushRequest,
    Result,
    ScoresRequest,
    StepRequest,
    encode_error,
)
from rlsys.rollout.row_checks import RowChecks, check_same_rows
from rlsys.router.router import Router
from rlsys.worker.loop_watch import loop_watch
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.workers import Workers

LARGEST_REQUEST = 2**30
PROBE_SECONDS = 0.5

R = TypeVar("R")

log = logging.getLogger("rlsys.rollout")


def make_app(manager: RolloutManager, ready: Callable[[], bool], owner: Owner) -> web.Application:
    """The HTTP side of a manager. `ready`: have enough engines answered? Commands carry the key of `owner`."""
    access, once = Access(owner), Once()

    async def end_push(request: EndPushRequest) -> dict[str, float]:
        return await manager.end_push(request.ticket, request.canaries, request.checksums, request.left_out)

    async def status(request: web.Request) -> web.Response:
        access.check_key(request)
        return web.json_response({**manager.status(), "engines_ready": ready()})

    async def ledger(request: web.Request) -> web.Response:
        access.check_key(request)
        return web.Response(body=encode(await manager.ledger()))

    async def samples(request: web.Request) -> web.Response:
        access.check_key(request)
        try:
            query = msgspec.json.decode(request.query["query"], type=SampleQuery)
            check_query(query)
            answer = SamplesAnswer(manager.samples(query))
        except (KeyError, msgspec.DecodeError, UserError) as e:
            answer = SamplesAnswer(error=str(e))
        return web.Response(body=encode(answer))

    async def leave(request: web.Request) -> web.Response:
        access.check_key(request)
        await manager.leave(float(request.query["seconds"]))
        return web.json_response(manager.status())

    def command(
        kind: type[R], run: Callable[[R], Awaitable[Result]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        return _command(access, once, kind, run)

    app = web.Application(client_max_size=LARGEST_REQUEST)
    app.on_shutdown.append(lambda _: once.close())
    app.add_routes(
        [
            web.get("/status", status),
            web.get("/ledger", ledger),
            web.get("/samples", samples),
            web.post("/leave", leave),  # a command of the supervisor
            web.post("/restore", command(StepRequest, lambda r: manager.restore(r.train_step))),
            web.post("/early", command(StepRequest, lambda r: manager.early(r.train_step))),
            web.post("/take", command(StepRequest, lambda r: manager.take(r.train_step))),
            web.post("/unscored", command(StepRequest, lambda r: manager.unscored(r.train_step))),
            web.post("/store_scores", command(ScoresRequest, lambda r: manager.store_scores(r.scores))),
            web.post("/begin_push", command(BeginPushRequest, lambda r: manager.begin_push(r.mismatch_kept))),
            web.post("/end_push", command(EndPushRequest, end_push)),
            web.post("/evaluate", command(type(None), lambda _: manager.evaluate())),
            web.post("/begin_evaluation", command(type(None), lambda _: manager.begin_evaluation())),
            web.post("/end_evaluation", command(bool, lambda wait: manager.end_evaluation(wait))),
            web.post("/commit", command(StepRequest, lambda r: manager.commit(r.train_step))),
        ]
    )
    return app


class Access:
    """Who may command: the launch that owns the run, by its key, and of its trainers the one started last.

    A trainer takes its place with `restore`. An older one that comes back after a pause is refused from then on: its
    push would bring old weights under a new version, and its take would train a step twice.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._start = 0
        """Which start of the trainer was admitted last; 0: none has restored yet."""

    def check_key(self, request: web.Request) -> None:
        """Raises 403 for everybody who cannot read the owner's file."""
        if not self._owner.admits(request.headers.get(KEY_HEADER, "")):
            raise web.HTTPForbidden(text=f"{request.path}: not the key of this run's launch ({KEY_HEADER})")

    def check_trainer(self, request: web.Request) -> None:
        """Raises 403 for a wrong key, RunError for a trainer that another one has replaced."""
        self.check_key(request)
        start = int(request.headers.get(START_HEADER, "0"))
        if request.path == "/restore" and start >= self._start:
            self._start = start
        if start != self._start or not start:
            raise RunError(
                f"{request.path[1:]} from start {start} of the trainer, but start {self._start} has taken its place"
                if self._start
                else f"{request.path[1:]} before restore"
            )


def _command(
    access: Access, once: Once, kind: type[R], run: Callable[[R], Awaitable[Result]]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler: body of `kind` -> result, or what was raised, which ends the run. A bug's words say what and where,
    and its traceback is in the log."""

    async def handle(request: web.Request) -> web.Response:
        access.check_key(request)
        try:
            body = await request.read()
            access.check_trainer(request)  # now: another may have restored while the body came
            message = decode(body, kind)
        except msgspec.DecodeError as e:
            return web.Response(status=400, text=f"not a request of {request.path}: {e}")
        except RunError as e:
            code, body = encode_error(e)
            return web.Response(status=code, body=body)
        name = request.headers.get(REQUEST_HEADER, "")
        (found,) = await asyncio.gather(once.result(name, lambda: run(message)), return_exceptions=True)
        if not isinstance(found, BaseException):
            return web.Response(body=encode(found))
        if not isinstance(found, Exception):
            raise found
        error = found
        if not isinstance(error, RlsysError):
            words = shorten(f"{type(found).__name__}: {found}{source_location(found)}", LONGEST_REASON)
            error = RunError(f"rollout: {request.path[1:]} failed: {words}; see its log")
            log.error("%s", request.path, exc_info=found)
        log.error("%s: %s", request.path, error)
        code, body = encode_error(error)
        return web.Response(status=code, body=body)

    return handle


class EngineWatch:
    """Waits for the first answers of so many engines as a run begins with, and of all `references`; then lets the
    router look after engines, also after those that come later, or die and come back."""

    def __init__(
        self,
        engines: list[EngineClient],
        references: list[EngineClient],
        fewest: int,
        router: Router | Workers,
        members: Members | None = None,
    ) -> None:
        """`members`: who joins and leaves from then on."""
        self._engines, self._references, self._fewest = engines, references, fewest
        self._router, self._members = router, members
        self.ready = False
        self._told = False

    async def run(self) -> None:
        while not await self._enough():
            await asyncio.sleep(PROBE_SECONDS)
        self.ready = True
        watches = [self._router.watch()] + ([self._members.watch()] if self._members is not None else [])
        await asyncio.gather(*watches)

    async def _enough(self) -> bool:
        asked = [*self._references, *self._engines]
        here = await asyncio.gather(*(e.healthy() for e in asked))
        split = len(self._references)
        if sum(here[split:]) < self._fewest:
            return False
        away = [e.url for e, up in zip(self._references, here, strict=False) if not up]
        if away and not self._told:  # nobody else would say what the run waits for
            self._told = True
            log.warning("the engines are there; waiting for %s", ", ".join(away))
        return not away


async def serve(
    config: Config,
    urls: list[str],
    reference: str | None,
    owner: Owner,
    teacher: str | None = None,
) -> None:
    """Until SIGTERM or SIGINT. `reference`: URL of the server that prompts are held against, if a planner wants one;
    `teacher`: of the one that is asked about responses.

    Raises UserError for an unusable buffer file, a wrong data section."""
    if config.engine.reference is not None and reference is None:
        raise UserError(f"engine.reference = {config.engine.reference}: --reference is missing")
    if config.algo.teacher is not None and config.algo.teacher.engine is not None and teacher is None:
        raise UserError(f"algo.teacher.engine = {config.algo.teacher.engine}: --teacher is missing")
    raise_descriptors(most_slots(config), "rollout: over_provision x groups_per_step x group_size")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with make_session() as session:
        parts = Parts(config, urls, reference, teacher, owner, session)
        path = config.run.dir / FILE_NAME

        async def listen(runner: web.AppRunner) -> None:
            await _listen(runner, owner)
            publish_address(owner)

        def open_buffer() -> RolloutBuffer:
            largest, in_hand = parts.planning.largest, config.rollout.workers == 1
            return RolloutBuffer(path, identity(config), largest, owner, in_hand=in_hand)

        try:
            buffer = await open_while_telling(path, open_buffer, listen)
        except RlsysError:
            withdraw_address(owner)
            raise
        try:
            await check_same_rows(parts.source, buffer)
            await _manage(config, parts, buffer, owner, stop)
        finally:
            withdraw_address(owner)  # first: who asks from now on looks into the file
            buffer.close()
            await parts.rewards.close()
    if parts.hung:  # an async reward may not let itself be cancelled, and asyncio would wait for it
        logging.shutdown()
        os._exit(0)


async def _manage(
    config: Config, parts: Parts, buffer: RolloutBuffer, owner: Owner, stop: asyncio.Event
) -> None:
    """Serve the trainer's commands until `stop`; then park what is in flight."""

    def rewards_in_flight() -> str:
        asked = ", ".join(str(p.index) for p in parts.scorer.scoring) or "none"
        return f"data.reward = {config.data.reward_name} in flight for prompts: {asked}"

    workers = parts.router if isinstance(parts.router, Workers) else None
    if workers is not None:
        await workers.start(buffer)
    async with open_sets(config, parts.tokenizer, parts.asked) as sets:
        spans = SampleSpans(SpanSender(config.run.dir, "rollout") if config.run.spans else None)
        rows = RowChecks(config, parts.source)
        manager = RolloutManager(
            config,
            buffer,
            parts.router,
            parts.source,
            parts.scorer,
            parts.planning,
            parts.tokenizer,
            sets,
            spans,
            rows,
        )
        fewest, awaited = config.launch.min_engines, parts.engines
        if fewest is not None:  # of those that write samples: the run can do without the others
            awaited = [e for i, e in enumerate(parts.engines) if not config.engine.explores(i)]
        members = Members(config, owner, parts.asked, parts.joiner, parts.engines)
        watch = EngineWatch(awaited, parts.references, fewest or len(awaited), parts.router, members)
        app = make_app(manager, lambda: watch.ready, owner)
        gc.freeze()  # what is here now stays: every full collection would look at all of it
        with loop_watch(config.rollout.stall_timeout, rewards_in_flight):
            await _serve_until(stop, app, owner, watch.run(), rows.run())
        log.info("stopping: parking what is in flight")
        try:
            async with asyncio.timeout(config.launch.grace_seconds / 2):
                await manager.close()
        except TimeoutError:
            log.warning("an engine does not answer; what it streamed so far is kept")
        if workers is not None:
            await workers.close()


async def _serve_until(
    stop: asyncio.Event, app: web.Application, owner: Owner, *beside: Coroutine[Any, Any, None]
) -> None:
    """Serve until `stop`; what runs `beside` and breaks breaks the service."""
    # A trainer that is gone must not leave a take behind that waits for it.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0, access_log=None)
    await runner.setup()
    stopped = asyncio.ensure_future(stop.wait())
    tasks: set[asyncio.Future[Any]] = {stopped, *map(asyncio.ensure_future, beside)}
    try:
        await _listen(runner, owner)
        log.info("listening on %s", owner.rollout_socket)
        waiting = tasks
        while not stopped.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()


async def _listen(runner: web.AppRunner, owner: Owner) -> None:
    """For the trainer's rank 0, the supervisor and readers, all of them on this machine."""
    await web.UnixSite(runner, owner.rollout_socket).start()


def _main(args: argparse.Namespace) -> None:
    config = load_config(args.config)
    owner, _ = owner_of_process(config.run.dir)
    asyncio.run(serve(config, args.engine, args.reference, owner, args.teacher))


def main() -> None:
    parser = argparse.ArgumentParser(description="The rollout process of a run; started by rlsys train.")
    parser.add_argument("--config", type=Path, required=True, help="resolved config of the run")
    parser.add_argument("--engine", action="append", required=True, metavar="URL", help="an SGLang server")
    parser.add_argument("--reference", metavar="URL", help="an SGLang server with the reference weights")
    parser.add_argument("--teacher", metavar="URL", help="an SGLang server with algo.teacher's weights")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_role(lambda: _main(args))


if __name__ == "__main__":
    main()
