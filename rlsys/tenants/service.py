"""The owner of a server: whose sessions and models there are, which request is next, and who waits for which result.

Each model has a queue in the order of its client's numbers. Tenants take turns, a request each, and so do the models
of one tenant. Samples are asked of the engine at once, as many as it decodes together (places.py).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rlsys.core.errors import UserError
from rlsys.tenants.ledger import MOST_ROWS, Ledger, Request, TooMany
from rlsys.tenants.messages import sample_result
from rlsys.tenants.places import SamplePlaces
from rlsys.tenants.requests import Sample, read
from rlsys.tenants.sampler import ADAPTERS_AT_ONCE, Engine, EngineGone
from rlsys.tenants.work import Model, Outcome, Work, failure, refusal

MOST_MODELS = 64
MOST_WAITING = 256
MOST_BODIES = 8
"""Of one tenant: models, requests that have no result yet, and bodies that come in at once."""

log = logging.getLogger("rlsys.tenants")


class NotThere(Exception):
    """Nothing of that name is this tenant's."""


@dataclass
class Tenant:
    name: str
    ledger: Ledger
    sessions: set[str] = field(default_factory=set)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, str | None] = field(default_factory=dict)
    """The path that each samples from; None: the model without adapters."""
    waiting: dict[str, asyncio.Event] = field(default_factory=dict)
    """By request, of those that have no result yet."""
    ready: deque[Model] = field(default_factory=deque)
    """Models whose next request is here."""
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_BODIES))
    """Of bodies that come in."""

    def model(self, name: str) -> Model:
        if name not in self.models:
            raise NotThere(f"model {name[:100]}: not found")
        return self.models[name]

    def sampled_path(self, sampler: str) -> str | None:
        if sampler not in self.samplers:
            raise NotThere(f"sampling session {sampler[:100]}: not found")
        return self.samplers[sampler]

    def check_session(self, session: str) -> None:
        if session not in self.sessions:
            raise NotThere(f"session {session[:100]}: not found")


