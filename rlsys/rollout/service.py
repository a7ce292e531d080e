"""The rollout process: `python -m rlsys.rollout.service --config RUN/config.yaml --engine URL ...`.

One asyncio loop runs HTTP commands of the trainer (on a Unix socket), the router, the tasks of samples, and the
buffer. On SIGTERM, samples in flight are aborted and parked durably, and the process exits with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
from rlsys.core.descriptors import raise_descriptors
from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.core.imports import source_location
from rlsys.core.messages import decode, encode
from rlsys.core.owner import KEY_HEADER, START_HEADER, Owner, owner_of_process
from rlsys.core.texts import shorten
from rlsys.core.types import LONGEST_REASON
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.evaluation.evaluation import open_sets
from rlsys.http_server.connections import ServerLimits
from rlsys.http_server.server import (
    AUTHORIZED,
    Handler,
    Refusal,
    error_text,
    guarded_app,
    same_secret,
    serving,
)
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.samples import SampleQuery, SamplesAnswer, check_query
from rlsys.ledger.store import FILE_NAME
from rlsys.obs.coordinator import withdraw_address
from rlsys.obs.otlp import SpanSender
from rlsys.obs.role import run_role
from rlsys.rollout.build import RolloutComponents
from rlsys.rollout.command_dedup import CommandDedup
from rlsys.rollout.manager import RolloutManager
from rlsys.rollout.members import Members
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
from rlsys.rollout.startup_progress import open_with_progress
from rlsys.worker.loop_watch import loop_watch
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.workers import Workers

LIMITS = ServerLimits(connections=256, body_bytes=2**30)
PROBE_SECONDS = 0.5

R = TypeVar("R")

log = logging.getLogger("rlsys.rollout")


def make_app(manager: RolloutManager, ready: Callable[[], bool], owner: Owner) -> web.Application:
    """Create the HTTP application of a manager.

    Args:
        ready: whether enough engines are up.
        owner: commands must carry its key.
    """
    access, dedup = Access(owner), CommandDedup()

    async def end_push(request: EndPushRequest) -> dict[str, float]:
        return await manager.end_push(request.update, request.canaries, request.checksums, request.excluded)

    async def status(_: web.Request) -> web.Response:
        return web.json_response({**manager.status(), "engines_ready": ready()})

    async def ledger(_: web.Request) -> web.Response:
        return web.Response(body=encode(await manager.ledger()))

    async def samples(request: web.Request) -> web.Response:
        try:
            query = msgspec.json.decode(request.query["query"], type=SampleQuery)
            check_query(query)
            answer = SamplesAnswer(manager.samples(query))
        except (KeyError, msgspec.DecodeError, UserError) as e:
            answer = SamplesAnswer(error=str(e))
        return web.Response(body=encode(answer))

    async def leave(request: web.Request) -> web.Response:
        await manager.leave(float(request.query["seconds"]))
        return web.json_response(manager.status())

    def command(kind: type[R], run: Callable[[R], Awaitable[Result]]) -> Handler:
        return _command(access, dedup, kind, run)

    app = guarded_app(
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
        ],
        LIMITS,
        error_text,
        admit=access.check_key,
    )
    app.on_shutdown.append(lambda _: dedup.close())
    return app


class Access:
    """Access control: accepts requests of the launch that owns the run, and commands of its latest trainer only.

    A trainer registers with `restore`. Commands of earlier trainers are refused from then on: a push would send old
    weights under a new version, and a take would train a step twice.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._start = 0
        """Number of the last registered start of the trainer; 0: none."""

    def check_key(self, request: web.Request) -> None:
        """Check that a request carries the owner's key.

        Raises:
            Refusal: the request carries no or another key (status 403).
        """
        if not same_secret(request.headers.get(KEY_HEADER, ""), self._owner.key):
            raise Refusal(
                403, f"{request.path}: wrong {KEY_HEADER}; expected the key of the launch that owns this run"
            )
        request[AUTHORIZED] = True

    def check_trainer(self, request: web.Request) -> None:
        """Check that a command comes from the latest trainer.

        Raises:
            RunError: another trainer has replaced the sender, or the sender has not registered with `restore`.
        """
        start = int(request.headers.get(START_HEADER, "0"))
        command = request.path[1:]
        if command == "restore" and start >= self._start:
            self._start = start
        if not self._start:
            raise RunError(f"{command}: the trainer must call restore first")
        if start != self._start:
            raise RunError(f"{command}: start {start} of the trainer was replaced by start {self._start}")


