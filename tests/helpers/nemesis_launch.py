"""One launch of a run in virtual time.

Rollout service, manager, router, buffer and owner are the product's; trainer and supervisor are short stand-ins.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import aiohttp
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from rlsys.config import identity
from rlsys.core.errors import RunError
from rlsys.core.identity import engine_identity
from rlsys.core.messages import decode, encode
from rlsys.core.owner import KEY_HEADER, START_HEADER, claim
from rlsys.core.types import TrainBatch
from rlsys.core.weight_updates import Canary, EngineAddress, WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from rlsys.planning.planning import Planning
from rlsys.rollout.client import POLL_SECONDS, ConnectionBroken
from rlsys.rollout.manager import RolloutManager
from rlsys.rollout.protocol import (
    RECONNECT_SECONDS,
    REQUEST_HEADER,
    BeginPushRequest,
    EndPushRequest,
    StepRequest,
    decode_error,
)
from rlsys.rollout.service import EngineWatch, make_app
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.worker.scoring import Scorer
from rlsys.worker.workers import direct_workers
from tests.helpers.history import CheckpointRecord, StepRecord
from tests.helpers.loaded import load_tokens
from tests.helpers.nemesis_engine import BUCKETS, EngineNetwork, NemesisEngine, RunEnvironment, weights_state
from tests.helpers.rollout_rig import Numbers, abandon
from tests.helpers.scripted_engine import EOS, LATENCY, canary_logprobs, checksums
from tests.helpers.virtual_processes import Connection, Process, Refused, Reset

ENGINES = 2
TRAIN_SECONDS = 4.0
BOOT_SECONDS = 2.0
SEND_SECONDS = 60.0


_REQUEST_TEMPLATE = make_mocked_request("GET", "/")
"""A request to clone: building one costs more than handling it."""


class RolloutRole:
    """The rollout process of a launch: the parts of rlsys.rollout.service on virtual wires."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._environment = launch.environment
        self.process = Process("rollout", self._on_exit)
        self.app: web.Application | None = None
        self.buffer: RolloutBuffer | None = None
        self.manager: RolloutManager
        self.router: Router
        self.process.main(self._serve())

    async def _serve(self) -> None:
        config, environment = self._environment.config, self._environment
        planning = Planning(config, Numbers(), None)
        self.buffer = RolloutBuffer(
            config.run.dir / FILE_NAME, identity(config), planning.largest, self._launch.owner
        )
        environment.limit_disk(self.buffer)
        network: Any = EngineNetwork(environment)
        clients = [
            EngineClient(e.url, network, index=i, identity=engine_identity(self._launch.owner, e.url))
            for i, e in enumerate(self._launch.engines)
        ]
        self.router = router = Router(
            clients, vocab_size=128, context_length=200, stop_ids={EOS}, bounds=Bounds(1e-6, 1e-4),
            interruption=config.router.interruption, push_timeout_s=100,
        )  # fmt: skip
        scorer = Scorer(
            lambda: nullcontext(environment.reward), lambda ids: "x" * len(ids), config.rollout.reward_timeout
        )
        workers = direct_workers(config, router, scorer)
        self.manager = RolloutManager(config, self.buffer, workers, Numbers(), scorer, planning)
        watch = EngineWatch(clients, [], len(clients), workers)
        app = make_app(self.manager, lambda: watch.ready, self._launch.owner)
        app.freeze()
        self.app = app
        await watch.run()

    def _on_exit(self, process: Process) -> None:
        """Discard uncommitted data and release locks, as the kernel does."""
        self.app = None
        if self.buffer is not None:
            abandon(self.buffer)
        self._environment.history.unobserved_deaths += process.exit != "clean exit"

    async def shut_down(self) -> None:
        """Shut down cleanly, as on SIGTERM."""
        await self.manager.close()
        assert self.buffer is not None
        self.buffer.close()
        self.buffer = None
        self._environment.history.last_session = self.router._sender.run_id
        self.process.end("clean exit")

    async def answer(
        self, connection: Connection, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        assert self.app is not None
        request = _REQUEST_TEMPLATE.clone(method=method, rel_url=path, headers=headers)
        request._read_bytes = body
        try:
            response = cast("web.Response", await self.app._handle(request))
        except web.HTTPException as e:
            connection.send((e.status, (e.text or "").encode()))
        else:
            connection.send((response.status, response.body or b""))


class TrainerRole:
    """rlsys.train without tensors: an integer, computed from all trained tokens, stands for the weights."""

    def __init__(self, launch: Launch, start: int) -> None:
        self._launch = launch
        self._environment = launch.environment
        self._start = start
        self._headers = {KEY_HEADER: launch.owner.key, START_HEADER: str(start)}
        self._commands = 0
        self.process = Process("trainer")
        self.process.main(self._train())

    async def _train(self) -> None:
        environment = self._environment
        step, self._weights = environment.newest_checkpoint()
        await self._wait_ready()
        await self._command("restore", StepRequest(step), type(None))
        await self._push()
        while step < environment.steps:
            step += 1
            while (batch := await self._take(step)) is None:
                await self._push()
            await asyncio.sleep(TRAIN_SECONDS)
            self._learn(batch)
            await self._push()
            if step % environment.config.trainer.checkpoint_every == 0 or step == environment.steps:
                await self._save(step)

    def _learn(self, batch: TrainBatch) -> None:
        batch_groups = load_tokens(self._environment.config.run.dir, batch.groups)
        groups = {g.group_id: {s.sample_id: list(s.response_ids) for s in g.samples} for g in batch_groups}
        previous_weights, self._weights = (
            self._weights,
            weights_state(self._weights, batch.train_step, sorted(groups.items())),
        )
        self._environment.history.trained_steps.append(
            StepRecord(
                self._launch.owner.epoch,
                self._start,
                batch.train_step,
                previous_weights,
                self._weights,
                groups,
            )
        )

    async def _save(self, step: int) -> None:
        """Write and publish a checkpoint if the launch still owns the run. The process may be paused in between."""
        weights, environment = self._weights, self._environment
        await asyncio.sleep(0.3)
        if environment.disk_full:
            raise RunError("checkpoint: No space left on device")
        self._launch.owner.check()
        await asyncio.sleep(LATENCY)
        environment.checkpoints[step] = weights
        environment.history.checkpoints.append(
            CheckpointRecord(self._launch.owner.epoch, self._start, step, weights)
        )
        await self._command("commit", StepRequest(step), type(None))

    async def _take(self, step: int) -> TrainBatch | None:
        return await self._command(
            "take", StepRequest(step), cast("type[TrainBatch | None]", TrainBatch | None)
        )

    async def _push(self) -> None:
        weights, pending = self._weights, True
        while pending:
            ticket = await self._command("begin_push", BeginPushRequest(), WeightUpdate)
            send_errors = await asyncio.gather(*(self._send(e, weights) for e in ticket.engines))
            excluded = {e.url: error for e, error in zip(ticket.engines, send_errors, strict=True) if error}
            canaries = [Canary(ids, canary_logprobs(ids, weights)) for ids in ticket.canaries]
            request = EndPushRequest(ticket, canaries, [checksums(weights)], excluded)
            metrics = await self._command("end_push", request, dict[str, float])
            pending = bool(metrics["push_left"])

    async def _send(self, engine: EngineAddress, weights: int) -> str:
        """Send the weights to an engine. Return the error that excludes it from the push, or an empty string."""
        network = EngineNetwork(self._environment)
        for bucket in range(BUCKETS):
            body = {"bucket": bucket, "weights": weights}
            options: dict[str, Any] = {
                "json": body, "timeout": aiohttp.ClientTimeout(SEND_SECONDS), "allow_redirects": False,
                "headers": {"Authorization": f"Bearer {engine.key}"} if engine.key else {},
            }  # fmt: skip
            try:
                async with network.request("POST", engine.url + "/tensors", **options) as answer:
                    text = await answer.text()
            except (OSError, aiohttp.ClientError) as e:
                return str(e) or type(e).__name__
            if answer.status != 200:
                return f"{engine.url}/tensors: {answer.status} {text}"
            await asyncio.sleep(0.05)
        return ""

    async def _wait_ready(self) -> None:
        while True:
            try:
                code, body = await self._request("GET", "/status", b"")
                if code == 200 and json.loads(body)["engines_ready"]:
                    return
            except ConnectionBroken:
                pass
            await asyncio.sleep(1.0)

    async def _command(self, name: str, request: object, kind: type[Any]) -> Any:
        """Send a command; retry it under one request ID if the connection breaks, as rlsys.rollout.client does."""
        loop, deadline = asyncio.get_running_loop(), None
        self._commands += 1
        headers = {REQUEST_HEADER: f"{self._start}-{self._commands}"}
        while True:
            start_time = loop.time()
            try:
                code, body = await self._request("POST", f"/{name}", encode(request), headers)
                break
            except ConnectionBroken as e:
                if deadline is None or loop.time() - start_time > RECONNECT_SECONDS:
                    deadline = loop.time() + RECONNECT_SECONDS
                if loop.time() >= deadline:
                    raise RunError(f"rollout process is gone ({e})") from None
            await asyncio.sleep(POLL_SECONDS)
        if code == 200:
            return decode(body, kind)
        raise decode_error(body) or RunError(f"rollout: {name} failed with {code} {body!r}")

    async def _request(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] = {}
    ) -> tuple[int, bytes]:
        rollout, connection = self._launch.rollout, None
        try:
            server = rollout.process if rollout.app is not None else None
            connection = await self._environment.wires.connect(self.process, server)
            connection.task = rollout.process.spawn(
                rollout.answer(connection, method, path, {**self._headers, **headers}, body)
            )
            connection.task.add_done_callback(self._environment.report_handler_error)
            answer: tuple[int, bytes] = await connection.read()
            return answer
        except (Refused, Reset) as e:
            raise ConnectionBroken(f"{e} in {path[1:]}") from None
        finally:
            if connection is not None:
                connection.close()