class Service:
    """`figures`: is told of each optimizer step. `works`: that the engine has answered again after a death.

    Call `run` once, and everything else while it runs.
    """

    def __init__(
        self,
        ledgers: Mapping[str, Ledger],
        work: Work,
        trainer: ThreadPoolExecutor,
        engine: Engine,
        places: int,
        figures: Callable[[dict[str, float]], None],
        works: Callable[[], None] = lambda: None,
    ) -> None:
        self.tenants = {name: Tenant(name, ledger) for name, ledger in ledgers.items()}
        self._work, self._trainer, self._engine = work, trainer, engine
        self._places = SamplePlaces(places, ADAPTERS_AT_ONCE - 1)  # one is for the base model
        self._figures, self._works = figures, works
        self._deaths = 0
        """Of the engine, after which it has answered."""
        self._turns: asyncio.Queue[Tenant] = asyncio.Queue()
        """Tenants in turn, each once, as long as one of its models is ready."""
        self._samples: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Until something breaks that no request is to blame for."""
        for tenant in self.tenants.values():
            self._recall(tenant)
        training = asyncio.ensure_future(self._train())
        try:
            await asyncio.wait([training, self._broken], return_when=asyncio.FIRST_COMPLETED)
            for each in (training, self._broken):
                if each.done():
                    each.result()
        finally:
            training.cancel()

    def _recall(self, tenant: Tenant) -> None:
        """From its ledger: what was accepted, and has no result, is done now."""
        ledger = tenant.ledger
        ledger.sweep()
        tenant.sessions = set(ledger.sessions())
        tenant.samplers = ledger.samplers()
        for row in ledger.models():
            following = ledger.following(row.id)
            tenant.models[row.id] = Model(row.id, ledger, following, row.applied, row.updates, row.state)
        left = ledger.unfinished()
        for request in left:
            self._take(tenant, request)
        if tenant.models:
            log.info("%s: %d models, %d requests to be done", tenant.name, len(tenant.models), len(left))

    # -- what clients ask -----------------------------------------------------------------------------------------

    async def new_session(self, tenant: Tenant) -> str:
        if len(tenant.sessions) >= MOST_ROWS:
            raise TooMany(f"{MOST_ROWS} sessions is the most that a tenant has")
        session = uuid.uuid4().hex
        await asyncio.to_thread(tenant.ledger.add_session, session)
        tenant.sessions.add(session)
        return session

    async def new_model(self, tenant: Tenant, model: str) -> None:
        """Its first request may be submitted then. Again: nothing."""
        if model in tenant.models:
            return
        if len(tenant.models) >= MOST_MODELS:
            raise TooMany(f"{len(tenant.models)} models, {MOST_MODELS} is the most that a tenant has")
        await asyncio.to_thread(tenant.ledger.add_model, model)
        tenant.models.setdefault(model, Model(model, tenant.ledger))

    async def new_sampler(self, tenant: Tenant, sampler: str, path: str | None) -> None:
        if path is not None and (path not in tenant.ledger.saves() or "/sampler_weights/" not in path):
            raise NotThere(f"{path[:200]}: not found; expected what save_weights_for_sampler has saved")
        if tenant.samplers.get(sampler, path) != path:
            raise UserError(f"sampling session {sampler}: is there already, with other weights")
        if sampler not in tenant.samplers and len(tenant.samplers) >= MOST_ROWS:
            raise TooMany(f"{MOST_ROWS} sampling sessions is the most that a tenant has")
        await asyncio.to_thread(tenant.ledger.add_sampler, sampler, path)
        tenant.samplers[sampler] = path

    async def submit(self, tenant: Tenant, series: str, seq: int, kind: str, body: bytes) -> str:
        """Accept a request, on the disk when this returns; its id. Again: the same one, and it is done once."""
        request = Request(series, seq, kind)
        if request.id not in tenant.waiting and len(tenant.waiting) >= MOST_WAITING:
            raise TooMany(f"{len(tenant.waiting)} requests wait; try again later")
        if await asyncio.to_thread(tenant.ledger.accept, series, seq, kind, body):
            self._take(tenant, request)
        return request.id

    async def result(self, tenant: Tenant, request_id: str, seconds: float) -> tuple[str, bool, bytes] | None:
        """Kind, whether it failed, and what came of it; None while it is not done after so many seconds."""
        series, _, number = request_id.rpartition(":")
        if (series not in tenant.models and series not in tenant.samplers) or not number.isdecimal():
            raise NotThere(f"request {request_id[:100]}: not found")
        if (event := tenant.waiting.get(request_id)) is not None:
            try:
                async with asyncio.timeout(seconds):
                    await event.wait()
            except TimeoutError:
                return None
        found = await asyncio.to_thread(tenant.ledger.result, series, int(number[:18]))
        if found is None:
            raise NotThere(f"request {request_id[:100]}: not found")
        kind, outcome, result = found
        return None if outcome is None else (kind, outcome == "failed", result)

    # -- doing it -------------------------------------------------------------------------------------------------

    def _take(self, tenant: Tenant, request: Request) -> None:
        tenant.waiting[request.id] = asyncio.Event()
        if request.kind == "sample":
            task = asyncio.ensure_future(self._sample(tenant, request))
            self._samples.add(task)
            task.add_done_callback(self._sampled)
        else:
            model = tenant.models[request.series]
            model.waiting[request.seq] = request
            self._queue(tenant, model)

    def _queue(self, tenant: Tenant, model: Model) -> None:
        if model.following in model.waiting and not model.queued:
            model.queued = True
            tenant.ready.append(model)
            if len(tenant.ready) == 1:
                self._turns.put_nowait(tenant)

    async def _train(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            tenant = await self._turns.get()
            model = tenant.ready.popleft()
            if tenant.ready:
                self._turns.put_nowait(tenant)
            request = model.waiting.pop(model.following)
            outcome = await loop.run_in_executor(self._trainer, self._work.do, model, request)
            await self._keep(tenant, request, outcome)
            old, change = model.state, outcome.change
            if change is not None:
                model.applied, model.updates, model.state = request.seq, change.updates, change.state
                if old is not None and old != change.state:
                    await asyncio.to_thread(model.ledger.state_file(old).unlink, missing_ok=True)
            if outcome.figures:
                self._figures(outcome.figures)
            if request.kind == "save_weights_for_sampler":
                tenant.samplers = await asyncio.to_thread(tenant.ledger.samplers)
            model.following, model.queued = request.seq + 1, False
            self._queue(tenant, model)
            tenant.waiting.pop(request.id).set()

    @staticmethod
    async def _keep(tenant: Tenant, request: Request, outcome: Outcome) -> None:
        await asyncio.to_thread(
            tenant.ledger.finish, request, outcome.result, failed=outcome.failed, change=outcome.change
        )

    async def _sample(self, tenant: Tenant, request: Request) -> None:
        adapter = tenant.samplers[request.series]
        name = None if adapter is None else f"{tenant.name}/{adapter}"
        body = await asyncio.to_thread(tenant.ledger.body, request)
        asked = await asyncio.to_thread(read, Sample, body)
        async with self._places.take(tenant.name, name, asked.num_samples):
            outcome = refusal(request) or await self._ask_engine(tenant, request, asked)
        await self._keep(tenant, request, outcome)
        tenant.waiting.pop(request.id).set()

    async def _ask_engine(self, tenant: Tenant, request: Request, asked: Sample) -> Outcome:
        path = tenant.samplers[request.series]
        folder: Path | None = None if path is None else tenant.ledger.saved(path)

        async def died() -> int:
            return await asyncio.to_thread(tenant.ledger.add_death, request)

        try:
            outcome = Outcome(sample_result(*await self._engine.sample(asked, folder, died)))
        except UserError as e:
            return Outcome(failure(str(e)), True)
        except EngineGone as e:
            log.warning("%s: request %s: %s", tenant.name, request.id, e)
            return Outcome(failure(f"request {request.id[:200]}: {e}", "server"), True)
        if self._engine.deaths > self._deaths:
            self._deaths = self._engine.deaths
            self._works()
        return outcome

    def _sampled(self, task: asyncio.Task[None]) -> None:
        self._samples.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._broken.done():
            self._broken.set_exception(error)
