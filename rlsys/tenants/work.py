"""What a training request does: decoded, checked, done by the learner, and kept. In the trainer's thread.

Requests of a model come in their order, each once. A client gets a result, or one line of what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rlsys.core.errors import UserError
from rlsys.tenants.learner import Learner, NotFinite, Passed, check_data, loss_of
from rlsys.tenants.ledger import Change, Ledger, Request, as_json
from rlsys.tenants.messages import NotServed, read_request, train_result
from rlsys.tenants.requests import CreateModel, LoadWeights, OptimStep, SaveForSampler, SaveWeights, read
from rlsys.tenants.wire import BadMessage
from rlsys.trainer.resident import AdapterState

MOST_TRIES = 3
"""Starts of the server in which a request may stand first in its model: what kills it must not do so for ever."""


_FIRST = ("create_model", "load_weights")
"""Requests that make a model."""


@dataclass
class Model:
    """One of a tenant's. `following`: the number of the request that is next. `state`: the file of what `applied` and
    all requests before it have made of it; None before the first. `whole`: what was begun since is in memory, too;
    `loss`: of that."""

    id: str
    ledger: Ledger
    following: int = 0
    applied: int = -1
    updates: int = 0
    state: str | None = None
    whole: bool = False
    loss: float = 0.0
    queued: bool = False
    waiting: dict[int, Request] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """`figures`: of an optimizer step, for the metrics."""

    result: bytes
    failed: bool = False
    change: Change | None = None
    figures: dict[str, float] = field(default_factory=dict)


def refusal(request: Request) -> Outcome | None:
    """Of a request that may have ended engines or the server: it must not do so at every start."""
    if request.deaths:
        why = f"{request.deaths} engines died while they worked on it, and the server was started again"
    elif request.tries > MOST_TRIES:
        why = f"the server has ended {MOST_TRIES} times while this request was next"
    else:
        return None
    return Outcome(failure(f"request {request.id[:200]}: refused: {why}", "server"), True)


def failure(message: str, category: str = "user") -> bytes:
    return as_json({"error": message, "category": category})


class Work:
    """Owns which requests go to the learner. `vocab_size`, `context`: bounds of what it may be given."""

    def __init__(self, learner: Learner, vocab_size: int, context: int) -> None:
        self._learner = learner
        self._vocab_size, self._context = vocab_size, context
        self._kinds: dict[str, Callable[[Model, Request, bytes], Outcome]] = {
            "create_model": self._create,
            "forward": self._forward,
            "forward_backward": self._forward_backward,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load,
        }

    def do(self, model: Model, request: Request) -> Outcome:
        """Raises RunError for what is not the request's fault; nothing of it is then kept."""
        if (refused := refusal(request)) is not None:
            return refused
        try:
            if model.state is not None:
                self._bring_in(model)
            elif request.kind not in _FIRST:  # what is in the trainer now is somebody else's
                raise UserError(f"model {model.id}: was never made; its first request failed")
            return self._kinds[request.kind](model, request, model.ledger.body(request))
        except (UserError, NotServed, BadMessage) as e:
            return Outcome(failure(str(e)), True)
        except NotFinite as e:
            model.loss = 0.0
            assert model.state is not None
            return Outcome(failure(str(e)), True, Change(model.id, model.updates, model.state))

    def _bring_in(self, model: Model) -> None:
        """With what had gone backward before the server was killed: gradients are in memory only."""
        assert model.state is not None
        self._learner.enter(model.id, model.ledger.state_file(model.state))
        if not model.whole:
            for request in model.ledger.done_since(model.id, model.applied, "forward_backward"):
                model.loss += self._pass(model.ledger.body(request), backward=True).loss
            model.whole = True

    def _kept(self, model: Model, request: Request, state: AdapterState) -> Change:
        name = model.ledger.write_state(model.id, request.seq, state.to_bytes())
        return Change(model.id, state.updates, name)

    # -- kinds ----------------------------------------------------------------------------------------------------

    def _create(self, model: Model, request: Request, body: bytes) -> Outcome:
        asked = read(CreateModel, body)
        seed = asked.lora_config.seed if asked.lora_config is not None else None
        state = self._learner.first(self._learner.trainer.config.run.seed if seed is None else seed)
        self._learner.replace(model.id, state)
        model.whole = True
        result = as_json({"model_id": model.id, "type": "create_model"})
        return Outcome(result, change=self._kept(model, request, state))

    def _forward(self, model: Model, request: Request, body: bytes) -> Outcome:
        return Outcome(_told(self._pass(body, backward=False)))

    def _forward_backward(self, model: Model, request: Request, body: bytes) -> Outcome:
        done = self._pass(body, backward=True)
        model.loss += done.loss
        return Outcome(_told(done))

    def _pass(self, body: bytes, *, backward: bool) -> Passed:
        asked = read_request(body)
        kind = loss_of(asked.loss, asked.params)
        data = asked.data()
        check_data(data, kind, self._vocab_size, self._context)
        return self._learner.run(data, kind, asked.params, backward)

    def _step(self, model: Model, request: Request, body: bytes) -> Outcome:
        params = read(OptimStep, body).adam_params
        done = self._learner.step(params)
        figures = {"loss": model.loss, "grad_norm": done.grad_norm, "lr": params.learning_rate}
        model.loss = 0.0
        metrics = {"grad_norm:mean": done.grad_norm, "updates:max": float(done.state.updates)}
        result = as_json({"metrics": metrics, "type": "optim_step"})
        return Outcome(result, change=self._kept(model, request, done.state), figures=figures)

    def _save(self, model: Model, request: Request, body: bytes) -> Outcome:
        asked = read(SaveWeights, body)
        path = f"tinker://{model.id}/weights/{asked.path}"
        self._check_free(model, request, path, asked.overwrite)
        self._learner.trainer.check_base()
        model.ledger.write_saved(path, self._learner.state().to_bytes())
        model.ledger.add_save(path, model.id, request.seq, model.updates)
        return Outcome(as_json({"path": path, "type": "save_weights"}))

    def _save_for_sampler(self, model: Model, request: Request, body: bytes) -> Outcome:
        """Without a name it is for a sampling session, which is made with it."""
        asked = read(SaveForSampler, body)
        path = f"tinker://{model.id}/sampler_weights/{asked.path or f'at-{request.seq}'}"
        self._check_free(model, request, path, False)
        folder = model.ledger.saved(path)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._learner.export(folder)
        model.ledger.add_save(path, model.id, request.seq, model.updates)
        told: dict[str, str] = {"type": "save_weights_for_sampler"}
        if asked.path is not None:
            return Outcome(as_json({**told, "path": path}))
        if asked.sampling_session_seq_id is None:
            raise UserError("save_weights_for_sampler: expected path or sampling_session_seq_id")
        sampler = sampler_id(model.id.partition(":")[0], asked.sampling_session_seq_id)
        if model.ledger.samplers().get(sampler, path) != path:
            raise UserError(f"sampling_session_seq_id = {asked.sampling_session_seq_id} is taken")
        model.ledger.add_sampler(sampler, path)
        return Outcome(as_json({**told, "sampling_session_id": sampler}))

    def _load(self, model: Model, request: Request, body: bytes) -> Outcome:
        asked = read(LoadWeights, body)
        if "/weights/" not in asked.path or asked.path not in model.ledger.saves():
            raise UserError(f"load_weights: {asked.path[:200]}: no such weights")
        state = AdapterState.read(model.ledger.saved(asked.path).read_bytes(), optimizer=asked.optimizer)
        self._learner.replace(model.id, state)
        model.whole = True
        result = as_json({"path": asked.path, "model_id": model.id, "type": "load_weights"})
        return Outcome(result, change=self._kept(model, request, state))

    @staticmethod
    def _check_free(model: Model, request: Request, path: str, overwrite: bool) -> None:
        """A name that this very request has taken, before the server was killed, is its own."""
        found = model.ledger.saves().get(path)
        if found is not None and found[:2] != (model.id, request.seq) and not overwrite:
            raise UserError(f"{path}: is there already; use another name, or overwrite=True")


def _told(done: Passed) -> bytes:
    return train_result(done.logprobs, {"loss:sum": done.loss, "tokens:sum": float(done.tokens)})


def sampler_id(session: str, number: int) -> str:
    return f"{session}:sample:{number}"


def model_id(session: str, number: int) -> str:
    """As the client makes it, where it loads weights into a new model."""
    return f"{session}:train:{number}"
