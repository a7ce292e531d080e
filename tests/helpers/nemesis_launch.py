"""One launch of a run in virtual time: the real service, manager, router, buffer and owner; a trainer and a
supervisor of a few lines.
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
from tests.helpers.history import Saved, Training
from tests.helpers.loaded import loaded
from tests.helpers.nemesis_engine import BUCKETS, EngineNetwork, Ground, NemesisEngine, mixed
from tests.helpers.rollout_rig import Numbers, abandon
from tests.helpers.scripted_engine import EOS, LATENCY, canary_logprobs, checksums
from tests.helpers.virtual_processes import Connection, Process, Refused, Reset

ENGINES = 2
TRAIN_SECONDS = 4.0
BOOT_SECONDS = 2.0
SEND_SECONDS = 60.0


_BLANK = make_mocked_request("GET", "/")
"""Making one costs more than answering it."""


class RolloutRole:
    """The rollout process of a launch: what rlsys.rollout.service puts together, on virtual wires."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._ground = launch.ground
        self.process = Process("rollout", self._ended)
        self.app: web.Application | None = None
        self.buffer: RolloutBuffer | None = None
        self.manager: RolloutManager
        self.router: Router
        self.process.main(self._serve())

    async def _serve(self) -> None:
        config, ground = self._ground.config, self._ground
        planning = Planning(config, Numbers(), None)
        self.buffer = RolloutBuffer(
            config.run.dir / FILE_NAME, identity(config), planning.largest, self._launch.owner
        )
        ground.limit_disk(self.buffer)
        network: Any = EngineNetwork(ground)
        clients = [
            EngineClient(e.url, network, index=i, identity=engine_identity(self._launch.owner, e.url))
            for i, e in enumerate(self._launch.engines)
        ]
        self.router = router = Router(
            clients, vocab_size=128, context_length=200, stop_ids={EOS}, bounds=Bounds(1e-6, 1e-4),
            interruption=config.router.interruption, push_timeout_s=100,
        )  # fmt: skip
        scorer = Scorer(
            lambda: nullcontext(ground.reward), lambda ids: "x" * len(ids), config.rollout.reward_timeout
        )
        workers = direct_workers(config, router, scorer)
        self.manager = RolloutManager(config, self.buffer, workers, Numbers(), scorer, planning)
        watch = EngineWatch(clients, [], len(clients), workers)
        app = make_app(self.manager, lambda: watch.ready, self._launch.owner)
        app.freeze()
        self.app = app
        await watch.run()

    def _ended(self, process: Process) -> None:
        """What a kernel does: what was not committed is gone, locks are free."""
        self.app = None
        if self.buffer is not None:
            abandon(self.buffer)
        self._ground.history.deaths_unseen += process.exit != "in order"

    async def leave(self) -> None:
        """SIGTERM."""
        await self.manager.close()
        assert self.buffer is not None
        self.buffer.close()
        self.buffer = None
        self._ground.history.last_session = self.router._sender.run_id
        self.process.end("in order")

    async def answer(
        self, connection: Connection, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        assert self.app is not None
        request = _BLANK.clone(method=method, rel_url=path, headers=headers)
        request._read_bytes = body
        try:
            response = cast("web.Response", await self.app._handle(request))
        except web.HTTPException as e:
            connection.send((e.status, (e.text or "").encode()))
        else:
            connection.send((response.status, response.body or b""))


class TrainerRole:
    """rlsys.train without tensors: its weights are a number that follows from all tokens it was trained on."""

    def __init__(self, launch: Launch, start: int) -> None:
        self._launch = launch
        self._ground = launch.ground
        self._start = start
        self._headers = {KEY_HEADER: launch.owner.key, START_HEADER: str(start)}
        self._commands = 0
        self.process = Process("trainer")
        self.process.main(self._train())

    async def _train(self) -> None:
        ground = self._ground
        step, self._weights = ground.newest_checkpoint()
        await self._wait_ready()
        await self._command("restore", StepRequest(step), type(None))
        await self._push()
        while step < ground.steps:
            step += 1
            while (batch := await self._take(step)) is None:
                await self._push()
            await asyncio.sleep(TRAIN_SECONDS)
            self._learn(batch)
            await self._push()
            if step % ground.config.trainer.checkpoint_every == 0 or step == ground.steps:
                await self._save(step)

    def _learn(self, taken: TrainBatch) -> None:
        batch_groups = loaded(self._ground.config.run.dir, taken.groups)
        groups = {g.group_id: {s.sample_id: list(s.response_ids) for s in g.samples} for g in batch_groups}
        previous_weights, self._weights = (
            self._weights,
            mixed(self._weights, taken.train_step, sorted(groups.items())),
        )
        self._ground.history.trainings.append(
            Training(
                self._launch.owner.epoch,
                self._start,
                taken.train_step,
                previous_weights,
                self._weights,
                groups,
            )
        )

    async def _save(self, step: int) -> None:
        """Written, then published, if the launch still owns the run; a process may be stopped in between."""
        weights, ground = self._weights, self._ground
        await asyncio.sleep(0.3)
        if ground.disk_full:
            raise RunError("checkpoint: No space left on device")
        self._launch.owner.check()
        await asyncio.sleep(LATENCY)
        ground.checkpoints[step] = weights
        ground.history.saved.append(Saved(self._launch.owner.epoch, self._start, step, weights))
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
            excluded = {e.url: why for e, why in zip(ticket.engines, send_errors, strict=True) if why}
            canaries = [Canary(ids, canary_logprobs(ids, weights)) for ids in ticket.canaries]
            request = EndPushRequest(ticket, canaries, [checksums(weights)], excluded)
            metrics = await self._command("end_push", request, dict[str, float])
            pending = bool(metrics["push_left"])

    async def _send(self, engine: EngineAddress, weights: int) -> str:
        """Why the engine is left out; empty when it has all. As rlsys.weights.receivers."""
        network = EngineNetwork(self._ground)
        for bucket in range(BUCKETS):
            body = {"bucket": bucket, "weights": weights}
            how: dict[str, Any] = {
                "json": body, "timeout": aiohttp.ClientTimeout(SEND_SECONDS), "allow_redirects": False,
                "headers": {"Authorization": f"Bearer {engine.key}"} if engine.key else {},
            }  # fmt: skip
            try:
                async with network.request("POST", engine.url + "/tensors", **how) as answer:
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
                code, body = await self._ask("GET", "/status", b"")
                if code == 200 and json.loads(body)["engines_ready"]:
                    return
            except ConnectionBroken:
                pass
            await asyncio.sleep(1.0)

    async def _command(self, name: str, request: object, kind: type[Any]) -> Any:
        """Asked again under one name when the connection breaks, as by rlsys.rollout.client."""
        loop, give_up = asyncio.get_running_loop(), None
        self._commands += 1
        headers = {REQUEST_HEADER: f"{self._start}-{self._commands}"}
        while True:
            start_time = loop.time()
            try:
                code, body = await self._ask("POST", f"/{name}", encode(request), headers)
                break
            except ConnectionBroken as e:
                if give_up is None or loop.time() - start_time > RECONNECT_SECONDS:
                    give_up = loop.time() + RECONNECT_SECONDS
                if loop.time() >= give_up:
                    raise RunError(f"rollout process is gone ({e})") from None
            await asyncio.sleep(POLL_SECONDS)
        if code == 200:
            return decode(body, kind)
        raise decode_error(body) or RunError(f"rollout: {name} failed with {code} {body!r}")

    async def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] = {}
    ) -> tuple[int, bytes]:
        rollout, connection = self._launch.rollout, None
        try:
            server = rollout.process if rollout.app is not None else None
            connection = await self._ground.wires.connect(self.process, server)
            connection.task = rollout.process.spawn(
                rollout.answer(connection, method, path, {**self._headers, **headers}, body)
            )
            connection.task.add_done_callback(self._ground.watch_for_bugs)
            answer: tuple[int, bytes] = await connection.read()
            return answer
        except (Refused, Reset) as e:
            raise ConnectionBroken(f"{e} in {path[1:]}") from None
        finally:
            if connection is not None:
                connection.close()


class Launch:
    """One `rlsys train` on the folder: it owns the run from now on. Its supervisor restarts what dies."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.owner = claim(ground.config.run.dir)
        number = self.owner.epoch
        urls = [f"http://l{number}e{i}:1" for i in range(ENGINES)]
        self.engines = [NemesisEngine(url, engine_identity(self.owner, url), ground.poison) for url in urls]
        ground.engines |= {e.url: e for e in self.engines}
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
        """For whoever wonders why it does not go on."""
        of_processes = {p.name: "stopped" if p.paused else p.exit for p in self.processes()}
        return {**of_processes, **(self.rollout.manager.status() if self.rollout.app is not None else {})}

    async def _supervise(self) -> None:
        """Until the trainer is done, or a role says itself why it cannot go on."""
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
            self.ground.done = True
            await self.rollout.process.spawn(self.rollout.leave())
        finally:
            self._end()

    def _start_trainer(self) -> None:
        self._starts += 1
        self.trainer = TrainerRole(self, self._starts)

    def _restart(self) -> None:
        """Raises what a role said about its own end."""
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
                process.end("its launch is over")
