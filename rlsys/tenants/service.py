"""Service: owns the sessions, the models and the queues of requests of all tenants.

Each model has a queue of training requests, in the order of their numbers. Tenants take turns with one request each,
and so do the models of one tenant. Samples run concurrently in the engine, up to its batch size (sample_slots.py).
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
from rlsys.tenants.ledger import MAX_ROWS, Change, Ledger, LimitExceeded, Request
from rlsys.tenants.messages import sample_result
from rlsys.tenants.requests import Sample, read
from rlsys.tenants.sample_slots import SampleSlots
from rlsys.tenants.sampler import ADAPTERS_AT_ONCE, Engine, EngineGone
from rlsys.tenants.work import Model, Outcome, Work, failure, refusal

MAX_MODELS = 64
MAX_PENDING = 256
MAX_CONCURRENT_BODIES = 8
"""Limits of a tenant: number of models, of requests without a result, and of bodies that are read concurrently."""

log = logging.getLogger("rlsys.tenants")


class NotFound(Exception):
    """Raised if the tenant has no object with this name."""


@dataclass
class Tenant:
    """State of a tenant.

    Attributes:
        sessions: ids of the client's sessions.
        models: models by id.
        samplers: id of a sampling session -> path of its weights; None: the base model.
        pending: id of a request without a result -> event that is set with the result.
        ready: models whose next request has arrived, in the order of their turns.
        body_slots: limits the bodies that are read concurrently.
        additions: held from the check of a limit until the object is added, so that concurrent requests do not
            exceed the limit.
    """

    name: str
    ledger: Ledger
    sessions: set[str] = field(default_factory=set)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, str | None] = field(default_factory=dict)
    pending: dict[str, asyncio.Event] = field(default_factory=dict)
    ready: deque[Model] = field(default_factory=deque)
    body_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_BODIES))
    additions: asyncio.Lock = field(default_factory=asyncio.Lock)

    def model(self, name: str) -> Model:
        """Return a model by its id.

        Raises:
            NotFound: the tenant has no such model.
        """
        if name not in self.models:
            raise NotFound(f"model {name[:100]}: not found")
        return self.models[name]

    def sampler_path(self, sampler: str) -> str | None:
        """Return the path of the weights of a sampling session; None: the base model.

        Raises:
            NotFound: the tenant has no such sampling session.
        """
        if sampler not in self.samplers:
            raise NotFound(f"sampling session {sampler[:100]}: not found")
        return self.samplers[sampler]

    def check_session(self, session: str) -> None:
        """Check that a session exists.

        Raises:
            NotFound: the tenant has no such session.
        """
        if session not in self.sessions:
            raise NotFound(f"session {session[:100]}: not found")


class Service:
    """Owns the tenants and the queues. `run` must be called once, and other methods only while it runs."""

    def __init__(
        self,
        ledgers: Mapping[str, Ledger],
        work: Work,
        trainer: ThreadPoolExecutor,
        engine: Engine,
        slots: int,
        on_step: Callable[[dict[str, float]], None],
        on_recovery: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the service.

        Args:
            ledgers: name of a tenant -> its ledger.
            work: executor of training requests.
            trainer: thread of the trainer, in which `work` runs.
            engine: client of the engine.
            slots: largest number of concurrent samples.
            on_step: called with the metrics of each optimizer step.
            on_recovery: called when the engine responds again after a death.
        """
        self.tenants = {name: Tenant(name, ledger) for name, ledger in ledgers.items()}
        self._work, self._trainer, self._engine = work, trainer, engine
        self._slots = SampleSlots(slots, ADAPTERS_AT_ONCE - 1)  # one is for the base model
        self._on_step, self._on_recovery = on_step, on_recovery
        self._deaths = 0
        """Number of deaths after which the engine has responded again."""
        self._turns: asyncio.Queue[Tenant] = asyncio.Queue()
        """Tenants with a ready model, without duplicates, in the order of their turns."""
        self._samples: set[asyncio.Task[None]] = set()
        self._fatal_error: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until an error that no request has caused, and raise this error."""
        for tenant in self.tenants.values():
            self._restore(tenant)
        training = asyncio.ensure_future(self._train())
        try:
            await asyncio.wait([training, self._fatal_error], return_when=asyncio.FIRST_COMPLETED)
            for future in (training, self._fatal_error):
                if future.done():
                    future.result()
        finally:
            training.cancel()

    def _restore(self, tenant: Tenant) -> None:
        """Restore a tenant from its ledger, and enqueue its requests without a result."""
        ledger = tenant.ledger
        ledger.sweep()
        tenant.sessions = set(ledger.sessions())
        tenant.samplers = ledger.samplers()
        for row in ledger.models():
            next_seq = ledger.next_seq(row.id)
            tenant.models[row.id] = Model(row.id, ledger, next_seq, row.applied, row.updates, row.state)
        unfinished = ledger.unfinished()
        for request in unfinished:
            self._enqueue(tenant, request)
        if tenant.models:
            log.info("%s: %d models, %d pending requests", tenant.name, len(tenant.models), len(unfinished))

    # -- requests of clients --------------------------------------------------------------------------------------

    async def new_session(self, tenant: Tenant) -> str:
        """Create a session, and return its id.

        Raises:
            LimitExceeded: the tenant has MAX_ROWS sessions.
        """
        async with tenant.additions:
            if len(tenant.sessions) >= MAX_ROWS:
                raise LimitExceeded(
                    f"the tenant has {len(tenant.sessions)} sessions; expected fewer than {MAX_ROWS}"
                )
            session = uuid.uuid4().hex
            await asyncio.to_thread(tenant.ledger.add_session, session)
            tenant.sessions.add(session)
        return session

    async def new_model(self, tenant: Tenant, model: str) -> None:
        """Add a model before its first request, unless it exists.

        Raises:
            LimitExceeded: the tenant has MAX_MODELS models.
        """
        async with tenant.additions:
            if model in tenant.models:
                return
            if len(tenant.models) >= MAX_MODELS:
                raise LimitExceeded(
                    f"the tenant has {len(tenant.models)} models; expected fewer than {MAX_MODELS}"
                )
            await asyncio.to_thread(tenant.ledger.add_model, model)
            tenant.models[model] = Model(model, tenant.ledger)

    async def new_sampler(self, tenant: Tenant, sampler: str, path: str | None) -> None:
        """Add a sampling session, unless it exists.

        Args:
            tenant: the tenant.
            sampler: id of the sampling session.
            path: path of its weights; None: the base model.

        Raises:
            NotFound: there are no such weights for sampling.
            UserError: the sampling session exists with other weights.
            LimitExceeded: the tenant has MAX_ROWS sampling sessions.
        """
        if path is not None and (path not in tenant.ledger.saves() or "/sampler_weights/" not in path):
            raise NotFound(f"{path[:200]}: not found; expected a path of save_weights_for_sampler")
        async with tenant.additions:
            if tenant.samplers.get(sampler, path) != path:
                weights = tenant.samplers[sampler] or "of the base model"
                raise UserError(
                    f"sampling session {sampler} exists with the weights {weights}; expected the same weights, or "
                    "an unused sampling_session_seq_id"
                )
            if sampler not in tenant.samplers and len(tenant.samplers) >= MAX_ROWS:
                raise LimitExceeded(
                    f"the tenant has {len(tenant.samplers)} sampling sessions; expected fewer than {MAX_ROWS}"
                )
            await asyncio.to_thread(tenant.ledger.add_sampler, sampler, path)
            tenant.samplers[sampler] = path

    async def submit(self, tenant: Tenant, series: str, seq: int, kind: str, body: bytes) -> str:
        """Store a request durably and enqueue it. A repeated request is stored and runs once.

        Args:
            tenant: the tenant.
            series: id of the model or the sampling session.
            seq: number of the request in its series.
            kind: kind of the request.
            body: body of the request.

        Returns:
            The id of the request.

        Raises:
            Conflict: another request has this number.
            LimitExceeded: too many requests, or too large bodies, wait.
        """
        request = Request(series, seq, kind)
        async with tenant.additions:
            if request.id not in tenant.pending and len(tenant.pending) >= MAX_PENDING:
                raise LimitExceeded(
                    f"{len(tenant.pending)} requests wait; expected fewer than {MAX_PENDING}; try again later"
                )
            if await asyncio.to_thread(tenant.ledger.accept, series, seq, kind, body):
                self._enqueue(tenant, request)
        return request.id

    async def result(self, tenant: Tenant, request_id: str, seconds: float) -> tuple[str, bool, bytes] | None:
        """Wait for the result of a request.

        Args:
            tenant: the tenant.
            request_id: id of the request.
            seconds: longest wait, in seconds.

        Returns:
            Kind of the request, whether it failed, and its result; None if it is not done in time.

        Raises:
            NotFound: the tenant has no such request.
        """
        series, _, number = request_id.rpartition(":")
        if (series not in tenant.models and series not in tenant.samplers) or not number.isdecimal():
            raise NotFound(f"request {request_id[:100]}: not found")
        if (event := tenant.pending.get(request_id)) is not None:
            try:
                async with asyncio.timeout(seconds):
                    await event.wait()
            except TimeoutError:
                return None
        row = await asyncio.to_thread(tenant.ledger.result, series, int(number[:18]))
        if row is None:
            raise NotFound(f"request {request_id[:100]}: not found")
        kind, outcome, result = row
        return None if outcome is None else (kind, outcome == "failed", result)

    # -- execution ------------------------------------------------------------------------------------------------

    def _enqueue(self, tenant: Tenant, request: Request) -> None:
        """Start a sample, or add a training request to the queue of its model."""
        tenant.pending[request.id] = asyncio.Event()
        if request.kind == "sample":
            task = asyncio.ensure_future(self._sample(tenant, request))
            self._samples.add(task)
            task.add_done_callback(self._on_sample_done)
        else:
            model = tenant.models[request.series]
            model.pending[request.seq] = request
            self._schedule(tenant, model)

    def _schedule(self, tenant: Tenant, model: Model) -> None:
        """Let a model take turns if its next request has arrived."""
        if model.next_seq in model.pending and not model.queued:
            model.queued = True
            tenant.ready.append(model)
            if len(tenant.ready) == 1:
                self._turns.put_nowait(tenant)

    async def _train(self) -> None:
        """Run training requests one after the other, in turns of the tenants and their models."""
        loop = asyncio.get_running_loop()
        while True:
            tenant = await self._turns.get()
            model = tenant.ready.popleft()
            if tenant.ready:
                self._turns.put_nowait(tenant)
            request = model.pending.pop(model.next_seq)
            outcome = await loop.run_in_executor(self._trainer, self._work.do, model, request)
            await self._write_outcome(tenant, request, outcome)
            if outcome.change is not None:
                await self._replace_state(model, request, outcome.change)
            if outcome.metrics:
                self._on_step(outcome.metrics)
            if request.kind == "save_weights_for_sampler":
                async with tenant.additions:
                    tenant.samplers = await asyncio.to_thread(tenant.ledger.samplers)
            model.next_seq, model.queued = request.seq + 1, False
            self._schedule(tenant, model)
            tenant.pending.pop(request.id).set()

    @staticmethod
    async def _replace_state(model: Model, request: Request, change: Change) -> None:
        """Set the new state of a model after the effect of a request, and delete the file of the old state."""
        old_state = model.state
        model.applied, model.updates, model.state = request.seq, change.updates, change.state
        if old_state is not None and old_state != change.state:
            await asyncio.to_thread(model.ledger.state_file(old_state).unlink, missing_ok=True)

    @staticmethod
    async def _write_outcome(tenant: Tenant, request: Request, outcome: Outcome) -> None:
        await asyncio.to_thread(
            tenant.ledger.finish, request, outcome.result, failed=outcome.failed, change=outcome.change
        )

    async def _sample(self, tenant: Tenant, request: Request) -> None:
        """Run a request for samples when the engine has free slots."""
        adapter = tenant.samplers[request.series]
        name = None if adapter is None else f"{tenant.name}/{adapter}"
        body = await asyncio.to_thread(tenant.ledger.body, request)
        sample = await asyncio.to_thread(read, Sample, body)
        async with self._slots.take(tenant.name, name, sample.num_samples):
            outcome = refusal(request) or await self._ask_engine(tenant, request, sample)
        await self._write_outcome(tenant, request, outcome)
        tenant.pending.pop(request.id).set()

    async def _ask_engine(self, tenant: Tenant, request: Request, sample: Sample) -> Outcome:
        """Sample from the engine. Calls `on_recovery` if the engine has responded after a death."""
        path = tenant.samplers[request.series]
        folder: Path | None = None if path is None else tenant.ledger.save_path(path)

        async def on_death() -> int:
            return await asyncio.to_thread(tenant.ledger.add_death, request)

        try:
            outcome = Outcome(sample_result(*await self._engine.sample(sample, folder, on_death)))
        except UserError as e:
            return Outcome(failure(str(e)), True)
        except EngineGone as e:
            log.warning("%s: request %s: %s", tenant.name, request.id, e)
            return Outcome(failure(f"request {request.id[:200]}: {e}", "server"), True)
        if self._engine.deaths > self._deaths:
            self._deaths = self._engine.deaths
            self._on_recovery()
        return outcome

    def _on_sample_done(self, task: asyncio.Task[None]) -> None:
        """Remove the task of a sample, and let `run` raise its error."""
        self._samples.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._fatal_error.done():
            self._fatal_error.set_exception(error)