def _command(
    access: Access, dedup: CommandDedup, kind: type[R], run: Callable[[R], Awaitable[Result]]
) -> Handler:
    """Create a handler that decodes a request of type `kind`, calls `run`, and encodes the result or error.

    The error ends the run. An unexpected exception becomes a RunError with its type and location; the log has its
    traceback.
    """

    async def handle(request: web.Request) -> web.Response:
        try:
            body = await request.read()
            access.check_trainer(request)  # after the body: another trainer may have restored meanwhile
            message = decode(body, kind)
        except msgspec.DecodeError as e:
            return web.Response(status=400, text=f"{request.path}: the body is no valid request: {e}")
        except RunError as e:
            return _error_response(e)
        request_id = request.headers.get(REQUEST_HEADER, "")
        (outcome,) = await asyncio.gather(
            dedup.run_once(request_id, lambda: run(message)), return_exceptions=True
        )
        if isinstance(outcome, Exception):
            error = _as_rlsys_error(outcome, request.path[1:])
            log.error("%s: %s", request.path, error)
            return _error_response(error)
        if isinstance(outcome, BaseException):
            raise outcome
        return web.Response(body=encode(outcome))

    return handle


def _as_rlsys_error(error: Exception, command: str) -> RlsysError:
    """Return an RlsysError unchanged; log another exception, and return a RunError with its type and location."""
    if isinstance(error, RlsysError):
        return error
    log.error("/%s", command, exc_info=error)
    text = shorten(f"{type(error).__name__}: {error}{source_location(error)}", LONGEST_REASON)
    return RunError(f"rollout process: {command} failed: {text}; see rollout.log")


def _error_response(error: RlsysError) -> web.Response:
    """Return the response with an error."""
    code, body = encode_error(error)
    return web.Response(status=code, body=body)


class EngineWatch:
    """Waits until enough engines and all reference servers respond, then watches the engines."""

    def __init__(
        self,
        engines: list[EngineClient],
        references: list[EngineClient],
        min_engines: int,
        workers: Workers,
        members: Members | None = None,
    ) -> None:
        """Create a watch.

        Args:
            engines: engines that the run needs to generate samples.
            references: servers with reference or teacher weights; all must respond.
            min_engines: number of `engines` that must respond.
            workers: the workers of the run, whose engines are watched afterwards.
            members: engines that join and leave the run.
        """
        self._engines, self._references, self._min_engines = engines, references, min_engines
        self._workers, self._members = workers, members
        self.ready = False
        self._logged = False

    async def run(self) -> None:
        """Wait, set `ready`, then watch the engines forever."""
        while not await self._is_ready():
            await asyncio.sleep(PROBE_SECONDS)
        self.ready = True
        members = [] if self._members is None else [self._members.watch()]
        await asyncio.gather(*self._workers.watches(), *members)

    async def _is_ready(self) -> bool:
        clients = [*self._references, *self._engines]
        healthy = await asyncio.gather(*(e.healthy() for e in clients))
        split = len(self._references)
        if sum(healthy[split:]) < self._min_engines:
            return False
        missing = [e.url for e, up in zip(self._references, healthy, strict=False) if not up]
        if missing and not self._logged:  # the only log line about this wait
            self._logged = True
            log.warning("the engines are ready; waiting for %s", ", ".join(missing))
        return not missing