class Launch:
    """One `rlsys train` on the run folder. It claims the run, and its supervisor restarts dead processes."""

    def __init__(self, environment: RunEnvironment) -> None:
        self.environment = environment
        self.owner = claim(environment.config.run.dir)
        urls = [f"http://l{self.owner.epoch}e{i}:1" for i in range(ENGINES)]
        self.engines = [
            NemesisEngine(url, engine_identity(self.owner, url), environment.poison) for url in urls
        ]
        environment.engines |= {e.url: e for e in self.engines}
        self._starts = 0
        self.rollout: RolloutRole
        self.trainer: TrainerRole
        self.zombies: list[TrainerRole] = []
        self.process = Process("supervisor")
        self.process.main(self._supervise())

    @property
    def over(self) -> bool:
        return self.process.dead

    def processes(self) -> list[Process]:
        engines = [e.process for e in self.engines if e.process is not None]
        return [self.process, self.rollout.process, self.trainer.process, *engines]

    def state(self) -> dict[str, object]:
        """Return the state of the processes and of the rollout, for error messages."""
        process_states = {p.name: "stopped" if p.paused else p.exit for p in self.processes()}
        return {**process_states, **(self.rollout.manager.status() if self.rollout.app is not None else {})}

    async def _supervise(self) -> None:
        """Run until the trainer completes all steps or a role ends with an exception."""
        for engine in self.engines:
            engine.start()
        self.rollout = RolloutRole(self)
        self._start_trainer()
        try:
            while self.trainer.process.exit != 0:
                await asyncio.sleep(0.2)
                for engine in self.engines:
                    if engine.process is None:
                        await asyncio.sleep(BOOT_SECONDS)
                        engine.start()
                if self.rollout.process.dead or self.trainer.process.exit not in (None, 0):
                    await asyncio.sleep(1.0)  # a dying role is often noticed by the others first
                    self._restart()
            self.environment.done = True
            await self.rollout.process.spawn(self.rollout.shut_down())
        finally:
            self._end()

    def _start_trainer(self) -> None:
        self._starts += 1
        self.trainer = TrainerRole(self, self._starts)

    def _restart(self) -> None:
        """Restart the trainer, and the rollout process if it is dead.

        Raises:
            BaseException: the exception with which a role ended.
        """
        for role in (self.rollout.process, self.trainer.process):
            if role.dead:
                if isinstance(role.exit, BaseException):
                    raise role.exit
                break
        if not self.trainer.process.dead:
            self.trainer.process.end("restarted")
        if self.rollout.process.dead:
            self.rollout = RolloutRole(self)
        self._start_trainer()

    def _end(self) -> None:
        for process in self.processes()[1:]:
            if not process.dead:
                process.end("end of its launch")
