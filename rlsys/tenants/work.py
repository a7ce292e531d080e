"""Work: decodes, checks and runs training requests, and stores their effect. Runs in the trainer's thread.

The requests of a model arrive in order, each once. A client gets a result, or an error of one line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rlsys.core.errors import UserError
from rlsys.tenants.learner import Learner, NotFinite, PassResult, check_data, find_loss
from rlsys.tenants.ledger import Change, Ledger, Request, as_json
from rlsys.tenants.messages import UnsupportedRequest, read_request, train_result
from rlsys.tenants.requests import CreateModel, LoadWeights, OptimStep, SaveForSampler, SaveWeights, read
from rlsys.tenants.wire import BadMessage
from rlsys.trainer.resident import AdapterState

MAX_TRIES = 3
"""Largest number of starts of the server at which a request is the next one of its model. At a later start it is
refused, because it may have crashed the server."""


_FIRST = ("create_model", "load_weights")
"""Requests that initialize a model."""


@dataclass
class Model:
    """A model of a tenant.

    Attributes:
        next_seq: number of the next request.
        applied: number of the last request that `state` includes; -1: none.
        updates: number of optimizer steps.
        state: name of the state's file; None before the first request.
        has_gradients: whether the gradients since `applied` are in memory.
        loss: loss of these gradients.
        queued: whether the model waits for its turn, or its request runs.
        pending: number of a request without a result -> the request.
    """

    id: str
    ledger: Ledger
    next_seq: int = 0
    applied: int = -1
    updates: int = 0
    state: str | None = None
    has_gradients: bool = False
    loss: float = 0.0
    queued: bool = False
    pending: dict[int, Request] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a request.

    Attributes:
        result: encoded result, or error, for the client.
        change: effect on the model; None: none.
        metrics: metrics of an optimizer step; empty for other requests.
    """

    result: bytes
    failed: bool = False
    change: Change | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def refusal(request: Request) -> Outcome | None:
    """Return the refusal of a request that may have killed engines or the server; None: the request may run."""
    if request.deaths:
        reason = (
            f"engines died {request.deaths} times while they processed it, and the server was started again"
        )
    elif request.tries > MAX_TRIES:
        reason = f"the server ended {MAX_TRIES} times while this request was the next one"
    else:
        return None
    return Outcome(failure(f"request {request.id[:200]} is refused: {reason}", "server"), True)


def failure(message: str, category: str = "user") -> bytes:
    """Encode an error for the client. `category`: "user" or "server"."""
    return as_json({"error": message, "category": category})