async def serve(
    config: Config,
    urls: list[str],
    reference: str | None,
    owner: Owner,
    teacher: str | None = None,
) -> None:
    """Run the rollout process until SIGTERM or SIGINT.

    Args:
        urls: URLs of the engines that the launch starts, by engine index.
        reference: URL of the server with reference weights; None: the config needs none.
        owner: the launch that owns the run.
        teacher: URL of the server with the teacher's weights; None: the config needs none.

    Raises:
        UserError: the ledger file is unusable, the data section is invalid, or an option that the config requires
            is missing.
    """
    if config.engine.reference is not None and reference is None:
        raise UserError(f"engine.reference = {config.engine.reference}: expected the option --reference URL")
    if config.algo.teacher is not None and config.algo.teacher.engine is not None and teacher is None:
        raise UserError(
            f"algo.teacher.engine = {config.algo.teacher.engine}: expected the option --teacher URL"
        )
    raise_descriptors(most_slots(config), "rollout: over_provision x groups_per_step x group_size")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with make_session() as session, contextlib.AsyncExitStack() as stack:
        components = RolloutComponents(config, urls, reference, teacher, owner, session)
        # Otherwise asyncio would wait forever for a reward process that is just starting.
        stack.push_async_callback(components.rewards.close)
        components.rewards.begin()  # while the engines start
        path = config.run.dir / FILE_NAME

        def open_buffer() -> RolloutBuffer:
            largest, holds_tokens = components.planning.largest, config.rollout.workers == 1
            return RolloutBuffer(path, identity(config), largest, owner, holds_tokens=holds_tokens)

        try:
            buffer = await open_with_progress(path, open_buffer, owner)
        except BaseException:
            withdraw_address(owner)
            raise
        try:
            await check_same_rows(components.source, buffer)
            await _manage(config, components, buffer, owner, stop)
        finally:
            withdraw_address(owner)  # first: later readers open the file
            buffer.close()
    if components.reward_hung:  # an async reward may ignore cancellation, and asyncio would wait for it
        logging.shutdown()
        os._exit(0)


async def _manage(
    config: Config, components: RolloutComponents, buffer: RolloutBuffer, owner: Owner, stop: asyncio.Event
) -> None:
    """Serve the trainer's commands until `stop` is set, then park samples in flight."""

    def rewards_in_flight() -> str:
        prompts = ", ".join(str(p.index) for p in components.scorer.scoring) or "none"
        return f"data.reward = {config.data.reward_name} in flight for prompts: {prompts}"

    workers = components.workers
    await workers.start(buffer)
    async with open_sets(config, components.tokenizer, workers.engines) as sets:
        spans = SampleSpans(SpanSender(config.run.dir, "rollout") if config.run.spans else None)
        rows = RowChecks(config, components.source)
        manager = RolloutManager(
            config,
            buffer,
            workers,
            components.source,
            components.scorer,
            components.planning,
            components.tokenizer,
            sets,
            spans,
            rows,
        )
        min_engines, required_engines = config.launch.min_engines, components.engines
        if min_engines is not None:  # only engines that generate samples are required
            required_engines = [e for i, e in enumerate(components.engines) if not config.engine.explores(i)]
        members = Members(config, owner, workers.engines, components.create_client, components.engines)
        watch = EngineWatch(
            required_engines, components.references, min_engines or len(required_engines), workers, members
        )
        app = make_app(manager, lambda: watch.ready, owner)
        gc.freeze()  # permanent objects: exclude them from full collections
        with loop_watch(config.rollout.stall_timeout, rewards_in_flight):
            await _serve_until(stop, app, owner, watch.run(), rows.run())
        log.info("stopping: parking samples in flight")
        try:
            async with asyncio.timeout(config.launch.grace_seconds / 2):
                await manager.close()
        except TimeoutError:
            log.warning("stopping: an engine did not end its requests in time; the streamed tokens are kept")
        await workers.close()


async def _serve_until(
    stop: asyncio.Event, app: web.Application, owner: Owner, *background: Coroutine[Any, Any, None]
) -> None:
    """Serve until `stop` is set. An error of a `background` task ends the service and is raised."""
    stop_task = asyncio.ensure_future(stop.wait())
    tasks: set[asyncio.Future[Any]] = {stop_task, *map(asyncio.ensure_future, background)}
    # Cancelled handlers: the take of a trainer that no longer exists must not keep waiting.
    async with serving(app, owner.rollout_socket, cancel_handlers=True) as path:
        log.info("listening on %s", path)
        try:
            waiting = tasks
            while not stop_task.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


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