class Work:
    """Executor of training requests."""

    def __init__(self, learner: Learner, vocab_size: int, context: int) -> None:
        """Create the executor.

        Args:
            learner: owner of the trainer.
            vocab_size: size of the vocabulary.
            context: context length of the model, in tokens.
        """
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
        """Run a request.

        Raises:
            RunError: a failure that the request has not caused. The effect of the request is not stored.
        """
        if (refusal_outcome := refusal(request)) is not None:
            return refusal_outcome
        try:
            if model.state is not None:
                self._activate(model)
            elif request.kind not in _FIRST:  # the trainer has the weights of another model
                raise UserError(f"model {model.id}: does not exist; its first request failed")
            return self._kinds[request.kind](model, request, model.ledger.body(request))
        except (UserError, UnsupportedRequest, BadMessage) as e:
            return Outcome(failure(str(e)), True)
        except NotFinite as e:
            model.loss = 0.0
            assert model.state is not None
            return Outcome(failure(str(e)), True, Change(model.id, model.updates, model.state))

    def _activate(self, model: Model) -> None:
        """Activate a model. After a restart of the server, recompute its gradients, which were only in memory."""
        assert model.state is not None
        self._learner.enter(model.id, model.ledger.state_file(model.state))
        if not model.has_gradients:
            for request in model.ledger.done_since(model.id, model.applied, "forward_backward"):
                model.loss += self._pass(model.ledger.body(request), backward=True).loss
            model.has_gradients = True

    def _write_state(self, model: Model, request: Request, state: AdapterState) -> Change:
        """Write the state of a model after a request, and return it as the request's effect."""
        name = model.ledger.write_state(model.id, request.seq, state.to_bytes())
        return Change(model.id, state.updates, name)

    # -- kinds ----------------------------------------------------------------------------------------------------

    def _create(self, model: Model, request: Request, body: bytes) -> Outcome:
        message = read(CreateModel, body)
        seed = message.lora_config.seed if message.lora_config is not None else None
        state = self._learner.first(self._learner.trainer.config.run.seed if seed is None else seed)
        self._learner.replace(model.id, state)
        model.has_gradients = True
        result = as_json({"model_id": model.id, "type": "create_model"})
        return Outcome(result, change=self._write_state(model, request, state))

    def _forward(self, model: Model, request: Request, body: bytes) -> Outcome:
        return Outcome(_encode_result(self._pass(body, backward=False)))

    def _forward_backward(self, model: Model, request: Request, body: bytes) -> Outcome:
        result = self._pass(body, backward=True)
        model.loss += result.loss
        return Outcome(_encode_result(result))

    def _pass(self, body: bytes, *, backward: bool) -> PassResult:
        """Decode and check a request for a pass, and run it."""
        message = read_request(body)
        kind = find_loss(message.loss, message.params)
        data = message.data()
        check_data(data, kind, self._vocab_size, self._context)
        return self._learner.run(data, kind, message.params, backward)

    def _step(self, model: Model, request: Request, body: bytes) -> Outcome:
        params = read(OptimStep, body).adam_params
        step = self._learner.step(params)
        metrics = {"loss": model.loss, "grad_norm": step.grad_norm, "lr": params.learning_rate}
        model.loss = 0.0
        reply = {"grad_norm:mean": step.grad_norm, "updates:max": float(step.state.updates)}
        result = as_json({"metrics": reply, "type": "optim_step"})
        return Outcome(result, change=self._write_state(model, request, step.state), metrics=metrics)

    def _save(self, model: Model, request: Request, body: bytes) -> Outcome:
        message = read(SaveWeights, body)
        path = f"tinker://{model.id}/weights/{message.path}"
        self._check_free(model, request, path, message.overwrite)
        self._learner.trainer.check_base()
        model.ledger.write_save(path, self._learner.state().to_bytes())
        model.ledger.add_save(path, model.id, request.seq, model.updates)
        return Outcome(as_json({"path": path, "type": "save_weights"}))

    def _save_for_sampler(self, model: Model, request: Request, body: bytes) -> Outcome:
        """Save weights for sampling. If the request names no weights, also create a sampling session with them."""
        message = read(SaveForSampler, body)
        path = f"tinker://{model.id}/sampler_weights/{message.path or f'at-{request.seq}'}"
        self._check_free(model, request, path, False)
        folder = model.ledger.save_path(path)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._learner.export(folder)
        model.ledger.add_save(path, model.id, request.seq, model.updates)
        reply: dict[str, str] = {"type": "save_weights_for_sampler"}
        if message.path is not None:
            return Outcome(as_json({**reply, "path": path}))
        if message.sampling_session_seq_id is None:
            raise UserError("save_weights_for_sampler: expected path or sampling_session_seq_id")
        sampler = sampler_id(model.id.partition(":")[0], message.sampling_session_seq_id)
        if model.ledger.samplers().get(sampler, path) != path:
            raise UserError(
                f"sampling_session_seq_id = {message.sampling_session_seq_id}: exists with other weights; expected "
                "an unused number"
            )
        model.ledger.add_sampler(sampler, path)
        return Outcome(as_json({**reply, "sampling_session_id": sampler}))

    def _load(self, model: Model, request: Request, body: bytes) -> Outcome:
        message = read(LoadWeights, body)
        if "/weights/" not in message.path or message.path not in model.ledger.saves():
            raise UserError(
                f"load_weights: path = {message.path[:200]}: no such weights; expected saved weights"
            )
        state = AdapterState.read(
            model.ledger.save_path(message.path).read_bytes(), optimizer=message.optimizer
        )
        self._learner.replace(model.id, state)
        model.has_gradients = True
        result = as_json({"path": message.path, "model_id": model.id, "type": "load_weights"})
        return Outcome(result, change=self._write_state(model, request, state))

    @staticmethod
    def _check_free(model: Model, request: Request, path: str, overwrite: bool) -> None:
        """Check that a path is unused, or was saved by the same request before a crash of the server.

        Raises:
            UserError: the path is used, and `overwrite` is False.
        """
        save = model.ledger.saves().get(path)
        if save is not None and save[:2] != (model.id, request.seq) and not overwrite:
            raise UserError(f"{path}: exists; expected another name, or overwrite=True")


def _encode_result(result: PassResult) -> bytes:
    return train_result(result.logprobs, {"loss:sum": result.loss, "tokens:sum": float(result.tokens)})


def sampler_id(session: str, number: int) -> str:
    """Return the id of a sampling session. `number`: chosen by the client, in its session."""
    return f"{session}:sample:{number}"


def model_id(session: str, number: int) -> str:
    """Return the id of a model, in the format of the client. `number`: chosen by the client, in its session."""
    return f"{session}:train:{number}"
